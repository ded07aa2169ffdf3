"""Connections that send too much, too slowly or nonsense."""

import json
import socket
from contextlib import suppress

import pytest
from kit import COMPLETION, Running, read_all

from serving.http import guard, protocol

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def connect(server: Running) -> socket.socket:
    return socket.create_connection(server.address, timeout=10)


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


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/0.9\r\n\r\n",
        b"\x00" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /admin HTTP/1.1\r\n\r\n",
    ],
    ids=lambda data: repr(data)[:20],
)
def test_garbage_on_the_wire(server, client, data):
    with connect(server) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer == b"" or answer.split(b" ")[1] in (b"400", b"404", b"405", b"413"), answer
    assert client.get("/health/live").status_code == 200


@pytest.mark.parametrize(("version", "is_chunked"), [(b"1.0", False), (b"1.1", True)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(server, client, version, is_chunked, stream):
    body = {"prompt": "x", "max_tokens": 9, "seed": 2, "stream": stream}
    expected = client.post(COMPLETION, json=body).json() if not stream else None
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/%b\r\nHost: localhost\r\nConnection: close\r\n" % version
    with connect(server) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        head, _, answer = read_all(connection).partition(b"\r\n\r\n")
    assert (b"transfer-encoding" in head.lower()) is (stream and is_chunked)
    if expected is not None:
        assert json.loads(answer)["choices"] == expected["choices"]
    elif not is_chunked:
        lines = answer.split(b"\n\n")
        assert all(line.startswith(b"data: ") for line in lines[:-1])
        assert lines[-2:] == [b"data: [DONE]", b""]
    else:
        assert answer.endswith(b"\r\n0\r\n\r\n")


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
    assert client.post(COMPLETION, json={"prompt": "x", "max_tokens": 3}).status_code == 200
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


def test_a_body_that_comes_too_slowly(server, client, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    with connect(server) as connection:
        connection.sendall(HEAD + b'Content-Length: 50\r\n\r\n{"prompt": ')
        assert client.post(COMPLETION, json={"prompt": "x"}).status_code == 200
        answer = read_all(connection)  # ends: the rest of the body is not awaited
    assert error_of(answer) == (408, "request_timeout")
