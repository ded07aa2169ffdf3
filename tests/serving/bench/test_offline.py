"""`shiftjax bench`: engines without a server; the flags of every kind; what is refused."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kit import running_server

from serving.bench.client import Sample, Target, complete, get, parse_url
from serving.cli.main import main

ROOT = Path(__file__).parents[3]

TINY = ("--model=random:tiny", "--sp=1", "--tp=1", "--num-blocks=80", "--max-model-len=64")
TINY += ("--token-buckets=32", "--max-num-batched-tokens=32", "--max-num-seqs=8")
LENGTHS = ("--prompt-tokens=12", "--output-tokens=4")


def run(tmp_path, *argv: str) -> dict:
    path = tmp_path / "row.json"
    assert main(["bench", *argv, *TINY, f"--json={path}"]) == 0
    return json.loads(path.read_text())


def test_latency(tmp_path):
    row = run(tmp_path, "latency", "--batch=3", "--rounds=4", *LENGTHS)
    assert 0 < row["batch_p50_seconds"] <= row["batch_p99_seconds"]
    assert row["seconds_per_output_token"] == pytest.approx(row["mean_seconds"] / 4)
    # five rounds of a prefill of 36 tokens in two steps and three decodes
    assert sum(row["steps_by_mode"].values()) == 25


def test_throughput(tmp_path):
    row = run(tmp_path, "throughput", "--requests=5", *LENGTHS)
    assert row["output_tokens_per_second"] * row["seconds"] == pytest.approx(20)
    assert row["tokens_per_second"] * row["seconds"] == pytest.approx(80)


def test_startup(tmp_path):
    row = run(tmp_path, "startup", "--starts=1")
    assert row["warm_best"]["compile_seconds"] < row["cold"]["compile_seconds"]
    assert row["cold"]["total_seconds"] > row["cold"]["compile_seconds"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("latency", "--batch=0"), "--batch must be 1 or more, got 0"),
        (("startup", "--starts=-1"), "--starts must be 1 or more, got -1"),
        (("latency", "--prompt-tokens=60", "--output-tokens=60"), "exceed the context of 64"),
        (("serve", "--rate=0"), "--rate must be more than 0, got 0.0"),
        (("serve", "--requests=5"), "--requests has no meaning for a load of --rate"),
        (("serve", "--clients=2", "--cv=3"), "--cv has no meaning for a load of --clients"),
        (("serve", "--trace=/absent", "--rate=3"), "--rate has no meaning for a load of --trace"),
        (("serve", "--clients=0"), "--clients must be more than 0, got 0"),
        (("serve", "--rate=nan"), "--rate must be more than 0, got nan"),
        (("serve", "--url=ftp://x"), "--url must be like"),
        (("serve", "--url=http://127.0.0.1:1"), "no server answers"),
        (("serve", "--trace=/absent"), "/absent"),
        (("serve", "--url=http://x:99999"), "--url must be like"),
        (("serve", "--url=http://[::1"), "--url must be like"),
        (("serve", "--ttft-limit=0"), "--ttft-limit must be more than 0, got 0.0"),
        (("serve", "--tpot-limit=nan"), "--tpot-limit must be more than 0, got nan"),
        (("serve", "--key-file=/dev/null"), "--key-file /dev/null: is empty"),
        (("serve", "--json=/absent/row"), "--json /absent/row: No such file"),
        (("serve", "--plots=/dev/null/x"), "--plots /dev/null/x: Not a directory"),
        (("latency", "--json=/absent/row"), "--json /absent/row: No such file"),
    ],
)
def test_what_cannot_be_measured(capsys, argv, words):
    flags = () if argv[0] == "serve" else TINY
    assert main(["bench", *argv, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


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


def test_what_serving_costs(tmp_path):
    command = [sys.executable, "scripts/bench_overhead.py", "--streams=3", "--tokens=20"]
    command += ["--rounds=1", "--step-milliseconds", "1"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    rows = json.loads(run.stdout.splitlines()[-1])["step_1_ms"]
    assert set(rows) == {"engine", "http", "grpc"}
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert all(rows[name]["events_per_second"] > 0 for name in ("http", "grpc"))
