"""Anthropic's messages become chats, and pieces of output become its blocks and events."""

import json

import pytest
from pieces_kit import CITY, SCRIPT, generation_of, said

from serving.server.dialects import asked
from serving.server.dialects.asked import renamed
from serving.server.dialects.messages import NAMES, read_count, read_messages
from serving.server.dialects.messages_writer import MessagesWriter, error_body
from serving.server.errors import KINDS, ServeError
from serving.server.schema import Wish

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
HI = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Ulm"}}
CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Ulm"}'},
}


def body(**fields) -> dict:
    return {"max_tokens": 2000, "messages": [HI]} | fields


@pytest.fixture
def chat(monkeypatch):
    """What is made of a body, as the values of a chat, whatever chats support."""
    seen = []

    def keep(values) -> Wish:
        seen.append(values)
        plain = {"messages", "max_tokens", "stream"}
        return read_chat({name: value for name, value in values.items() if name in plain})

    read_chat = asked.read_chat
    monkeypatch.setattr(asked, "read_chat", keep)

    def values_of(**fields) -> dict:
        read_messages(body(**fields))
        return seen[-1]

    return values_of


def test_plain_fields():
    wish = read_messages(
        body(
            system="Be short.",
            stop_sequences=["x"],
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            stream=True,
            metadata={"user_id": "me"},
            seed=3,
            service_tier="auto",
            new=1,
        )
    )
    sampling = wish.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (2000, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, sampling.stop) == (7, 3, ("x",))
    assert wish.fields.messages == [{"role": "system", "content": "Be short."}, HI]
    assert (wish.fields.stream, wish.fields.user, wish.unknown) == (True, "me", ("new",))


def test_blocks_are_messages_of_a_chat(chat):
    text = {"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "7"}]}
    failed = {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages = [
        {"role": "user", "content": [text, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": [thought, USE]},
        {"role": "user", "content": [result, failed, text]},
    ]
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert chat(messages=messages, system=[text])["messages"] == [
        {"role": "system", "content": parts[:1]},
        {"role": "user", "content": parts},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "7"}]},
        {"role": "tool", "tool_call_id": "b", "content": "no", "is_error": True},
        {"role": "user", "content": parts[:1]},
    ]


def test_tools_are_functions(chat):
    function = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
    assert chat(tools=[TOOL])["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_the_choice_of_a_tool(chat, choice, wanted):
    values = chat(tools=[TOOL], tool_choice=choice)
    names = "tool_choice", "parallel_tool_calls"
    assert {name: values[name] for name in names if name in values} == wanted


def test_a_form_of_the_answer_and_thinking(chat):
    form = {"type": "json_schema", "schema": SCHEMA}
    values = chat(output_config={"format": form, "effort": "low"}, thinking={"type": "disabled"})
    assert values["response_format"]["json_schema"]["schema"] == SCHEMA
    assert values["reasoning_effort"] == "low"
    assert values["chat_template_kwargs"] == {"enable_thinking": False}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert chat(thinking=thinking)["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", "8"),
        ("messages", []),
        ("messages", [{"role": "bishop", "content": ""}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "user", "content": [USE]}]),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_result"}]}, HI]),
        ("system", [{"type": "thinking", "thinking": ""}]),
        ("stop_sequences", ["x"] * 1000),
        ("stop_sequences", [""]),
        ("stop_sequences", "x"),
        ("metadata", {"user_id": "a\nb"}),
        ("tools", [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]),
        ("tools", [{"name": "x"}]),
        ("tool_choice", {"type": "tool"}),
        ("tool_choice", {"type": "auto", "name": "x"}),
        ("thinking", {"type": "enabled"}),
        ("thinking", {"type": "enabled", "budget_tokens": 1023}),
        ("thinking", {"type": "enabled", "budget_tokens": 2000}),
        ("output_config", {"format": {"type": "xml", "schema": {}}}),
        ("container", "x"),
        ("mcp_servers", [1]),
    ],
)
def test_what_is_wrong_is_named(field, value):
    with pytest.raises(ServeError) as caught:
        read_messages(body(**{field: value}))
    error = renamed(caught.value, NAMES)
    assert error.kind.status == 400
    assert error.message.startswith(field)
    assert (error.param or "").startswith(field)


