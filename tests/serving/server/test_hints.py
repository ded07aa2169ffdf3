"""What agents and clients ask for beside an answer is taken, told of, and never refused."""

import pytest
from kit import CHAT, USER, byte_tokenizer, running_server
from scripted import say, scripted_server

from serving.server.errors import ServeError
from serving.server.hints import take_hints

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
CUSTOM = {"name": "f", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}}
FUNCTION = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}
BODIES = {
    CHAT: {"messages": USER, "max_tokens": 2, "tools": [TOOL]},
    MESSAGES: {"messages": USER, "max_tokens": 2, "tools": [CUSTOM]},
    RESPONSES: {"input": "hi", "max_output_tokens": 2, "tools": [FUNCTION]},
}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
TOLD = [
    (CHAT, {"store": True}, "store"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (MESSAGES, {"context_management": EDITS}, "context_management"),
    (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
    (MESSAGES, {"tools": [SEARCH, CUSTOM]}, "tools.web_search_20250305"),
    (MESSAGES, {"speed": "fast"}, "speed"),
    (RESPONSES, {"store": True}, "store"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"max_tool_calls": 3}, "max_tool_calls"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    (RESPONSES, {"include": ["web_search_call.action.sources"]}, "include"),
    (RESPONSES, {"tools": [FUNCTION, {"type": "web_search"}]}, "tools.web_search"),
]
NOTHING = [
    (CHAT, {"store": False, "service_tier": None, "verbosity": "medium"}),
    (MESSAGES, {"service_tier": "auto", "thinking": {"type": "adaptive", "display": "omitted"}}),
    (RESPONSES, {"store": False, "truncation": "disabled", "text": {"verbosity": "medium"}}),
    (RESPONSES, {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}),
]


@pytest.fixture(scope="module")
def server():
    with scripted_server("hermes", grpc=False) as running:
        say(running, "yes")
        yield running


@pytest.fixture(scope="module")
def strict():
    with scripted_server("hermes", strict=True, grpc=False) as server, server.client() as client:
        say(server, "yes")
        yield client


@pytest.mark.parametrize(("path", "fields", "name"), TOLD, ids=lambda each: repr(each)[:40])
def test_a_hint_is_taken_and_told(strict, path, fields, name):
    answer = strict.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == f'199 shiftjax "ignored fields: {name}"'


@pytest.mark.parametrize(("path", "fields"), NOTHING, ids=lambda each: repr(each)[:40])
def test_what_asks_for_nothing_is_not_told(strict, path, fields):
    """Not even of tools, and by no server that is strict."""
    answer = strict.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    assert "warning" not in answer.headers


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_of_a_tool_is_found_in_every_dialect(client, strict, path):
    tool = BODIES[path]["tools"][0] | {"unheard": 1}
    body = BODIES[path] | {"tools": [tool]}
    assert "tools.unheard" in client.post(path, json=body).headers["warning"]
    refused = strict.post(path, json=body)
    assert refused.status_code == 400 and "tools.unheard" in refused.text


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_tool_that_only_others_run_is_refused_alone(client, path):
    only = {"type": "web_search_20250305" if path == MESSAGES else "web_search", "name": "s"}
    answer = client.post(path, json=BODIES[path] | {"tools": [only]})
    assert answer.status_code == 400 and "tools[0]" in answer.text


def test_the_past_of_another_server_is_left_out(client):
    """Thoughts that only Anthropic can read, and what its servers did."""
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    ]
    said = {"type": "text", "text": "yes"}
    counts = []
    for content in ([said], [*blocks, said]):
        turns = [*USER, {"role": "assistant", "content": content}, *USER]
        turns += [{"role": "assistant", "content": content[:-1]}] * (len(content) > 1)
        turns += [{"role": "user", "content": "so"}]
        answer = client.post(f"{MESSAGES}/count_tokens", json={"messages": turns})
        counts.append(answer.json()["input_tokens"])
    assert counts[0] == counts[1]
    told = ("redacted_thinking", "server_tool_use", "web_search_tool_result")
    assert all(f"messages.content.{name}" in answer.headers["warning"] for name in told)


def test_items_of_another_server_are_left_out(client):
    items = [{"type": "web_search_call", "id": "w", "status": "completed"}, *USER]
    answer = client.post(f"{RESPONSES}/input_tokens", json={"input": items})
    assert answer.json()["input_tokens"] == len("user: hi | assistant:")
    assert "input.web_search_call" in answer.headers["warning"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "xhigh"}),
        (MESSAGES, {"output_config": {"effort": "max"}}),
        (RESPONSES, {"reasoning": {"effort": "high"}}),
    ],
)
def test_the_template_gets_the_effort(path, fields):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ reasoning_effort or 'medium' }}<|channel|><|message|>"
    with running_server(tokenizer=tokenizer) as server, server.client() as client:
        answer = client.post(path, json={"model": None} | _plain(path) | fields)
        assert "warning" not in answer.headers
        counted = answer.json()["usage"]
    used = counted.get("prompt_tokens", counted.get("input_tokens"))
    assert used == len("high<|channel|><|message|>")


def _plain(path: str) -> dict:
    return {name: value for name, value in BODIES[path].items() if name != "tools"}


def test_hints_are_found_by_their_paths():
    table = {"a": (1,), "b.c": (), "d": (False,)}
    body = {"a": 1, "b": {"c": 2, "e": 3}, "d": True, "f": 4}
    assert take_hints(body, table) == ({"b": {"e": 3}, "f": 4}, ("b.c", "d"))
    for wrong in ({"d": 0}, {"a": "1"}, {"b": {"c": "x" * 257}}):
        with pytest.raises(ServeError) as caught:
            take_hints(wrong, table)
        assert caught.value.param == ("b.c" if "b" in wrong else next(iter(wrong)))
    assert take_hints([1], table) == ([1], ())
