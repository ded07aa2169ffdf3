"""`shiftjax batch`: both formats, order, bad lines, resuming what broke off."""

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest
from batch_kit import encoded, run_through
from engines import checkpoint
from kit import CHAT as CHATS
from kit import COMPLETION, running_server

from serving.cli.batch_formats import OPENAI, PLAIN, Line, plain_record, read_lines
from serving.cli.batch_output import open_output, repair
from serving.cli.commands import in_order
from serving.cli.main import main
from serving.server.errors import ServeError
from serving.server.fields import ChatFields, CompletionFields
from serving.server.responses import Writer
from serving.server.schema import Wish
from shiftjax.core.request import SamplingParams, TokenLogprobs
from shiftjax.options import ConfigError
from shiftjax.outputs import CompletionOutput, RequestOutput

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


def parse_plain(*lines: object, **defaults: object) -> list[Line]:
    return read_lines(encoded(*lines), PLAIN, defaults)


def test_records_keep_the_order_and_bad_lines_their_place():
    with running_server() as server:
        lines = read_lines([*encoded(*LINES), b"\n", b"{", b'{"prompt": "\xff"}\n'], OPENAI)
        records = run_through(server, lines)
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
        (record,) = run_through(server, read_lines(encoded(LINES[1]), OPENAI))
        answer = client.post("/v1/completions", json=LINES[1]).json()
        assert record["response"]["body"]["choices"] == answer["choices"]


def test_a_broken_run_is_continued_without_repeats(tmp_path):
    lines = read_lines(encoded(*({"id": str(i), "prompt": "x"} for i in range(4))), OPENAI)
    output = tmp_path / "out.jsonl"
    assert open_output(output, lines, False, OPENAI) == lines
    records = [{"id": f"batch_req_{n}", "custom_id": str(n - 1)} for n in (1, 2)]
    whole = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    output.write_bytes(whole + b'{"id":"batch_req_3","cus')
    with pytest.raises(ConfigError, match="--resume"):
        open_output(output, lines, False, OPENAI)
    assert open_output(output, lines, True, OPENAI) == lines[2:]
    assert output.read_bytes() == whole
    output.write_bytes(b"not a record\n" + whole)
    with pytest.raises(ConfigError, match="line 1"):
        open_output(output, lines, True, OPENAI)
    others = read_lines(encoded(*({"id": f"other-{i}", "prompt": "x"} for i in range(4))), OPENAI)
    output.write_bytes(whole)
    with pytest.raises(ConfigError, match="another input"):
        open_output(output, others, True, OPENAI)


@pytest.mark.parametrize(
    "text", [b'{"prompt": "a line of an input"}\n', b"text without an end", b"[" * 100_000 + b"\n"]
)
def test_a_file_that_holds_no_record_is_not_touched(tmp_path, text):
    lines = read_lines(encoded({"prompt": "x"}), OPENAI)
    output = tmp_path / "out.jsonl"
    output.write_bytes(text)
    with pytest.raises(ConfigError, match="line 1: no record"):
        open_output(output, lines, True, OPENAI)
    assert output.read_bytes() == text


