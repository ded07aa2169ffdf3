"""The benchmark's client: what it makes of answers, good ones and others."""

import asyncio
import json
import socket
import threading

import pytest
from kit import running_server

from serving.bench.client import Sample, Target, complete, get, parse_url
from serving.cli.main import main

TOKEN = b'data: {"choices":[{"index":0,"text":"a"}]}'


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'


EVENTS = (TOKEN, TOKEN, USAGE, b"data: [DONE]", b"")


def http(body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    length = b"%d" % len(body)
    head = (b"HTTP/1.1 " + status, b"Content-Type: " + kind, b"Content-Length: " + length)
    return b"\r\n".join((*head, b"", body))


def sse(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body


def sample_of(answer: bytes) -> Sample:
    """What the client makes of a server that says this, a few bytes at a time."""

    async def run() -> Sample:
        async def talk(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for start in range(0, len(answer), 50):
                writer.write(answer[start : start + 50])
                await asyncio.sleep(0)
            writer.close()

        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await complete(Target("127.0.0.1", port, "", False), {})

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "no answer"),
        (b"\0 junk\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 abc OK\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "chunk without a size"),
        (http(b"{}")[:-1], "1 bytes read on a total of 2"),
        (http(b"<html>", b"500 no"), "500: <html>"),
        (http(b"{}", b"429 no"), "429: {}"),
        (http(b"[]"), "Expected `object`"),
        (http(b"hello"), "malformed"),
        (sse(b'data: {"choices":[5]}\n\n'), "Expected `object`"),
        (sse(b'data: {"error":"boom"}\n\ndata: [DONE]\n\n'), "boom"),
        (sse(b"\n\n".join(EVENTS[:-2])), "broke off"),
        (sse(b"\n\n".join((TOKEN, *EVENTS[-2:]))), "nothing of its usage"),
    ],
)
def test_an_answer_that_is_none_is_a_failed_request(answer, words):
    sample = sample_of(answer)
    assert sample.error is not None
    assert words in sample.error


@pytest.mark.parametrize("ends", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("blank", [b"", b" "])
def test_streams_are_read_as_their_standard_says(ends, blank):
    body = ends.join((b": a comment", b"event: x" + ends[: len(ends) // 2] + TOKEN, *EVENTS))
    sample = sample_of(sse(body.replace(b"data: ", b"data:" + blank)))
    assert (sample.error, sample.num_output_tokens, sample.texts) == (None, 2, {0: "aaa"})


def test_a_server_that_ends_during_the_load_is_reported(tmp_path, capsys):
    """The row is there, and the requests have failed."""
    answers = [http(b""), http(b"oops", b"500 no")]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)
            listener.close()

        thread = threading.Thread(target=talk)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        path = tmp_path / "row.json"
        flags = (f"--url={url}", "--clients=1", "--requests=1", f"--json={path}")
        assert main(["bench", "serve", *flags]) == 1
        thread.join()
    assert json.loads(path.read_text())["errors"] == {"500: oops": 1}


def test_an_address_of_version_6_is_called_by_its_name():
    target = parse_url("http://[::1]:80/v1", None)
    assert (target.host, target.port, target.path) == ("::1", 80, "")
    with running_server(host="::1") as server:
        status, _ = asyncio.run(get(parse_url(server.url), "/metrics"))
    assert status == 200
