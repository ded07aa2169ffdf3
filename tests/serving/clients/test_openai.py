"""The `openai` package talks to the server: chats, completions, streams, structure, errors."""

import json

import httpx
import openai
import pytest
from kit import running_server

KEY = "sk-test-key"
MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server():
    with running_server(keys=(KEY, "sk-other")) as running:
        yield running


@pytest.fixture
def client(server):
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, http_client=http
    ) as client:
        yield client
    server.assert_quiescent()


def test_a_chat(client):
    answer = client.chat.completions.create(
        model="echo", messages=MESSAGES, max_completion_tokens=6, seed=4, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"


def test_a_streamed_chat(client):
    options = {"model": "echo", "messages": MESSAGES, "max_tokens": 30, "seed": 4}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_completion_and_its_stream(client):
    options = {"model": "echo", "prompt": "hello", "max_tokens": 30, "seed": 4, "logprobs": 2}
    whole = client.completions.create(**options)
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    stream = client.completions.create(**options, stream=True)
    assert "".join(c.choices[0].text for c in stream) == whole.choices[0].text


def test_structured_output(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    for seed in range(5):
        answer = client.chat.completions.create(
            model="echo", messages=MESSAGES, response_format=wanted, seed=seed, max_tokens=100
        )
        content = json.loads(answer.choices[0].message.content)
        assert set(content) == {"ok", "kind"}
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("content", ["x", [{"type": "text", "text": "x"}]])
def test_a_predicted_output(client, content):
    answer = client.chat.completions.create(
        model="echo",
        messages=MESSAGES,
        max_tokens=3,
        prediction={"type": "content", "content": content},
    )
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_the_models(client):
    assert [model.id for model in client.models.list()] == ["echo", "echo-alias"]
    assert client.models.retrieve("echo").id == "echo"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"extra_headers": {"authorization": "Bearer wrong"}}, openai.AuthenticationError),
        ({"extra_headers": {"authorization": "Basic sk-test-key"}}, openai.AuthenticationError),
    ],
)
def test_errors_are_those_of_the_package(client, options, error):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "echo", "messages": MESSAGES} | options)
    assert caught.value.body["message"]


def test_every_route_but_health_wants_the_key(server, client):
    with server.client() as http:
        for path in ("/v1/models", "/metrics", "/version", "/nowhere", "/v1/completions"):
            response = http.get(path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/health/live", "/health/ready", "/health/progress"):
            assert http.get(path).status_code == 200
