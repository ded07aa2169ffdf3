"""Each format over HTTP; a mark that is a special token; no tools in a template; reasoning."""

import json

import pytest
from kit import CHAT, USER, events
from scripted import MARK, TEMPLATES, say, scripted_server

TOOL = {"type": "function", "function": {"name": "f", "description": "it"}}
PARTS = ("reasoning_content", "content")
BODY = {"messages": USER, "tools": [TOOL]}
CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": MARK + '[{"name": "f", "arguments": {"a": 1}}]',
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.f <|constrain|>json<|message|>{"a": 1}',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
    "</function>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "gemma4": "<|tool_call>call:f{a:1}<tool_call|>",
    "smollm2": '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>',
}


def message_of(client, body: dict) -> dict:
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def prompt_of(client, body: dict) -> str:
    ids = client.post("/tokenize", json=body).json()["tokens"]
    return client.post("/detokenize", json={"tokens": ids}).json()["prompt"]


@pytest.mark.parametrize("kind", sorted(CALLS))
def test_a_call_and_a_forced_one(kind):
    with scripted_server(kind) as server, server.client() as client:
        say(server, CALLS[kind])
        message = message_of(client, BODY)
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert len(call["id"]) == {"mistral": 9, "kimi_k2": len("functions.f:0")}.get(kind, 29)
        assert message.get("reasoning_content") == ("Hm." if kind == "openai" else None)
        assert message["content"] is None
        say(server, CALLS[kind].replace('"a": 1', ""))
        for made in message_of(client, BODY | {"tool_choice": "required"})["tool_calls"]:
            assert json.loads(made["function"]["arguments"]) == {}
        server.assert_quiescent()


def test_a_template_that_knows_no_tools():
    """The model is told of them; earlier calls and their results are text."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    with scripted_server("smollm2") as server, server.client() as client:
        text = prompt_of(client, {"messages": messages, "tools": [TOOL]})
        assert text.startswith("system: Be brief.\n\nYou are")
        assert '"name":"f"' in text
        assert 'assistant: <tool_call>[{"name":"f","arguments":{}}]</tool_call>' in text
        assert text.endswith("user: <tool_response>\n5\n</tool_response> | assistant:")
        assert prompt_of(client, {"messages": USER}) == "user: hi | assistant:"


def test_a_model_that_thinks():
    with scripted_server("think") as server, server.client() as client:
        say(server, "a\n</think>\n\nb")
        message = message_of(client, {"messages": USER})
        assert message["content"] == "b"
        assert message["reasoning_content"] == message["reasoning"] == "a"
        wanted = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"]}}}
        message = message_of(client, {"messages": USER, "response_format": wanted})
        assert message["content"] == '"x"'


def test_a_model_that_thinks_although_nobody_opened_its_thoughts():
    """R1's first template: streamed, and with a prompt that says that there shall be none."""
    with (
        scripted_server("hermes", reasoning_parser="deepseek_r1") as server,
        server.client() as client,
    ):
        say(server, "a\n</think>\n\nb")
        message = message_of(client, {"messages": USER})
        assert (message["reasoning_content"], message["content"]) == ("a", "b")
        text = client.post(CHAT, json={"messages": USER, "stream": True}).text
        deltas = [each["choices"][0]["delta"] for each in events(text) if each["choices"]]
        parts = [[each.get(name) or "" for each in deltas] for name in PARTS]
        assert ["".join(part) for part in parts] == ["a", "b"]
        say(server, CALLS["hermes"])  # a call ends thoughts, too
        (call,) = message_of(client, BODY)["tool_calls"]
        assert call["function"]["arguments"] == '{"a": 1}'
        said = {"role": "assistant", "content": "</think>"}
        say(server, "b")
        plain = {"messages": [*USER, said], "add_generation_prompt": False}
        message = message_of(client, plain | {"continue_final_message": True})
        assert message["content"] == "b" and not message.get("reasoning_content")


def test_what_the_settings_say():
    with scripted_server("hermes", tool_parser="none") as server, server.client() as client:
        answer = client.post(CHAT, json=BODY)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "tools_unsupported"
        say(server, CALLS["hermes"])
        assert message_of(client, {"messages": USER})["content"] == CALLS["hermes"]
    with scripted_server("think", reasoning_parser="none") as server, server.client() as client:
        say(server, "a</think>b")
        assert message_of(client, {"messages": USER})["content"] == "a</think>b"
    assert set(CALLS) | {"think"} == set(TEMPLATES)
