"""What clients of other servers send is served, or refused by name, and never dropped."""

import pytest
from kit import CHAT, COMPLETION, USER, is_error, running_server

from serving.server.refused_fields import REFUSED

CHAT_BODY = {"messages": USER, "max_tokens": 3}
BODIES = {COMPLETION: {"prompt": "x", "max_tokens": 3}, CHAT: CHAT_BODY}
OF_BOTH = [
    *({name: None} for name in REFUSED if "." not in name),
    *({"best_of": 1}, {"suffix": ""}, {"tools": []}, {"tool_choice": "none"}, {"functions": []}),
    *({"store": False}, {"service_tier": "auto"}, {"parallel_tool_calls": False}, {"user": "me"}),
    *({"metadata": {"a": "b"}}, {"modalities": ["text"]}, {"prompt_cache_key": "a"}),
    *({"skip_special_tokens": True}, {"spaces_between_special_tokens": True}, {"stop": []}),
    *({"bad_words": []}, {"length_penalty": 1}, {"use_beam_search": False}, {"echo": False}),
    *({"frequency_penalty": 0}, {"presence_penalty": 0}, {"temperature": 0}, {"top_p": 1}),
    *({"repetition_penalty": 1}, {"logit_bias": {}}, {"top_logprobs": 0}, {"top_k": -1}),
    *({"stop_token_ids": []}, {"response_format": {"type": "text", "json_schema": None}}),
    *({"max_completion_tokens": 3}, {"stream": False, "stream_options": None}),
    {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": False}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": None}}},
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "content": "", "tool_call_id": "1"}
TOOL = {"type": "function", "function": {"name": "f"}}
OF_CHATS = [
    *({"logprobs": False, "top_logprobs": 0}, {"logprobs": True}, {"add_special_tokens": False}),
    *({"add_generation_prompt": True}, {"continue_final_message": False}),
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [{"role": "developer", "content": "x"}, *USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [*USER, {"role": "assistant", "content": None, "refusal": None}, *USER]},
    {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]},
    {"messages": USER, "tools": [TOOL], "tool_choice": "none", "max_tokens": 1},
]
OF_COMPLETIONS = [
    *({"logprobs": 0}, {"add_special_tokens": True}, {"prompt": [[1], [2]]}, {"messages": None}),
]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, fields) for path in (COMPLETION, CHAT) for fields in OF_BOTH),
        *((CHAT, fields) for fields in OF_CHATS),
        *((COMPLETION, fields) for fields in OF_COMPLETIONS),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_clients_send_is_served(client, path, fields):
    response = client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    assert "warning" not in response.headers


def test_an_assistant_that_said_nothing(client):
    """null is an empty text to a template, not the word None."""
    said = [{"role": "assistant", "content": text} for text in ("", None)]
    counts = {client.post("/tokenize", json={"messages": [each]}).json()["count"] for each in said}
    assert counts == {len("assistant: \nassistant:")}


@pytest.mark.parametrize("add", [True, False])
def test_special_tokens_can_be_left_out(client, add):
    body = {"prompt": "ab", "max_tokens": 1, "add_special_tokens": add}
    plain = client.post("/tokenize", json={"prompt": "ab", "add_special_tokens": add})
    used = client.post(COMPLETION, json=body).json()["usage"]["prompt_tokens"]
    assert used == plain.json()["count"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETION, {"best_of": True}, "best_of"),
        (COMPLETION, {"use_beam_search": 0}, "use_beam_search"),
        (COMPLETION, {"guided_json": {"type": "object"}}, "guided_json"),
        (COMPLETION, {"regex": "a"}, "regex"),
        (COMPLETION, {"top_logprobs": 3}, "top_logprobs"),
        (COMPLETION, {"messages": USER}, "messages"),
        (COMPLETION, {"reasoning_effort": "low"}, "reasoning_effort"),
        (COMPLETION, {"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        (COMPLETION, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        (CHAT, {"prompt": "x"}, "prompt"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
    ],
)
def test_what_is_not_done_is_refused(client, path, fields, param):
    response = client.post(path, json=BODIES[path] | fields)
    is_error(response, 400, param)
    assert response.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize", "/detokenize"])
def test_unknown_fields_everywhere(client, path):
    body = {**BODIES, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}[path]
    response = client.post(path, json=body | {"unheard_of": 1})
    assert "unheard_of" in response.headers["warning"]
    with running_server(strict=True, grpc=False) as server, server.client() as strict:
        is_error(strict.post(path, json=body | {"unheard_of": 1}), 400, "unheard_of")


def test_unknown_fields_are_told(client):
    response = client.post(COMPLETION, json={"prompt": "x", "tempreature": 1, "ignored\r\n": 2})
    assert response.status_code == 200
    assert "tempreature" in response.headers["warning"]


def test_unknown_fields_are_refused_if_strict():
    with running_server(strict=True) as server, server.client() as client:
        response = client.post(COMPLETION, json={"prompt": "x", "tempreature": 1})
        is_error(response, 400, "tempreature")


def test_unknown_fields_inside(client):
    format = {"type": "text", "unheard": 1}
    response = client.post(COMPLETION, json={"prompt": "x", "response_format": format})
    assert "response_format.unheard" in response.headers["warning"]
