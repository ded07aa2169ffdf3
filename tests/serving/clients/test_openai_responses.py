"""The `openai` package asks for responses: whole, streamed, parsed, in turns, and refused."""

import httpx
import openai
import pydantic
import pytest
from kit import CHAT, COMPLETION, running_server

KEY = "sk-test-key"
PROMPT = "user: hi\nassistant:"
EXTRA = {"seed": 4, "ignore_eos": True}
OPTIONS = {"model": "echo", "input": "hi", "max_output_tokens": 30, "extra_body": EXTRA}


class Answer(pydantic.BaseModel):
    """A form that an answer is to have."""

    model_config = pydantic.ConfigDict(extra="forbid")
    ok: bool


@pytest.fixture(scope="module")
def server():
    with running_server(keys=(KEY,)) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as client:
        yield client
    server.assert_quiescent()


def completion(server) -> dict:
    """What the same prompt is continued with."""
    body = {"prompt": PROMPT, "max_tokens": 30} | EXTRA
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as http:
        return http.post(COMPLETION, json=body).json()


def test_a_response_is_the_completion_of_its_prompt(server, client):
    wanted = completion(server)
    answer = client.responses.create(**OPTIONS)
    assert answer.output_text == wanted["choices"][0]["text"]
    assert answer.usage.output_tokens == wanted["usage"]["completion_tokens"]
    assert answer.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    assert answer.usage.input_tokens_details.cached_tokens > 0
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_stream_is_the_response(client):
    whole = client.responses.create(**OPTIONS)
    text, last = "", None
    for event in client.responses.create(**OPTIONS, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    assert last.type == "response.incomplete"
    assert text == last.response.output_text == whole.output_text


def test_log_probabilities_are_those_of_a_chat(server, client):
    """With all tokens of the output, streamed and not."""
    include = ["message.output_text.logprobs"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30} | EXTRA
    body |= {"logprobs": True, "top_logprobs": 2}
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as http:
        wanted = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    whole = client.responses.create(**OPTIONS, include=include, top_logprobs=2)
    (part,) = whole.output[0].content
    assert [each.model_dump() for each in part.logprobs] == wanted
    events = list(client.responses.create(**OPTIONS, include=include, top_logprobs=2, stream=True))
    deltas = [each for each in events if each.type == "response.output_text.delta"]
    (done,) = (each for each in events if each.type == "response.output_text.done")
    last = events[-1].response.output[0].content[0].logprobs
    streamed = [entry.token for each in deltas for entry in each.logprobs]
    assert deltas[0].logprobs  # tokens may come together, and a last text without one
    assert streamed == [each["token"] for each in wanted][: len(streamed)]
    assert [each.token for each in done.logprobs] == [each["token"] for each in wanted]
    assert [each.model_dump() for each in last] == wanted
    plain = client.responses.create(**OPTIONS)
    assert plain.output[0].content[0].logprobs == []


def test_the_timeline_stands_beside_the_usage(client):
    options = OPTIONS | {"extra_body": EXTRA | {"timeline": True}}
    whole = client.responses.create(**options)
    assert sum(number for _, number in whole.timeline["modes"]) == 30
    *_, last = client.responses.create(**options, stream=True)
    assert last.response.timeline["modes"] == whole.timeline["modes"]
    assert not hasattr(client.responses.create(**OPTIONS), "timeline")


def test_the_form_of_an_answer_is_parsed(client):
    answer = client.responses.parse(
        model="echo", input="hi", text_format=Answer, max_output_tokens=100, extra_body={"seed": 4}
    )
    assert isinstance(answer.output_parsed, Answer)
    assert answer.status == "completed"
    options = {"model": "echo", "input": "hi", "extra_body": {"seed": 4}}
    with client.responses.stream(**options, text_format=Answer) as stream:
        final = stream.until_done().get_final_response()
    assert final.output_parsed == answer.output_parsed


def test_a_second_turn_holds_the_first(client):
    first = client.responses.create(**OPTIONS)
    asked = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "so"}]
    count = client.responses.input_tokens.count(model="echo", input=asked)
    prompt = f"user: hi\nassistant: {first.output_text}\nuser: so\nassistant:"
    assert count.input_tokens == len(prompt.encode())
    second = client.responses.create(
        model="echo", input=asked, max_output_tokens=3, extra_body=EXTRA
    )
    assert second.usage.input_tokens == count.input_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_what_is_refused_is_named(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**OPTIONS | options)
    assert caught.value.body["param"] == param


def test_a_stream_that_fails_says_so(server, client):
    server.runner.step_seconds = 0.01
    stream = client.responses.create(**OPTIONS | {"max_output_tokens": 200}, stream=True)
    assert next(stream).type == "response.created"
    server.runner.faults.append(ValueError("x"))
    *_, last = stream
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message
    server.let_go()
