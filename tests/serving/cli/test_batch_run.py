"""`shiftjax batch`: both formats, order, bad lines, and resuming what broke off."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from engines import checkpoint
from kit import running_server

from serving.cli.batch_run import Line, open_output, read_lines, run_lines
from serving.cli.main import main
from serving.server.responses import Writer
from shiftjax.options import ConfigError

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 1}
LINES = [
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
    {"prompt": "hello", "max_tokens": 200, "seed": 1, "ignore_eos": True},
    {"custom_id": "c", "method": "GET", "url": "/v1/completions", "body": {}},
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
    {"id": "e", "prompt": "x", "temperature": -1},
    {"id": "f", "prompt": "x", "stream": True},
    {"id": "g", "prompt": ["x", "y"], "n": 2, "max_tokens": 3},
    5,
]


def encoded(*lines: object) -> list[bytes]:
    return [json.dumps(line).encode() + b"\n" for line in lines]


def run(server, lines: list[Line]) -> list[dict]:
    async def collect() -> list[dict]:
        return [record async for record in run_lines(server.service, lines, 2)]

    return server.on_loop(collect())


def test_records_keep_the_order_and_bad_lines_their_place():
    with running_server() as server:
        lines = read_lines([*encoded(*LINES), b"\n", b"{", b"\xff\n"])
        records = run(server, lines)
        server.assert_quiescent()
    assert [record["custom_id"] for record in records] == [
        *("a", "line-2", "c", "a", "e", "f", "g", "line-8", "line-10", "line-11")
    ]
    chat, plain, _, _, bad, streams, many, *_ = records
    assert chat["response"]["body"]["object"] == "chat.completion"
    assert plain["response"]["body"]["usage"]["completion_tokens"] == 200
    assert len(many["response"]["body"]["choices"]) == 4
    good = {0, 1, 6}
    assert all((record["error"] is None) == (i in good) for i, record in enumerate(records))
    assert bad["response"]["status_code"] == 400
    assert bad["error"]["param"] == "temperature"
    assert streams["error"]["param"] == "stream"
    assert "line 1" in records[3]["error"]["message"]


def test_results_are_those_of_the_server():
    with running_server() as server, server.client() as client:
        (record,) = run(server, read_lines(encoded(LINES[1])))
        answer = client.post("/v1/completions", json=LINES[1]).json()
        assert record["response"]["body"]["choices"] == answer["choices"]


def test_a_broken_run_is_continued_without_repeats(tmp_path):
    lines = read_lines(encoded(*({"id": str(i), "prompt": "x"} for i in range(4))))
    output = tmp_path / "out.jsonl"
    assert open_output(output, lines, False) == lines
    records = [{"id": f"batch_req_{n}", "custom_id": str(n - 1)} for n in (1, 2)]
    whole = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    output.write_bytes(whole + b'{"id":"batch_req_3","cus')
    with pytest.raises(ConfigError, match="--resume"):
        open_output(output, lines, False)
    assert open_output(output, lines, True) == lines[2:]
    assert output.read_bytes() == whole
    output.write_bytes(b"not a record\n" + whole)
    with pytest.raises(ConfigError, match="line 1"):
        open_output(output, lines, True)
    others = read_lines(encoded(*({"id": f"other-{i}", "prompt": "x"} for i in range(4))))
    output.write_bytes(whole)
    with pytest.raises(ConfigError, match="another input"):
        open_output(output, others, True)


@pytest.mark.parametrize(
    "text", [b'{"prompt": "a line of an input"}\n', b"text without an end", b"[" * 100_000 + b"\n"]
)
def test_a_file_that_holds_no_record_is_not_touched(tmp_path, text):
    lines = read_lines(encoded({"prompt": "x"}))
    output = tmp_path / "out.jsonl"
    output.write_bytes(text)
    with pytest.raises(ConfigError, match="line 1: no record"):
        open_output(output, lines, True)
    assert output.read_bytes() == text


def test_what_editors_and_other_systems_write_is_read():
    plain, chat = encoded({"prompt": "x", "max_tokens": 1}, {"messages": CHAT["messages"]})
    first, second = read_lines([b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"), b"\r\n", chat])
    assert (first.problem, second.problem) == (None, None)
    assert (first.number, second.number) == (1, 3)


def test_nothing_of_a_line_is_dropped_in_silence():
    openai = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    body = {"prompt": "x", "max_tokens": 1, "max_tokns": 7}
    bodiless = openai | {"custom_id": "b", "url": "/v1/chat/completions", "prompt": "x"}
    lines = read_lines(encoded(openai | {"body": body, "priority": 3}, bodiless))
    with running_server() as server:
        known, unknown = run(server, lines)
    with running_server(strict=True) as server:
        (refused, _) = run(server, lines)
    assert known["ignored_fields"] == ("priority", "max_tokns")
    assert unknown["error"]["message"] == "body is missing"
    assert "priority" in refused["error"]["message"]


def test_a_bug_is_one_lines_alone(monkeypatch):
    real = Writer.response

    def response(self):
        if self._generation.id == "batch_req_2":
            raise ZeroDivisionError
        return real(self)

    monkeypatch.setattr(Writer, "response", response)
    with running_server() as server:
        lines = read_lines(encoded(*({"prompt": "x", "max_tokens": 1} for _ in range(3))))
        records = run(server, lines)
        server.assert_quiescent()
    assert [record["response"]["status_code"] for record in records] == [200, 500, 200]


def test_the_command(tmp_path: Path, capsys):
    directory, _, _ = checkpoint()
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(encoded(body, {"prompt": "text"}, body)))
    flags = ["--model", str(directory), "--sp=1", "--tp=1", "--dtype=float32", "--block-size=4"]
    flags += ["--max-model-len=64", "--num-blocks=40", "--max-num-seqs=2", "--token-buckets=16"]
    flags += ["--max-num-batched-tokens=16", "--cache-dir=none", "--output", str(output)]
    assert main(["batch", str(source), *flags]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["error"] is None for record in records] == [True, False, True]
    texts = [record["response"]["body"]["usage"] for record in (records[0], records[2])]
    assert texts[0]["completion_tokens"] == texts[1]["completion_tokens"] == 4
    first = output.read_bytes()
    assert main(["batch", str(source), *flags]) == 2
    assert "--resume" in capsys.readouterr().err
    output.write_bytes(first[: len(first) // 2])
    assert main(["batch", str(source), *flags, "--resume"]) == 0
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["custom_id"] for record in again] == ["line-1", "line-2", "line-3"]
    asyncio.run(asyncio.sleep(0))  # no loop was left behind
