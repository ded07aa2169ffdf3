"""Adapters of commands: a batch with one on each line, and starts that end in a line."""

import json

import pytest
from adapters_kit import adapter, expected, modules
from batch_kit import encoded
from engines import checkpoint
from kit import run_command

from serving.cli.main import main

PROMPT = (5, 6, 7)
LINE = {"prompt": [*PROMPT], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LINE |= {"return_token_ids": True}
FLAGS = ["--sp=1", "--tp=1", "--dtype=float32", "--block-size=4", "--max-model-len=64"]
FLAGS += ["--num-blocks=40", "--max-num-seqs=2", "--token-buckets=16", "--cache-dir=none"]
FLAGS += ["--max-num-batched-tokens=16", "--enable-lora", "--max-lora-rank=8"]


@pytest.mark.costs(12)
def test_each_line_of_a_batch_names_its_adapter(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = {"mine": None, "a1": 1, "a2": 2, "a3": None}
    source.write_bytes(b"".join(encoded(*(LINE | {"model": name} for name in names))))
    words = ["batch", str(checkpoint()[0]), str(source), f"--output={output}", *FLAGS]
    words += ["--served-model-name=mine", "--lora-modules", *modules(1, 2).split(",")]
    assert main(words) == 0
    *served, unknown = [json.loads(line) for line in output.read_text().splitlines()]
    for record, (name, seed) in zip(served, names.items(), strict=False):
        body = record["response"]["body"]
        assert body["model"] == name
        assert body["choices"][0]["token_ids"] == expected(PROMPT, seed, 4)
    assert "no such model" in unknown["error"]["message"].lower()


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing may be loaded, let alone compiled."""

    def refuse(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("serving.run.start.loaded", refuse)


def test_a_batch_without_a_line_that_can_be_run_knows_adapters(tmp_path, unloaded, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(encoded(LINE | {"model": "a7"})))
    words = ["batch", str(checkpoint()[0]), str(source), f"--output={output}", *FLAGS]
    code, _, err = run_command(
        capsys, *words, "--served-model-name=mine", "--lora-modules=a1=" + at(1)
    )
    assert code == 1 and "There is no model 'a7': it is called mine, a1." in err[1]


def at(seed: int, **overrides) -> str:
    return str(adapter(seed, **overrides)[0])


def test_an_adapter_that_is_not_there_is_known_before_anything_is_loaded(unloaded, capsys):
    words = ["chat", str(checkpoint()[0]), *FLAGS, "--lora-modules=a=/nowhere"]
    code, _, err = run_command(capsys, *words)
    assert code == 2
    line = "shiftjax: lora_modules: 'a': '/nowhere' is no directory with an adapter_config.json"
    assert err[-1] == line


@pytest.mark.costs(12)
def test_an_adapter_that_does_not_fit_ends_the_start_in_a_line(capsys):
    words = ["generate", "--model", str(checkpoint()[0]), *FLAGS]
    code, out, err = run_command(capsys, *words, f"--lora-modules=wide={at(1, rank=16)}", "x")
    assert (code, out) == (2, "")
    assert err[-1].startswith("shiftjax: lora_modules: wide: ")
    assert "rank 16 is more than max_lora_rank = 8" in err[-1]
    assert not any("Traceback" in line for line in err)
