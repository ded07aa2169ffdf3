"""What would take long is refused before it is begun, or done where it holds nobody up."""

import threading

import pytest
from kit import CHAT, COMPLETION, is_error

from serving.server import service
from serving.server.responses import Writer


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"[[[[[[[[]]]]]]]]," * 100_000 + b"1]",
        b"[" + b"{}," * 100_000 + b"1]",
        b"[" + b"1," * 2_000_000 + b"1]",
        b"[" + b'"",' * 1_000_000 + b"1]",
        b"{" + b",".join(b'"%d":1' % i for i in range(200_000)) + b"}",
        b'["\\\\",' + b'"\\"",' * 400_000 + b"1]",
    ],
    ids=lambda value: repr(value)[:24],
)
@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize", "/detokenize"])
def test_more_values_than_any_request_has(client, path, value):
    """They are refused before they are decoded, which would keep the loop busy for seconds."""
    headers = {"content-type": "application/json"}
    response = client.post(path, content=b'{"ignored":%s}' % value, headers=headers)
    is_error(response, 400)
    assert "too many" in response.json()["error"]["message"]


def test_marks_within_texts_count_for_nothing(client):
    text = '[{"a": 1, "b\\\\": [2, 3]}, ' * 50_000 + '\\"'
    response = client.post(COMPLETION, json={"prompt": text})
    is_error(response, 400, "prompt")
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "context length is 256 tokens, but prompt has " in error["message"]


@pytest.mark.parametrize("place", ["messages", "chat_template_kwargs"])
def test_chats_of_too_many_values(client, place):
    numbers = [1] * 100_000
    message = {"role": "user", "content": "hi"}
    body = {"messages": [message], "chat_template_kwargs": {}}
    body |= (
        {"messages": [message | {"x": numbers}]} if place == "messages" else {place: {"x": numbers}}
    )
    for path in (CHAT, "/tokenize"):
        is_error(client.post(path, json=body), 400, "messages")


def test_texts_deep_inside_messages_are_counted(client):
    inner: object = "x" * 100_000
    for _ in range(20):
        inner = [inner]
    body = {"messages": [{"role": "user", "content": "x", "documents": inner}]}
    response = client.post(CHAT, json=body)
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_big_answers_are_written_in_a_thread(client, monkeypatch):
    body = {"prompt": "hello", "seed": 1, "n": 3, "logprobs": 5, "echo": True}
    inline = client.post(COMPLETION, json=body).json()["choices"]
    monkeypatch.setattr(service, "INLINE_LOGPROBS", 0)
    names = []
    encode = Writer.encoded

    def encoded(writer):
        names.append(threading.current_thread().name)
        return encode(writer)

    monkeypatch.setattr(Writer, "encoded", encoded)
    assert client.post(COMPLETION, json=body).json()["choices"] == inline
    assert names[0].startswith("text")
