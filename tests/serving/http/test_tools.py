"""Tools over HTTP: calls of a model that says what it is told, whole and streamed."""

import json

import pytest
from kit import CHAT, COMPLETION, USER, events, is_error
from scripted import say, scripted_server

from serving.server.vllm_answers import CHOICE, MESSAGE

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
BODY = {"messages": USER, "tools": [WEATHER, TIME], "seed": 1}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server():
    with scripted_server("hermes") as running:
        yield running


def ask(client, body: dict) -> list[dict]:
    """The choices, which must be the same when they are streamed, but for the ids of calls."""
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post(CHAT, json=body | stream).text)
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    choices = whole["choices"]
    streamed = [joined(chunks, choice["index"]) for choice in choices]
    assert [without_ids(each) for each in streamed] == [without_ids(each) for each in choices]
    return choices


def joined(chunks: list[dict], index: int) -> dict:
    """What a client makes of the deltas of one choice."""
    message: dict = {"content": None, "refusal": None} | MESSAGE
    choice: dict = {"index": index, "logprobs": None} | CHOICE
    for each in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        delta = each["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        message |= {"role": delta["role"]} if "role" in delta else {}
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["function"]["arguments"] == ""
                calls.append({name: call[name] for name in ("id", "type", "function")})
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if each["logprobs"]:
            made = (choice["logprobs"] or {"content": []})["content"]
            choice["logprobs"] = {"content": made + each["logprobs"]["content"]}
        assert "finish_reason" not in choice, "something follows the end"
        if each["finish_reason"]:
            choice |= {name: each[name] for name in ("finish_reason", "stop_reason")}
    return choice | {"message": message}


def without_ids(choice: dict) -> dict:
    return json.loads(json.dumps(choice), object_hook=lambda each: each | {"id": 0})


def test_a_call(server, client):
    say(server, CALL)
    (choice,) = ask(client, BODY)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 2}
    assert choice["message"]["content"] is None


def test_text_and_several_calls(server, client):
    say(server, f"Let me see.\n{CALL}\n{CALL}")
    choices = ask(client, BODY | {"n": 2, "logprobs": True, "top_logprobs": 1})
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids) == 4
    assert {choice["message"]["content"] for choice in choices} == {"Let me see."}
    (choice,) = ask(client, BODY | {"parallel_tool_calls": False})
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [TIME]}])
def test_what_only_looks_like_a_call_is_text(server, client, fields):
    say(server, CALL)
    (choice,) = ask(client, {"messages": USER} | fields)
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    (choice,) = ask(client, BODY | {"tool_choice": "none"})
    assert choice["message"]["content"] == CALL


def test_a_call_that_is_cut(server, client):
    say(server, CALL)
    (choice,) = ask(client, BODY | {"max_tokens": 60})
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert '{"city": "Rome", "days": 2}'.startswith(arguments)
    (choice,) = ask(client, BODY | {"max_tokens": 20})
    assert choice["message"]["content"] == CALL[:20]


def test_a_stop_string_inside_a_call(server, client):
    say(server, CALL)
    (choice,) = ask(client, BODY | {"stop": ["me"]})
    assert choice["stop_reason"] == "me"
    assert choice["message"]["content"].startswith("<tool_call>")
    (choice,) = ask(client, BODY | {"stop": ["Rome"]})
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert choice["finish_reason"] == "stop"


def test_a_conversation_goes_on(server, client):
    say(server, CALL)
    (choice,) = ask(client, BODY)
    calls = choice["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"}
    messages = [*USER, choice["message"], result]
    assert CALL not in str(messages)
    say(server, "It is sunny.")
    (choice,) = ask(client, {"messages": messages, "tools": [WEATHER]})
    assert choice["message"]["content"] == "It is sunny."


def test_the_template_gets_tools_and_arguments_as_objects(server, client):
    function = {"name": "f", "arguments": '{"a": "é"}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": function}],
    }
    body = {"messages": [*USER, called], "tools": [TIME]}
    ids = client.post("/tokenize", json=body).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    tool = '{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"'
    assert text.startswith(tool)
    assert text.endswith("| user: hi | assistant: é | assistant:")


def test_a_call_in_the_question_is_a_question(server, client):
    say(server, "No.")
    question = [{"role": "user", "content": f"Say {CALL}"}]
    (choice,) = ask(client, BODY | {"messages": question})
    assert choice["message"]["content"] == "No."
    assert "tool_calls" not in choice["message"]


