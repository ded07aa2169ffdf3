"""Tools, choices and earlier calls that are wrong are refused by name; the server lives on."""

import pytest
from kit import CHAT, USER, is_error
from scripted import scripted_server


def tool(**fields) -> dict:
    return {"type": "function", "function": {"name": "f"} | fields}


def call(arguments) -> dict:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def nested(depth: int) -> dict:
    schema: dict = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


NAMES = ["", "a b", "x" * 65, "\u00e9", 'a"', "a\n", "a.b", "</tool_call>", 5, None]
TOOLS = [
    *([{"type": "function"}], [{}], [5], [None], {}, "f", 5, [{"type": "function", "function": 5}]),
    [{"type": "web_search", "function": {"name": "f"}}],
    *([tool(name=name)] for name in NAMES),
    [tool(), tool()],
    [tool(name=f"f{index}") for index in range(513)],
    *([tool(parameters=value)] for value in ([], "x", 5, {"type": "string"}, {"type": ["object"]})),
    [tool(parameters=nested(40))],
    *([tool(parameters=nested(400))], [tool(description="x" * (1 << 20))]),
    *([tool(description=5)], [tool(strict="yes")]),
]
CHOICES = [
    *("any", "", 5, True, [], {}, {"type": "function"}, {"type": "function", "function": "f"}),
    {"type": "function", "function": {"name": "g"}},
    {"type": "x", "function": {"name": "f"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
]
DEEP = '{"a":' * 40 + "1" + "}" * 40
CALLS = [
    *(5, "x", {}, [5], [{}], [{"function": {"name": 5}}], [call("{}") | {"type": "x"}]),
    [call(DEEP)],
    *([call(5)], [call("{}") | {"id": 5}], [call("{}")] * 513),
]
FORCED = {"tools": [tool()], "tool_choice": "required"}
BAD = [
    *(({"tools": tools}, "tools") for tools in TOOLS),
    *(({"tools": [tool()], "tool_choice": choice}, "tool_choice") for choice in CHOICES),
    *(({"tool_choice": choice}, "tool_choice") for choice in ["required", CHOICES[8]]),
    *(
        ({"messages": [*USER, {"role": "assistant", "tool_calls": calls}]}, "messages")
        for calls in CALLS
    ),
    ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [tool()], "response_format": {"type": "json"}}, "response_format"),
    ({"tools": [tool()], "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"tools": [tool()], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    (FORCED | {"min_tokens": 2}, "min_tokens"),
    (FORCED | {"ignore_eos": True}, "ignore_eos"),
    (FORCED | {"tools": [tool(parameters={"properties": 5})]}, "tools"),
    (FORCED | {"tools": [tool(parameters={"$ref": "#/nowhere"})]}, "tools"),
    (FORCED | {"tools": [tool(strict=True, parameters={"not": {}})]}, "tools"),
    (FORCED | {"tools": [tool(parameters={"description": "a" * 300_000})]}, "tools"),
]


@pytest.fixture(scope="module")
def server():
    with scripted_server("hermes") as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: repr(value)[:60])
def test_bad_tools(client, fields, param, stream):
    body = {"messages": USER, "stream": stream} | fields
    is_error(client.post(CHAT, json=body), 400, param)


def test_unknown_fields_of_tools_are_named(client):
    body = {"messages": USER, "tools": [tool(x=1) | {"y": 2}]}
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200
    assert "tools.function.x" in answer.headers["warning"]
    assert "tools.y" in answer.headers["warning"]