def test_what_editors_and_other_systems_write_is_read():
    plain, chat = encoded({"prompt": "x", "max_tokens": 1}, {"messages": CHAT["messages"]})
    first, second = read_lines(
        [b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"), b"\r\n", chat], OPENAI
    )
    assert (first.problem, second.problem) == (None, None)
    assert (first.number, second.number) == (1, 3)


def test_nothing_of_a_line_is_dropped_in_silence():
    openai = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    body = {"prompt": "x", "max_tokens": 1, "max_tokns": 7}
    bodiless = openai | {"custom_id": "b", "url": "/v1/chat/completions", "prompt": "x"}
    lines = read_lines(encoded(openai | {"body": body, "priority": 3}, bodiless), OPENAI)
    with running_server() as server:
        known, unknown = run_through(server, lines)
    with running_server(strict=True) as server:
        (refused, _) = run_through(server, lines)
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
        lines = read_lines(encoded(*({"prompt": "x", "max_tokens": 1} for _ in range(3))), OPENAI)
        records = run_through(server, lines)
        server.assert_quiescent()
    assert [record["response"]["status_code"] for record in records] == [200, 500, 200]


@pytest.mark.costs(12)
def test_the_command(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("serving.run.progress.LOG_SECONDS", 0.0)  # a line for every record
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
    said = [line for line in capsys.readouterr().err.splitlines() if "generating" in line]
    tokens = r"6 of 6 prompt tokens, 8 of 8 output tokens, \d+ s so far, about 0 s left"
    assert re.fullmatch(rf"generating: 3 of 3 lines, {tokens}", said[-1])
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


# ---------------------------------------------------------------- the plain format


def test_a_line_is_a_prompt_or_messages_with_sampling_fields():
    messages = [{"role": "user", "content": "Hi"}]
    plain, chat = parse_plain(
        {"prompt": "Hello", "temperature": 0, "max_tokens": 3},
        {"id": "b", "messages": messages},
        max_tokens=7,
    )
    fields, sampling = CompletionFields(prompt="Hello"), SamplingParams(temperature=0, max_tokens=3)
    given = frozenset({"temperature", "max_tokens"})
    assert plain == Line(1, "line-1", COMPLETION, Wish(fields, sampling, None, (), given=given))
    given = frozenset({"max_tokens"})
    wish = Wish(ChatFields(messages=messages), SamplingParams(max_tokens=7), None, (), given=given)
    assert chat == Line(2, "b", CHATS, wish)


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        (b"{", "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8 text (byte 12)"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (["x"], "must be a JSON object"),
        ("x", "must be a JSON object"),
        ({}, "either prompt or messages"),
        ({"prompt": "x", "messages": []}, "either prompt or messages"),
        ({"prompt": 3}, "prompt must be text, got 3"),
        ({"messages": "x"}, "messages must be a list, got 'x'"),
        ({"messages": ["x"]}, "messages must hold objects"),
        ({"prompt": "x", "id": 3}, "id must be text"),
        ({"prompt": "x", "id": ""}, "id must be text"),
        ({"prompt": "x", "max_token": 3}, "unknown option 'max_token'; did you mean max_tokens?"),
        ({"prompt": "x", "temperature": -1}, "temperature must be between"),
        ({"prompt": 3, "top_p": 2, "n": 0}, "prompt must be text, got 3; n must be between"),
    ],
)
def test_a_bad_line_is_refused_in_its_place(line, fragment):
    good, bad = parse_plain({"prompt": "x"}, line)
    assert good.problem is None
    assert bad.problem is not None
    assert fragment in bad.problem
    assert "\n" not in bad.problem
    assert PLAIN.failure(bad, ServeError("invalid", "of no use")) == {
        "id": "line-2",
        "line": 2,
        "error": bad.problem,
    }


def test_blank_lines_count_but_give_no_record():
    lines = parse_plain({"prompt": "a"}, b"  \n", b"", {"prompt": "b"})
    assert [line.number for line in lines] == [1, 4]


def test_an_id_that_is_taken_is_refused():
    first, second = parse_plain({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})
    assert first.problem is None
    assert (second.number, second.name) == (2, "x")
    assert second.problem == "id 'x' is also that of line 1"


def test_values_come_in_order_and_no_later_than_they_must():
    taken = []

    def pairs():
        for place in (1, 0, 3, 2):
            taken.append(place)
            yield place, f"v{place}"

    seen = [(value, list(taken)) for value in in_order(pairs())]
    assert seen == [
        ("v0", [1, 0]),
        ("v1", [1, 0]),
        ("v2", [1, 0, 3, 2]),
        ("v3", [1, 0, 3, 2]),
    ]


def test_a_plain_record_has_all_that_was_asked_for():
    top = TokenLogprobs(5, -0.5, [5], [-0.5])
    one = CompletionOutput(0, "tëxt", [5], [top], "length")
    output = RequestOutput("r", "p", [1, 2], [one], prompt_logprobs=[None, top])
    text = msgspec.json.encode(plain_record(Line(3, "a", COMPLETION, None), output))
    logprob = {"token_id": 5, "logprob": -0.5, "top_ids": [5], "top_logprobs": [-0.5]}
    assert json.loads(text) == {
        "id": "a",
        "line": 3,
        "outputs": [
            {
                "index": 0,
                "text": "tëxt",
                "token_ids": [5],
                "finish_reason": "length",
                "stop_reason": None,
                "logprobs": [logprob],
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
        "prompt_logprobs": [None, logprob],
    }
    assert b"\n" not in text


def test_a_failed_line_says_so():
    failed = CompletionOutput(0, finish_reason="error", error="non-finite logits")
    output = RequestOutput("r", "p", [1], [failed])
    assert plain_record(Line(1, "a", COMPLETION, None), output)["error"] == "non-finite logits"


def test_plain_records_of_an_engine():
    lines = parse_plain(
        {"prompt": "hello", "seed": 1, "n": 2, "logprobs": 1, "prompt_logprobs": 0},
        {"prompt": "", "id": "empty"},
        {"prompt": "\x07", "id": "poisoned"},
        {"messages": CHAT["messages"], "id": "chat"},
        max_tokens=3,
        ignore_eos=True,
    )
    with running_server() as server:
        server.runner.poisoned.add(server.service.model.tokenizer.encode("\x07")[0])
        good, empty, failed, chat = run_through(server, lines, PLAIN)
        server.assert_quiescent()
    assert [len(one["token_ids"]) for one in good["outputs"]] == [3, 3]
    assert len(good["prompt_logprobs"]) == good["usage"]["prompt_tokens"] == 5
    assert len(good["outputs"][0]["logprobs"]) == 3
    assert chat["usage"]["completion_tokens"] == 3
    assert empty.keys() == {"id", "line", "error"}
    assert "finite" in failed["error"]
    assert failed["outputs"][0]["finish_reason"] == "error"


RECORDS = b'{"id": "a", "line": 1, "outputs": []}\n{"id": "b", "line": 2, "error": "x"}\n'


@pytest.mark.parametrize(
    "tail", [b"", b'{"id": "c", "li', b'{"id": "c", "line": 3}', b"\0\0\0", b"\n", b"{}\n"]
)
def test_a_record_that_was_cut_off_is_removed(tmp_path, tail):
    path = tmp_path / "out.jsonl"
    path.write_bytes(RECORDS + tail)
    assert repair(path, PLAIN) == {1: "a", 2: "b"}
    assert path.read_bytes() == RECORDS


def test_a_file_that_is_no_batch_output_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"precious\n" + RECORDS)
    with pytest.raises(ConfigError, match="line 1: no record of a batch"):
        repair(path, PLAIN)
    assert path.read_bytes() == b"precious\n" + RECORDS


def test_a_batch_is_continued_in_its_own_format(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(RECORDS)
    with pytest.raises(ConfigError, match="line 1: no record of a batch"):
        open_output(path, [], True, OPENAI)


def test_resuming_leaves_out_what_is_done(tmp_path):
    lines = parse_plain({"prompt": "p", "id": "a"}, {"id": "b"}, b"", {"prompt": "p", "id": "c"})
    path = tmp_path / "out.jsonl"
    path.write_bytes(RECORDS)
    assert open_output(path, lines, True, PLAIN) == lines[2:]
    for other in (b'{"id": "z", "line": 1}\n', b'{"id": "a", "line": 3}\n'):
        path.write_bytes(other)
        with pytest.raises(ConfigError, match="of another input"):
            open_output(path, lines, True, PLAIN)


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        ((), "the following arguments are required: input, --output"),
        (("{dir}/absent", "--output", "{dir}/o"), "absent: No such file"),
        (("{dir}/in", "--output", "{dir}/in"), "exists; --resume continues it"),
        (("{dir}/in", "--output", "{dir}"), "is a directory"),
        (("{dir}/in", "--output", "{dir}/o", "--tp", "0"), "must be at least 1"),
    ],
)
def test_what_it_cannot_use_is_refused(capsys, tmp_path, argv, fragment):
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    words = [word.format(dir=tmp_path) for word in argv]
    assert main(["batch", *words, "--format", "plain"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert fragment in line
    assert (tmp_path / "in").read_text() == '{"prompt": "x"}\n'


def test_defaults_of_lines_are_of_the_plain_format_alone(capsys, tmp_path):
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    argv = ["batch", f"{tmp_path}/in", f"--output={tmp_path}/out", "--max-tokens=3"]
    assert main(argv) == 2
    assert "max_tokens: only lines of --format plain" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