def test_two_hundred_tools(server, client):
    say(server, '<tool_call>{"name": "f199", "arguments": {}}</tool_call>')
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]
    (choice,) = ask(client, {"messages": USER, "tools": tools})
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f199"


@pytest.mark.parametrize("said", ["I'd rather not.", CALL, "<tool_call>\n{}"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
)
def test_forced_calls(server, client, said, choice, names):
    say(server, said)
    for made in ask(client, BODY | {"tool_choice": choice, "n": 3}):
        assert made["finish_reason"] == "tool_calls"
        assert made["message"]["content"] is None
        for call in made["message"]["tool_calls"]:
            assert call["function"]["name"] in names
            arguments = json.loads(call["function"]["arguments"])
            assert set(arguments) in ({"city", "days"}, set())


def test_a_strict_tool(server, client):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    say(server, 'Look: <tool_call>\n{"name": "get_weather", "arguments": {"town": "Rome"')
    body = BODY | {"tools": [strict], "max_tokens": 150, "parallel_tool_calls": False}
    (choice,) = ask(client, body)
    (call,) = choice["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
    say(server, "No call.")
    (choice,) = ask(client, body)
    assert choice["message"]["content"] == "No call."


def test_completions_have_no_tools(server, client):
    say(server, CALL)
    answer = client.post(COMPLETION, json={"prompt": "x", "max_tokens": 500}).json()
    assert answer["choices"][0]["text"] == CALL


# ---------------------------------------------------------------- with a form of the answer

FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"said": {"type": "string", "maxLength": 60}},
            "required": ["said"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("said", [CALL, f"{CALL}\n{CALL}"])
def test_tools_with_a_form_may_be_called(server, client, said):
    say(server, said)
    for choice in ask(client, BODY | {"response_format": FORM, "n": 2}):
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls" and message["content"] is None
        assert len(message["tool_calls"]) == said.count("<tool_call>")
        for call in message["tool_calls"]:
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize(
    "text", ["sunny", "<tool_call>", CALL[:40].replace("\n", " ").replace('"', "'")]
)
def test_an_answer_beside_tools_has_its_form(server, client, text):
    """Marks of calls within its strings are data."""
    answer = json.dumps({"said": text})
    say(server, answer)
    (choice,) = ask(client, BODY | {"response_format": FORM})
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == answer
    assert "tool_calls" not in choice["message"]


def test_what_is_neither_a_call_nor_of_the_form_is_not_said(server, client):
    say(server, "It is sunny.")
    for choice in ask(client, BODY | {"response_format": FORM, "n": 4}):
        message = choice["message"]
        if "tool_calls" not in message:
            assert json.loads(message["content"]).keys() == {"said"}


@pytest.mark.parametrize(
    "constraint", [{"regex": "s/[a-z]+"}, {"choice": ["s/x", "rainy"]}, {"grammar": 'start: "s/x"'}]
)
def test_other_constraints_beside_tools(server, client, constraint):
    for said, is_call in (("s/x", False), (CALL, True)):
        say(server, said)
        (choice,) = ask(client, BODY | {"structured_outputs": constraint})
        assert ("tool_calls" in choice["message"]) is is_call
        assert is_call or choice["message"]["content"] == "s/x"


def test_a_call_within_an_answer_is_text(server, client):
    answer = f"Say {CALL}"
    say(server, answer)
    (choice,) = ask(client, BODY | {"structured_outputs": {"choice": [answer, "no"]}})
    assert choice["message"]["content"] == answer
    assert "tool_calls" not in choice["message"]


def test_a_form_has_no_effect_on_a_forced_call(server, client):
    say(server, '{"said": "no"}')
    (choice,) = ask(client, BODY | {"response_format": FORM, "tool_choice": "required"})
    assert choice["message"]["tool_calls"] and choice["message"]["content"] is None


def test_a_form_that_cannot_be_kept_beside_tools_is_refused(client):
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    answer = client.post(CHAT, json=BODY | {"response_format": form})
    is_error(answer, 400, "response_format")


# ---------------------------------------------------------------- some of the tools


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called_and_all_are_told(server, client):
    say(server, CALL)
    body = BODY | {"tool_choice": allowed("auto", "get_time"), "max_tokens": 120}
    for choice in ask(client, body | {"n": 3}):
        names = {call["function"]["name"] for call in choice["message"].get("tool_calls", ())}
        assert names <= {"get_time"}
    used = [client.post(CHAT, json=each).json()["usage"] for each in (body, BODY)]
    assert used[0]["prompt_tokens"] == used[1]["prompt_tokens"]
    say(server, "No call.")
    (choice,) = ask(client, body)
    assert choice["message"]["content"] == "No call."
    say(server, CALL)
    (choice,) = ask(client, BODY | {"tool_choice": allowed("auto", "get_weather")})
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_allowed_tools_may_be_required(server, client):
    say(server, "No call.")
    for choice in ask(client, BODY | {"tool_choice": allowed("required", "get_time"), "n": 3}):
        assert {c["function"]["name"] for c in choice["message"]["tool_calls"]} == {"get_time"}


def test_allowed_tools_of_a_response(server, client):
    say(server, CALL)
    names = [{"type": "function", "name": "get_time"}]
    body = {
        "input": USER,
        "tools": [{"type": "function"} | each["function"] for each in (WEATHER, TIME)],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": names},
        "max_output_tokens": 200,
        "seed": 1,
    }
    items = client.post("/v1/responses", json=body).json()["output"]
    assert items and {item["name"] for item in items} == {"get_time"}
    names[0]["name"] = "other"
    is_error(client.post("/v1/responses", json=body), 400, "tool_choice")


@pytest.mark.parametrize("choice", ["none", "auto", None, "required"])
def test_a_choice_among_no_tools(server, client, choice):
    """An empty list leaves nothing to require; a choice without a list is refused if it demands."""
    say(server, "Yes.")
    (made,) = ask(client, {"messages": USER, "tools": [], "tool_choice": choice})
    assert made["message"]["content"] == "Yes."
    answer = client.post(CHAT, json={"messages": USER, "tool_choice": choice})
    if choice == "required":
        is_error(answer, 400, "tool_choice")
    else:
        assert answer.status_code == 200


# ---------------------------------------------------------------- functions in namespaces


def test_a_function_in_a_namespace(server, client):
    """As Codex sends tools of MCP servers; a call names both, and comes back so."""
    function = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
    space = {"type": "namespace", "name": "mcp__rome", "description": "", "tools": [function]}
    plain = function | {"name": "get_time"}
    body = {"input": USER, "tools": [plain, space], "max_output_tokens": 200}
    say(server, CALL.replace("get_weather", "mcp__rome__get_weather"))
    whole = client.post("/v1/responses", json=body)
    assert "warning" not in whole.headers
    (item,) = whole.json()["output"]
    assert (item["namespace"], item["name"]) == ("mcp__rome", "get_weather")
    lines = client.post("/v1/responses", json=body | {"stream": True}).text.splitlines()
    made = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    streamed = [each["item"] for each in made if each["type"] == "response.output_item.done"]
    assert [(each["namespace"], each["name"]) for each in streamed] == [
        ("mcp__rome", "get_weather")
    ]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
    say(server, "Sun.")
    again = client.post("/v1/responses", json=body | {"input": [*USER, item, result]})
    assert again.json()["output"][0]["content"][0]["text"] == "Sun."
    twice = body | {"tools": [plain, space, plain | {"name": "mcp__rome__get_weather"}]}
    is_error(client.post("/v1/responses", json=twice), 400, "tools")


def test_a_tool_that_takes_a_text(server, client):
    """As Codex sends its patches; the model writes it as the only argument of a function."""
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    tool = {"type": "custom", "name": "patch", "description": "Of files", "format": form}
    body = {"input": USER, "tools": [tool], "max_output_tokens": 200}
    say(server, '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>')
    whole = client.post("/v1/responses", json=body)
    assert "warning" not in whole.headers
    (item,) = whole.json()["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "a\nb")
    lines = client.post("/v1/responses", json=body | {"stream": True}).text.splitlines()
    made = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    text = "".join(e["delta"] for e in made if e["type"] == "response.custom_tool_call_input.delta")
    (last,) = (e["item"] for e in made if e["type"] == "response.output_item.done")
    assert text == last["input"] == "a\nb"
    assert not any("function_call" in e["type"] for e in made)
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    say(server, "Done.")
    again = client.post("/v1/responses", json=body | {"input": [*USER, item, result]})
    assert again.json()["output"][0]["content"][0]["text"] == "Done."
