"""A call whose arguments `max_tokens` cut is given out, and taken back in the next turn."""

import pytest
from kit import CHAT, USER, make_engine, running_server
from scripted import ScriptedRunner, marked_tokenizer, say

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
CUT = '{"city": "Ro'
HEAD = "{# <tool_call>" + ' "arguments": #}'
AS_IT_IS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}{% endfor %}"
    "{% endfor %}"
)
ONLY_OBJECTS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
    "{% endfor %}"
)
ONLY_TEXT = (  # as the templates of DeepSeek V3, V3.1 and R1
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ 'call:' + c['function']['arguments'] + ';' }}{% endfor %}{% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}


@pytest.fixture
def server(request):
    tokenizer = marked_tokenizer(HEAD + "{% if tools %}{% endif %}" + request.param)
    engine = make_engine(
        max_model_len=4096, num_blocks=1024, check=False, runner_kind=ScriptedRunner
    )
    with running_server(engine, tokenizer=tokenizer, grpc=False) as running:
        say(running, CALL)
        yield running


def turns(client) -> tuple[dict, list]:
    """What a chat gives out, cut, and takes back with a result."""
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": USER, "tools": tools, "max_tokens": CALL.index('me",')}
    message = client.post(CHAT, json=body).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == CUT
    result = {"role": "tool", "tool_call_id": call["id"], "content": "!"}
    return body | {"messages": [*USER, message, result]}, tools


@pytest.mark.parametrize("server", [AS_IT_IS, ONLY_OBJECTS], indirect=True, ids=["text", "object"])
def test_a_chat_goes_on(server, client):
    body, _ = turns(client)
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("server", "written"),
    [(AS_IT_IS, f"hi{CUT}!"), (ONLY_OBJECTS, f"hiarguments={CUT}!")],
    indirect=["server"],
    ids=["text", "object"],
)
def test_the_template_gets_the_text(server, client, written):
    body, tools = turns(client)
    plain = {"messages": body["messages"], "tools": tools}
    ids = client.post("/tokenize", json=plain).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == written


@pytest.mark.parametrize("server", [AS_IT_IS], indirect=True, ids=["text"])
def test_a_message_goes_on(server, client):
    """As the API's packages send it back: an object of what had come, or the text of a stream."""
    tools = [{"name": "f", "input_schema": PARAMETERS}]
    body = {"messages": USER, "tools": tools, "max_tokens": CALL.index('me",')}
    answer = client.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "max_tokens"
    (call,) = answer["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "!"}
    for given, length in ((call["input"], 2), (CUT, len(CUT))):
        said = {"role": "assistant", "content": [call | {"input": given}]}
        messages = [*USER, said, {"role": "user", "content": [result]}]
        again = client.post("/v1/messages", json=body | {"messages": messages})
        assert again.status_code == 200, again.text
        assert again.json()["usage"]["input_tokens"] == len("hi!") + length


@pytest.mark.parametrize("server", [AS_IT_IS], indirect=True, ids=["text"])
def test_a_response_goes_on(server, client):
    tools = [{"type": "function", **FUNCTION}]
    body = {"input": USER, "tools": tools, "max_output_tokens": CALL.index('me",')}
    answer = client.post("/v1/responses", json=body).json()
    assert answer["status"] == "incomplete"
    (call,) = answer["output"]
    assert call["arguments"] == CUT
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "!"}
    again = client.post("/v1/responses", json=body | {"input": [*USER, call, output]})
    assert again.status_code == 200, again.text
    assert again.json()["usage"]["input_tokens"] == len(f"hi{CUT}!")


@pytest.mark.parametrize("server", [AS_IT_IS], indirect=True, ids=["text"])
@pytest.mark.parametrize("text", ["[]", "5", "null", "[" * 10**4])
def test_what_is_no_object_is_text(server, client, text):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = client.post("/tokenize", json={"messages": [*USER, said]})
    assert answer.json()["count"] == len("hi" + text)


@pytest.mark.parametrize("server", [ONLY_TEXT], indirect=True, ids=["text"])
@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', CUT, ""])
def test_a_template_that_only_reads_text_gets_text(server, client, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    ids = client.post("/tokenize", json={"messages": [*USER, said]}).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == f"hicall:{arguments or '{}'};"
