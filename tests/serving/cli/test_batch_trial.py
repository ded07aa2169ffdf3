"""A batch whose lines all fail: said before anything is loaded, recorded, and no success."""

import json
from pathlib import Path

import pytest
from batch_kit import encoded
from engines import checkpoint

from serving.cli.main import main
from serving.run.foreign_commands import translated_command

GOOD = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
FLAGS = ["--sp=1", "--tp=1", "--dtype=float32", "--block-size=4", "--max-model-len=64"]
FLAGS += ["--num-blocks=40", "--max-num-seqs=2", "--token-buckets=16", "--cache-dir=none"]
FLAGS += ["--max-num-batched-tokens=16"]


class Batch:
    """A folder with an input, and the command over it."""

    def __init__(self, folder: Path):
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def run(self, *lines: object, resume: bool = False, flags: tuple[str, ...] = ()) -> int:
        self.source.write_bytes(b"".join(encoded(*lines)))
        command = ["batch", str(checkpoint()[0]), str(self.source), f"--output={self.output}"]
        return main([*command, *FLAGS, *flags, *(["--resume"] if resume else [])])

    def run_as_vllm(self, *flags: str) -> int:
        files = ["-i", str(self.source), f"--output-file={self.output}"]
        return main(["run-batch", *files, "--model", str(checkpoint()[0]), *FLAGS, *flags])

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing may be loaded, let alone compiled."""

    def refuse(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("serving.cli.batch.open_llm", refuse)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{\n", "not JSON"),
        (GOOD | {"temperature": -1}, "temperature must be between 0 and 100"),
        (GOOD | {"model": "gpt-4o"}, "There is no model 'gpt-4o': it is called /"),
        (GOOD | {"max_tokens": 80}, "maximum context length is 64 tokens"),
        (GOOD | {"prompt": [100_000]}, "vocabulary"),
        (GOOD | {"prompt": "a text"}, "needs a tokenizer"),
        (GOOD | {"stream": True}, "stream has no meaning in a batch"),
        (GOOD | {"logprobs": 500}, "logprobs"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "needs a tokenizer"),
    ],
)
def test_why_no_line_can_be_run_is_said_before_a_model_is_loaded(
    batch, unloaded, capsys, line, words
):
    assert batch.run(line) == 1
    said = capsys.readouterr().err
    assert "can be run, so no model is loaded" in said and words in said
    (record,) = batch.records
    assert words in record["error"]["message"]


def test_reasons_are_counted_and_those_of_most_lines_come_first(batch, unloaded, capsys):
    wrong = [GOOD | {name: -1} for name in ("top_p", "n", "logprobs", "min_tokens")]
    other = GOOD | {"model": "x\x1b[31m"}
    assert batch.run(*wrong, other, other) == 1
    head, first, *_, last, _ = capsys.readouterr().err.splitlines()
    assert "6 lines, of which none can be run" in head
    assert first.startswith("  line 5 and 1 more: ") and "\x1b" not in first
    assert last == "  and 2 other reasons"
    assert [record["custom_id"] for record in batch.records] == [f"line-{n}" for n in range(1, 7)]


@pytest.mark.costs(12)
def test_an_answer_makes_it_a_success_however_many_fail(batch, capsys):
    wrong = GOOD | {"temperature": -1}
    assert batch.run(wrong, GOOD) == 0
    assert [record["error"] is None for record in batch.records] == [False, True]
    assert batch.run(wrong, GOOD, resume=True) == 0  # nothing is left
    assert "no line is left to run" in capsys.readouterr().err
    assert batch.run(wrong, GOOD, wrong, resume=True) == 0  # the others have run before
    assert [record["error"] is None for record in batch.records] == [False, True, False]
    batch.output.unlink()
    # What is known late is no success either.
    assert batch.run(GOOD | {"structured_outputs": {"regex": "a"}}) == 1
    assert "every line failed" in capsys.readouterr().err
    (record,) = batch.records
    assert "needs a tokenizer" in record["error"]["message"]


def test_an_input_without_lines_is_done(batch, unloaded):
    assert batch.run(b"\n") == 0
    assert batch.records == []


def test_a_run_without_an_answer_is_none_when_it_is_resumed(batch, unloaded):
    wrong = GOOD | {"temperature": -1}
    assert batch.run(wrong) == 1
    assert batch.run(wrong, resume=True) == 1
    assert batch.run(wrong, wrong, resume=True) == 1


@pytest.mark.costs(12)
def test_the_command_of_vllm_runs_lines_that_name_the_served_model(batch, capsys):
    batch.source.write_bytes(b"".join(encoded(GOOD | {"model": "mine"}, GOOD | {"model": "x"})))
    assert batch.run_as_vllm("--served-model-name=mine") == 0
    assert [record["error"] is None for record in batch.records] == [True, False]
    batch.output.unlink()
    assert batch.run_as_vllm("--served-model-name=yours") == 1
    said = capsys.readouterr().err
    assert "There is no model 'mine': it is called yours." in said and "and 1 more" not in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run-batch -i a -o b --model m", "batch a --output b --model m"),
        ("run-batch --model m --output-file=b --input-file=a", "batch a --model m --output b"),
        ("run-batch -i", "batch"),
        ("batch -i a", "batch -i a"),
        ("", ""),
    ],
)
def test_words_of_the_command_of_vllm(words, expected):
    assert translated_command(words.split()) == expected.split()
