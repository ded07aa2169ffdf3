"""Batch files: what a line may be, the order of records, and resuming."""

import importlib.util
import io
import json
from pathlib import Path

import pytest

from serving.cli.batch import (
    Job,
    Refused,
    in_order,
    left_to_do,
    parse_jobs,
    repair,
    result_record,
    write_record,
)
from shiftjax.control.request import SamplingParams, TokenLogprobs
from shiftjax.options import ConfigError
from shiftjax.outputs import CompletionOutput, RequestOutput

SCRIPT = Path(__file__).parents[1] / "scripts" / "generate.py"


def parse(*lines: object, **defaults: object) -> list[Job | Refused]:
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return parse_jobs(encoded, defaults)


def test_a_line_is_a_prompt_or_messages_with_sampling_fields():
    messages = [{"role": "user", "content": "Hi"}]
    plain, chat = parse(
        {"prompt": "Hello", "temperature": 0, "max_tokens": 3},
        {"id": "b", "messages": messages},
        max_tokens=7,
    )
    assert plain == Job(1, "line-1", "Hello", None, SamplingParams(temperature=0, max_tokens=3))
    assert chat == Job(2, "b", None, messages, SamplingParams(max_tokens=7))


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
        ({"prompt": "x", "id": 3}, "id must be text"),
        ({"prompt": "x", "id": ""}, "id must be text"),
        ({"prompt": "x", "max_token": 3}, "unknown option 'max_token'; did you mean max_tokens?"),
        ({"prompt": "x", "temperature": -1}, "temperature must be between"),
        ({"prompt": 3, "top_p": 2, "n": 0}, "prompt must be text, got 3; n must be between"),
    ],
)
def test_a_bad_line_is_refused_in_its_place(line, fragment):
    good, bad = parse({"prompt": "x"}, line)
    assert isinstance(good, Job)
    assert isinstance(bad, Refused)
    assert fragment in bad.error
    assert "\n" not in bad.error
    assert bad.record() == {"id": "line-2", "line": 2, "error": bad.error}


def test_blank_lines_count_but_give_no_record():
    entries = parse({"prompt": "a"}, b"  \n", b"", {"prompt": "b"})
    assert [entry.line for entry in entries] == [1, 4]


def test_an_id_that_is_taken_is_refused():
    first, second = parse({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})
    assert isinstance(first, Job)
    assert second == Refused(2, "x", "id 'x' is also that of line 1")


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


def job(line: int, name: str) -> Job:
    return Job(line, name, "p", None, SamplingParams())


def test_a_record_has_all_that_was_asked_for():
    top = TokenLogprobs(5, -0.5, [5], [-0.5])
    one = CompletionOutput(0, "tëxt", [5], [top], "length")
    output = RequestOutput("r", "p", [1, 2], [one], prompt_logprobs=[None, top])
    file = io.BytesIO()
    write_record(file, result_record(job(3, "a"), output))
    logprob = {"token_id": 5, "logprob": -0.5, "top_ids": [5], "top_logprobs": [-0.5]}
    assert json.loads(file.getvalue()) == {
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
    assert file.getvalue().endswith(b"\n")
    assert file.getvalue().count(b"\n") == 1


def test_a_failed_job_says_so():
    failed = CompletionOutput(0, finish_reason="error", error="non-finite logits")
    output = RequestOutput("r", "p", [1], [failed])
    assert result_record(job(1, "a"), output)["error"] == "non-finite logits"


RECORDS = b'{"id": "a", "line": 1, "outputs": []}\n{"id": "b", "line": 2, "error": "x"}\n'


@pytest.mark.parametrize(
    "tail", [b"", b'{"id": "c", "li', b'{"id": "c", "line": 3}', b"\0\0\0", b"\n", b"{}\n"]
)
def test_a_record_that_was_cut_off_is_removed(tmp_path, tail):
    path = tmp_path / "out.jsonl"
    path.write_bytes(RECORDS + tail)
    assert repair(path) == {1: "a", 2: "b"}
    assert path.read_bytes() == RECORDS


def test_a_file_that_is_no_batch_output_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"precious\n" + RECORDS)
    with pytest.raises(ConfigError, match="line 1: no record of a batch"):
        repair(path)
    assert path.read_bytes() == b"precious\n" + RECORDS


def test_resuming_leaves_out_what_is_done():
    entries = [job(1, "a"), Refused(2, "b", "x"), job(4, "c")]
    path = Path("out.jsonl")
    assert left_to_do(entries, {1: "a", 2: "b"}, path) == entries[2:]
    for other in ({1: "z"}, {3: "a"}):
        with pytest.raises(ConfigError, match="of another input"):
            left_to_do(entries, other, path)


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("generate_script", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        ((), "the following arguments are required: --prompts, --output"),
        (("--prompts", "{dir}/absent", "--output", "{dir}/o"), "absent: No such file"),
        (("--prompts", "{dir}/in", "--output", "{dir}/in"), "exists; --resume continues it"),
        (("--prompts", "{dir}/in", "--output", "{dir}"), "is a directory"),
        (("--prompts", "{dir}/in", "--output", "{dir}/o", "--tp", "0"), "must be at least 1"),
    ],
)
def test_the_script_refuses_what_it_cannot_use(script, capsys, tmp_path, argv, fragment):
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    assert script.main([word.format(dir=tmp_path) for word in argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert fragment in line
    assert (tmp_path / "in").read_text() == '{"prompt": "x"}\n'
