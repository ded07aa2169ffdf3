"""The `anthropic` package talks to the server: messages, streams, counts, errors."""

import itertools

import pytest
from kit import COMPLETION, MAX_MODEL_LEN, TEMPLATE, running_server

anthropic = pytest.importorskip("anthropic", reason="needs: pip install anthropic")

KEY = "sk-test-key"
HI = [{"role": "user", "content": "hi"}]
OPTIONS = {
    "model": "echo",
    "messages": HI,
    "max_tokens": 30,
    "extra_body": {"seed": 4, "ignore_eos": True},
}
PROMPT = "user: hi\nassistant:"
assert TEMPLATE.endswith("assistant:")


@pytest.fixture(scope="module")
def server():
    with running_server(keys=(KEY, "sk-other")) as running:
        yield running


@pytest.fixture
def client(server, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client
    server.assert_quiescent()


def completion(server) -> dict:
    """What the same prompt is continued with."""
    body = {"prompt": PROMPT, "seed": 4, "max_tokens": 30, "ignore_eos": True}
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as http:
        return http.post(COMPLETION, json=body).json()


def test_a_message_is_the_completion_of_its_prompt(server, client):
    wanted = completion(server)
    answer = client.messages.create(**OPTIONS)
    assert answer.usage.cache_read_input_tokens > 0
    assert [block.text for block in answer.content] == [wanted["choices"][0]["text"]]
    assert answer.usage.output_tokens == wanted["usage"]["completion_tokens"]
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == wanted["usage"]["prompt_tokens"]
    assert (answer.role, answer.model, answer.type) == ("assistant", "echo", "message")
    assert answer.stop_reason == "max_tokens"


def test_a_stream_is_the_message(server, client):
    whole = client.messages.create(**OPTIONS)
    with client.messages.stream(**OPTIONS) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert "".join(texts) == whole.content[0].text == streamed.content[0].text
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_the_timeline_stands_beside_the_usage(client):
    options = OPTIONS | {"extra_body": OPTIONS["extra_body"] | {"timeline": True}}
    whole = client.messages.create(**options)
    assert sum(number for _, number in whole.timeline["modes"]) == 30
    events = list(client.messages.create(**options, stream=True))
    (delta,) = (each for each in events if each.type == "message_delta")
    assert delta.timeline["modes"] == whole.timeline["modes"]
    assert not hasattr(client.messages.create(**OPTIONS), "timeline")


def test_models(client):
    names = ["echo", "echo-alias"]
    models = client.models.list()
    assert [each.id for each in models.data] == names and not models.has_more
    paged = itertools.islice(client.models.list(limit=1), 9)  # page after page
    assert [each.id for each in paged] == names
    (before,) = client.models.list(before_id=names[1], limit=1).data
    one = client.models.retrieve(names[1])
    assert (before.id, one.type, one.display_name) == (names[0], "model", names[1])
    assert one.created_at == models.data[0].created_at and one.created_at.year >= 2024
    for call in (lambda: client.models.retrieve("x"), lambda: client.models.list(after_id="x")):
        with pytest.raises(anthropic.NotFoundError):
            call()
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": names[0], "before_id": names[0]}):
        with pytest.raises(anthropic.BadRequestError):
            client.models.list(**wrong)


def test_a_sequence_that_stops(server, client):
    text = completion(server)["choices"][0]["text"]
    stop = next(each for each in text[3:] if each.isascii() and each.isalnum())
    answer = client.messages.create(**OPTIONS, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    with client.messages.stream(**OPTIONS, stop_sequences=[stop]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert final.content[0].text == answer.content[0].text == text.partition(stop)[0]


def test_tokens_are_counted(client):
    count = client.messages.count_tokens(model="echo", messages=HI)
    assert count.input_tokens == len(PROMPT)
    more = client.messages.count_tokens(model="echo", messages=HI, system="x")
    assert more.input_tokens == len("system: x\n" + PROMPT)


def test_the_key_in_anthropics_header(server):
    """Older versions of the package send it there."""
    body = {"model": "echo", "messages": HI}
    with server.client() as http:
        for key, status in ((KEY, 200), ("wrong", 401), ("", 401)):
            answer = http.post("/v1/messages/count_tokens", json=body, headers={"x-api-key": key})
            assert answer.status_code == status


def test_a_form_of_the_answer(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    answer = client.messages.create(
        model="echo",
        messages=HI,
        max_tokens=100,
        output_config={"format": {"type": "json_schema", "schema": schema}},
        extra_body={"seed": 4},
    )
    assert answer.stop_reason == "end_turn"
    assert '"ok"' in answer.content[0].text


@pytest.mark.parametrize(
    ("key", "options", "error", "kind"),
    [
        (KEY, {"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error"),
        (KEY, {"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ("wrong", {}, anthropic.AuthenticationError, "authentication_error"),
    ],
)
def test_errors_are_those_of_the_package(client, key, options, error, kind):
    given = {"model": "echo", "messages": HI, "max_tokens": 5} | options
    with pytest.raises(error) as caught:
        client.with_options(api_key=key).messages.create(**given)
    assert caught.value.body["error"]["type"] == kind


def test_a_stream_that_fails_says_so(server, client):
    server.runner.step_seconds = 0.01
    with client.messages.stream(model="echo", messages=HI, max_tokens=200) as stream:
        events = iter(stream)
        assert next(events).type == "message_start"
        server.runner.faults.append(ValueError("x"))
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(events)
    assert caught.value.body["error"]["type"] == "api_error"
    server.let_go()


def test_an_answer_that_is_begun_is_continued(server, client):
    """The prompt ends where the assistant's words do."""
    begun = [*HI, {"role": "assistant", "content": "It is"}]
    prompt = PROMPT + " It is"
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as http:
        body = {"prompt": prompt, "max_tokens": 20, "seed": 4, "ignore_eos": True}
        wanted = http.post(COMPLETION, json=body).json()
    options = OPTIONS | {"messages": begun, "max_tokens": 20}
    answer = client.messages.create(**options)
    assert answer.content[0].text == wanted["choices"][0]["text"]
    count = client.messages.count_tokens(model="echo", messages=begun)
    assert count.input_tokens == wanted["usage"]["prompt_tokens"]
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**options | {"messages": [*HI, begun[1] | {"content": [use]}]})


def test_a_bound_beyond_the_context_ends_there(client):
    """Claude Code asks for 32,000 tokens of any model."""
    options = OPTIONS | {"max_tokens": 32000, "timeout": 60}
    answer = client.messages.create(**options)
    assert answer.stop_reason == "model_context_window_exceeded"
    used = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert used + answer.usage.output_tokens == MAX_MODEL_LEN
    with client.messages.stream(**options) as stream:
        assert stream.get_final_message().stop_reason == answer.stop_reason
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**options | {"messages": [{"role": "user", "content": "x" * 300}]})
