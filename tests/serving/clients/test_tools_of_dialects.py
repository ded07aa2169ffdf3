"""The `anthropic` and `openai` packages call tools: streamed and not, forced, and answered."""

import json

import anthropic
import httpx
import openai
import pytest
from scripted import say, scripted_server

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
HI = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANTHROPIC = {"name": "get_weather", "description": "Of a city", "input_schema": PARAMETERS}
OPENAI = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
MESSAGE = {"model": "echo", "messages": [HI], "tools": [ANTHROPIC], "max_tokens": 400}
RESPONSE = {"model": "echo", "input": [HI], "tools": [OPENAI], "max_output_tokens": 400}


@pytest.fixture(scope="module")
def server():
    with scripted_server("hermes") as running:
        yield running


@pytest.fixture
def messages(server, client):
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as package:
        yield package.messages


@pytest.fixture
def responses(server, client):
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="x",
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as package:
        yield package.responses


def test_a_message_with_calls(server, messages):
    say(server, f"Look: {CALL}{CALL}")
    answer = messages.create(**MESSAGE)
    text, *calls = answer.content
    assert text.text.strip() == "Look:"
    assert [(call.name, call.input) for call in calls] == [("get_weather", {"city": "Rome"})] * 2
    assert len({call.id for call in calls}) == 2
    assert answer.stop_reason == "tool_use"
    with messages.stream(**MESSAGE) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["text", "tool_use", "tool_use"]
    assert streamed.content[0].text == text.text
    assert [block.input for block in streamed.content[1:]] == [call.input for call in calls]
    assert streamed.stop_reason == "tool_use"


def test_a_message_that_answers_a_call(server, messages):
    say(server, CALL)
    (call,) = messages.create(**MESSAGE).content
    say(server, "Rain.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [
        HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = messages.create(**MESSAGE | {"messages": turns})
    assert [block.text for block in answer.content] == ["Rain."]
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_message_that_must_call(messages, choice):
    """The model says anything at all; a grammar holds it to the tool and its schema."""
    for seed in range(5):
        extra = {"extra_body": {"seed": seed}}
        answer = messages.create(
            **MESSAGE,
            **extra,
            tool_choice=choice | {"disable_parallel_tool_use": True},
        )
        (call,) = (block for block in answer.content if block.type == "tool_use")
        assert set(call.input) == {"city"}


def test_a_response_with_calls(server, responses):
    say(server, f"Look: {CALL}{CALL}")
    answer = responses.create(**RESPONSE)
    text, *calls = answer.output
    assert text.content[0].text.strip() == "Look:"
    assert [call.name for call in calls] == ["get_weather"] * 2
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome"}] * 2
    assert answer.status == "completed"
    with responses.stream(**RESPONSE) as stream:
        streamed = stream.until_done().get_final_response()
    kinds = [item.type for item in streamed.output]
    assert kinds == ["message", "function_call", "function_call"]
    assert [item.arguments for item in streamed.output[1:]] == [call.arguments for call in calls]


def test_a_response_that_answers_a_call(server, responses):
    say(server, CALL)
    (call,) = responses.create(**RESPONSE).output
    say(server, "Rain.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    answer = responses.create(**RESPONSE | {"input": [HI, call, output]})
    assert answer.output_text == "Rain."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_response_that_must_call(responses, choice):
    for seed in range(5):
        answer = responses.create(
            **RESPONSE,
            tool_choice=choice,
            parallel_tool_calls=False,
            extra_body={"seed": seed},
        )
        (call,) = (item for item in answer.output if item.type == "function_call")
        assert set(json.loads(call.arguments)) == {"city"}


def test_what_is_wrong_with_a_tool_is_named(messages, responses):
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.name"):
        messages.create(**MESSAGE | {"tools": [ANTHROPIC | {"name": "no good"}]})
    with pytest.raises(openai.BadRequestError) as caught:
        responses.create(**RESPONSE, tool_choice={"type": "function", "name": "other"})
    assert caught.value.body["param"] == "tool_choice.name"
