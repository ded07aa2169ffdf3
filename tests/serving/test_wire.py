"""Connections that send too much, too slowly or nonsense, and those that do not read."""

import json
import socket
import time
from contextlib import suppress

import pytest
from kit import running_server

from serving.http import protocol

PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def server():
    with running_server(grpc=False) as running:
        yield running


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client
    server.assert_quiescent()


def connect(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes or drops the connection."""
    answer = b""
    try:
        while chunk := connection.recv(65536):
            answer += chunk
    except ConnectionResetError:
        pass
    return answer


def error_of(answer: bytes) -> tuple[int, str]:
    """(status, code) of an answer that must be an error object."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split(b" ")[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET /" + b"a" * (1 << 20), (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 20), (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (1 << 16), (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n", (400, "invalid_http")),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", (400, "invalid_http")),
        (HEAD + b"Content-Length: +5\r\n\r\nabcde", (400, "invalid_http")),
        (HEAD + b"Content-Length: 9999999999999999999999\r\n\r\n", (400, "invalid_http")),
        (b"GET /health/live HTTP/1.1\r\n\r\n", (400, "invalid_value")),
        (
            b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n\r\n",
            (400, "invalid_value"),
        ),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_heads_are_bounded_and_well_formed(server, client, data, expected):
    with connect(server) as connection:
        with suppress(OSError):  # refused before all of it was sent
            connection.sendall(data)
        connection.settimeout(10)
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
            answer += connection.recv(65536)
    assert error_of(answer) == expected
    assert client.get("/health/live").status_code == 200


@pytest.mark.parametrize("data", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nX: a\r\n"])
def test_a_head_has_little_time(server, monkeypatch, data):
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.2)
    with connect(server) as connection:
        connection.sendall(data)
        assert error_of(read_all(connection)) == (408, "request_timeout")


def test_a_second_head_has_little_time_too(server, monkeypatch):
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.2)
    with connect(server) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT")
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in answer


def test_connections_are_bounded(server, client, monkeypatch):
    client.get("/health/live")
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 3)
    kept = [connect(server) for _ in range(2)]
    with connect(server) as connection:
        assert error_of(read_all(connection)) == (429, "queue_full")
    for connection in kept:
        connection.close()
    server.wait_until(lambda: server.server.num_connections <= 1)


def test_idle_connections_hinder_nobody(server, client):
    kept = [connect(server) for _ in range(500)]
    assert client.post(PATH, json={"prompt": "x", "max_tokens": 3}).status_code == 200
    for connection in kept:
        connection.close()


@pytest.mark.parametrize("what", [b"websocket", b"h2c", b"x"])
def test_upgrades_are_not_taken(server, client, what):
    head = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\n"
    with connect(server) as connection:
        connection.sendall(head + b"Upgrade: " + what + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_their_order(server, client):
    body = b'{"prompt": "x", "max_tokens": 1}'
    post = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    last = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(post + post + last)
        answer = read_all(connection)
    assert [answer.count(word) for word in (b"HTTP/1.1 200", b"text_completion")] == [3, 2]
    assert answer.rindex(b"text_completion") < answer.index(b'"max_model_len"')


def test_a_reader_that_stops_loses_its_connection():
    """The socket is dropped too, with what was unsent."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "n": 32}
    body |= {"stream": True, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    data = json.dumps(body).encode()
    with running_server(grpc=False, write_timeout=0.3) as server, socket.socket() as connection:
        server.runner.step_seconds = 0.01  # the engine takes longer than the server waits
        host, port = server.url.removeprefix("http://").split(":")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        server.wait_until(lambda: server.engine.counts.cancelled == 1)
        server.wait_until(lambda: server.server.num_connections == 0)
        assert not read_all(connection).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        server.assert_quiescent()


def test_a_big_answer_that_nobody_reads_is_dropped():
    """An answer that does not stream lies in the socket's buffers until the system gives up."""
    body = {"prompt": "x", "max_tokens": 200, "n": 64, "logprobs": 20, "ignore_eos": True}
    data = json.dumps(body).encode()
    with running_server(grpc=False, write_timeout=0.3) as server, socket.socket() as connection:
        host, port = server.url.removeprefix("http://").split(":")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        server.wait_until(lambda: server.engine.counts.finished == 1)
        for _ in range(200):
            if server.server.num_connections == 0:
                break
            time.sleep(0.1)
        assert server.server.num_connections == 0
        server.assert_quiescent()