def test_a_count_needs_no_limit():
    assert read_count({"messages": [HI]}).fields.messages == [HI]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_a_type_of_anthropics(kind):
    error = error_body(ServeError(kind, "words"))["error"]
    assert error["type"].endswith("_error") or error["type"] == "request_too_large"
    assert error["message"] == "words"


# ---------------------------------------------------------------- what is written


def test_a_whole_message():
    wish = read_messages(body())
    message = MessagesWriter(generation_of(wish, finish="stop"), None).encoded()
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm, so", "signature": ""},
        {"type": "text", "text": "Look:"},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": CITY}},
        {"type": "tool_use", "id": "call_2", "name": "time", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 2,
    }


def test_a_stream_says_the_same():
    wish = read_messages(body(stream=True))
    events = said(MessagesWriter(generation_of(wish, finish="stop"), None), SCRIPT)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict] = []
    is_open = False
    for event in events[2:-2]:
        kind = event["type"].removeprefix("content_block_")
        assert is_open == (kind != "start"), "one block at a time"
        is_open = kind != "stop"
        if kind == "start":
            blocks.append(event["content_block"] | {"json": ""})
        assert event["index"] == len(blocks) - 1
        if kind == "delta":
            (name, more) = next(pair for pair in event["delta"].items() if pair[0] != "type")
            name = "json" if name == "partial_json" else name
            blocks[-1][name] += more
    whole = MessagesWriter(generation_of(wish, finish="stop"), None).encoded()
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments or "{}")
    assert blocks == whole["content"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", 257, "end_turn", None),
        ("stop", "###", "stop_sequence", "###"),
        ("length", None, "max_tokens", None),
    ],
)
def test_why_it_ended(finish, stop, reason, sequence):
    wish = read_messages(body())
    generation = generation_of(wish, script=[[], []], finish=finish, stop=stop)
    message = MessagesWriter(generation, None).encoded()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_arguments_that_were_cut_are_no_object():
    script = [[*SCRIPT[2][:1]], []]
    generation = generation_of(read_messages(body()), script=script, finish="length")
    message = MessagesWriter(generation, None).encoded()
    assert message["content"][-1]["input"] == {}
    assert message["stop_reason"] == "max_tokens"


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"tools": [TOOL | {"input_schema": nested(40)}]}, "tools[0].input_schema"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
    ],
)
def test_places_are_those_of_the_body(fields, start):
    with pytest.raises(ServeError) as caught:
        read_messages(body(**fields))
    error = renamed(caught.value, NAMES)
    assert error.message.startswith(start)
    assert error.param == start


def test_a_place_among_the_messages_of_the_chat_is_not_told():
    turns = [HI, {"role": "assistant", "content": [USE | {"input": nested(40)}]}, HI]
    with pytest.raises(ServeError) as caught:
        read_messages(body(system="x", messages=turns))
    error = renamed(caught.value, NAMES)
    assert error.param == "messages"
    assert error.message.startswith("messages tool_calls[0]")


def test_a_sequence_that_stops_after_a_call_is_why_it_ended():
    generation = generation_of(read_messages(body()), finish="stop", stop="###")
    message = MessagesWriter(generation, None).encoded()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "###")


def test_a_tool_that_was_found_is_told(chat):
    found = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found]}
    turns = [HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    (part,) = chat(messages=turns)["messages"][-1]["content"]
    assert "weather" in part["text"]


def test_the_line_that_differs_with_every_request_is_left_out(chat):
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"}
    told = {"type": "text", "text": "Be short."}
    assert chat(system=[line, told])["messages"][0] == {"role": "system", "content": [told]}
    assert chat(system=[line])["messages"] == [HI]


def test_a_thread_is_refused_so_that_packages_send_all_messages():
    with pytest.raises(ServeError) as caught:
        read_messages(body(thread={"type": "create"}))
    error = error_body(renamed(caught.value, NAMES))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"]["error_code"] == "thread_unsupported_request"
    assert read_messages(body(thread=None)).unknown == ()
