"""OpenAI's responses become chats, and pieces of output become its items and events."""

import pytest
from pieces_kit import CITY, SCRIPT, generation_of, said

from serving.server.dialects import asked
from serving.server.dialects.asked import renamed
from serving.server.dialects.responses_api import LOGPROBS, NAMES, read_count, read_response
from serving.server.dialects.responses_api_writer import ResponsesWriter
from serving.server.errors import ServeError, internal_error
from serving.server.schema import Wish

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
FUNCTION = {"name": "weather", "parameters": SCHEMA, "strict": True}
CALL = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}


@pytest.fixture
def chat(monkeypatch):
    """What is made of a body, as the values of a chat, whatever chats support."""
    seen = []
    read_chat = asked.read_chat

    def keep(values) -> Wish:
        seen.append(values)
        return read_chat({"messages": values["messages"]})

    monkeypatch.setattr(asked, "read_chat", keep)

    def values_of(**fields) -> dict:
        read_response({"input": "hi"} | fields)
        return seen[-1]

    return values_of


def test_plain_fields():
    wish = read_response(
        {
            "input": "hi",
            "instructions": "Be short.",
            "max_output_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "stream": True,
            "metadata": {"a": "b"},
            "include": [],
            "store": False,
            "truncation": "disabled",
            "previous_response_id": None,
            "stream_options": {"include_obfuscation": False},
            "seed": 3,
            "new": 1,
        }
    )
    sampling = wish.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.9)
    assert (sampling.seed, wish.fields.stream, wish.fields.metadata) == (3, True, {"a": "b"})
    assert wish.unknown == ("new",)
    assert wish.fields.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
    ]


def test_items_are_messages_of_a_chat(chat):
    thought = {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    said_before = {
        "type": "message",
        "id": "msg",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Look:", "annotations": []}],
    }
    items = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "A"}]},
        thought,
        said_before,
        CALL,
        CALL | {"call_id": "b", "id": "fc", "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": "7"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "8"}],
        },
        CALL | {"call_id": "c"},
    ]
    function = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert chat(input=items)["messages"] == [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "A"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Look:"}],
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a"} | function, {"id": "b"} | function],
        },
        {"role": "tool", "tool_call_id": "a", "content": "7"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "8"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c"} | function]},
    ]


def test_what_an_assistant_said_twice_stays_two_turns(chat):
    items = [{"role": "assistant", "content": each} for each in ("a", "b")]
    assert [each["content"] for each in chat(input=items)["messages"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        (
            {"type": "function", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
    ],
)
def test_tools_are_functions(chat, choice, wanted):
    values = chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert values["tools"] == [{"type": "function", "function": FUNCTION}]
    assert values["tool_choice"] == wanted
    assert values["parallel_tool_calls"] is False


def test_a_form_of_the_text(chat):
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    values = chat(text={"format": form}, reasoning={"effort": "low"})
    json_schema = {"name": "x", "schema": SCHEMA, "strict": True}
    assert values["response_format"] == {"type": "json_schema", "json_schema": json_schema}
    assert values["reasoning_effort"] == "low"
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {
        "type": "json_object"
    }


def test_log_probabilities_are_asked_for():
    asked = {"input": "hi", "include": [LOGPROBS]}
    assert read_response({"input": "hi"}).sampling.logprobs is None
    assert read_response(asked).sampling.logprobs == 0
    assert read_response(asked | {"top_logprobs": 3}).sampling.logprobs == 3
    tool = {"type": "function", "name": "f"}
    assert read_response(asked | {"tools": [tool], "tool_choice": "none"}).sampling.logprobs == 0
    for more, field in (({"tools": [tool]}, "include"), ({"top_logprobs": -1}, "top_logprobs")):
        with pytest.raises(ServeError) as caught:
            read_response(asked | more)
        assert renamed(caught.value, NAMES).message.startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", None),
        ("input", []),
        ("input", [{"role": "bishop", "content": ""}]),
        ("input", [{"content": "x"}]),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
        ("instructions", 5),
        ("max_output_tokens", 0),
        ("max_output_tokens", -1),
        ("max_output_tokens", "9"),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "function"}),
        ("text", {"format": {"type": "json_schema", "name": "x"}}),
        ("top_logprobs", -1),
        ("store", 0),
        ("background", 1),
        ("previous_response_id", 3),
        ("conversation", {"name": "x"}),
        ("prompt", {"id": "x"}),
        ("top_logprobs", 1),
        ("metadata", {"a": 1}),
        ("safety_identifier", "a\nb"),
    ],
)
def test_what_is_wrong_is_named(field, value):
    with pytest.raises(ServeError) as caught:
        read_response({"input": "hi"} | {field: value})
    error = renamed(caught.value, NAMES)
    assert error.kind.status == 400
    assert error.message.startswith(field)
    assert (error.param or "").startswith(field)


def test_a_count_needs_no_more_than_the_input():
    assert read_count({"input": "hi"}).fields.messages == [{"role": "user", "content": "hi"}]


# ---------------------------------------------------------------- what is written


def writer_of(**options) -> ResponsesWriter:
    wish = read_response({"input": "hi", "max_output_tokens": 9, "metadata": {"a": "b"}})
    return ResponsesWriter(generation_of(wish, **options), None)


def test_a_whole_response():
    response = writer_of().encoded()
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert (response["id"], response["model"], response["object"]) == ("resp_r", "tiny", "response")
    assert (response["metadata"], response["max_output_tokens"]) == ({"a": "b"}, 9)
    thought, text, weather, time = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm, so"}]
    assert (text["role"], text["content"][0]["text"]) == ("assistant", "Look:")
    assert (weather["call_id"], weather["name"]) == ("call_1", "weather")
    assert weather["arguments"] == f'{{"city":"{CITY}"}}'
    assert (time["call_id"], time["arguments"]) == ("call_2", "{}")
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert len({item["id"] for item in response["output"]}) == 4
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3, 2, 5)


def test_a_stream_says_the_same():
    events = said(writer_of(), SCRIPT)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    whole = writer_of().encoded()
    created = events[-1]["response"].pop("created_at")
    assert isinstance(created, int) and whole.pop("created_at")
    assert events[-1]["response"] == whole
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    for index, item in enumerate(done):
        own = [event for event in events if event.get("output_index") == index]
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        (end,) = (event for event in own if event["type"].endswith(("text.done", "arguments.done")))
        shown = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert text == shown == end.get("text", end.get("arguments"))
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        assert own[0]["item"]["status"] == "in_progress"


def test_what_was_cut_is_incomplete():
    response = writer_of(finish="length").encoded()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    states = [item["status"] for item in response["output"]]
    assert states == ["completed", "completed", "completed", "incomplete"]


def test_a_failure_is_a_response_that_failed():
    (event,) = writer_of().failure(internal_error())
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "internal_error"
