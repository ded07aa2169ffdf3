"""What a batch writes depends on its lines and the engine's seed: a resumed run ends the same."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from batch_kit import encoded, run_through
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import byte_tokenizer, running_server

from serving.cli.batch_formats import FORMATS, Format, read_lines
from serving.cli.batch_output import open_output
from serving.cli.main import main

BODIES = [
    {"prompt": "drawn from the line", "max_tokens": 9},
    {"prompt": "drawn from the line", "max_tokens": 9},
    {"prompt": "x", "temperature": -1},
    {"prompt": "given", "seed": 7, "max_tokens": 40},
    {"prompt": "several", "n": 3, "max_tokens": 12, "logprobs": 2},
    {"prompt": ""},
    {"prompt": "greedy", "temperature": 0, "max_tokens": 5},
    {"prompt": "the last", "max_tokens": 17},
]
ENDLESS = [body | {"ignore_eos": True} for body in BODIES]
OF_THE_RUN = re.compile(rb'"created":\d+|"cached_tokens":\d+')  # and not of the line


def written(server, lines: list, form: Format) -> bytes:
    return b"".join(
        msgspec.json.encode(record) + b"\n" for record in run_through(server, lines, form)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_that_ended_at_any_byte_is_resumed_to_the_same_bytes(tmp_path, name):
    form = FORMATS[name]
    lines = read_lines(encoded(*ENDLESS), form)
    path = tmp_path / "out.jsonl"
    with running_server() as server:
        whole = written(server, lines, form)

        @given(st.integers(0, len(whole)))
        @settings(max_examples=25, deadline=None)
        def resume(num_bytes: int) -> None:
            path.write_bytes(whole[:num_bytes])
            rest = written(server, open_output(path, lines, True, form), form)
            ended = path.read_bytes() + rest
            assert OF_THE_RUN.sub(b"", ended) == OF_THE_RUN.sub(b"", whole)

        resume()
    assert name != "plain" or not OF_THE_RUN.search(whole)


def test_draws_are_those_of_the_line_and_of_the_prompt_in_it():
    line = {"prompt": ["same", "same"], "max_tokens": 30, "ignore_eos": True}
    lines = read_lines(encoded(line, line | {"seed": 5}), FORMATS["openai"])
    with running_server() as server:
        drawn, given_one = run_through(server, lines)
    texts = [[c["text"] for c in r["response"]["body"]["choices"]] for r in (drawn, given_one)]
    assert texts[0][0] != texts[0][1]
    assert texts[1][0] == texts[1][1]


@pytest.mark.thorough
def test_a_killed_run_in_phases_goes_on_in_others(tmp_path: Path):
    """A signal that nothing can catch; then the rest in other degrees: as in one configuration."""
    lines = [body | {"id": f"{i}-{j}"} for i in range(6) for j, body in enumerate(ENDLESS)]
    source, output, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    source.write_bytes(b"".join(encoded(*lines)))
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    flags = ["--model=random:tiny", f"--tokenizer={tmp_path}/tokenizer.json", "--format=plain"]
    flags += ["--dtype=float32", "--max-num-seqs=4", "--token-buckets=32", "--num-blocks=100"]
    flags += ["--max-num-batched-tokens=32", "--max-model-len=128", "--block-size=4"]
    words = ["batch", str(source), *flags, "--cache-dir=none", "--output"]
    assert main([*words, str(whole), "--devices=1"]) == 0
    words = [*words, str(output), "--host-memory=60KB"]  # some six prompts
    first = [sys.executable, "-m", "serving.cli.main", *words, "--phases=pp2:tp2", "--devices=2"]
    killed = subprocess.Popen(first, stderr=subprocess.DEVNULL)
    while not output.exists() or output.read_bytes().count(b"\n") < 10:
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert 10 <= output.read_bytes().count(b"\n") < len(lines)
    assert main([*words, "--resume", "--phases=tp2:pp2", "--devices=2"]) == 0
    found, expected = (
        [json.loads(x) for x in f.read_bytes().splitlines()] for f in (output, whole)
    )
    assert [record["id"] for record in found] == [line["id"] for line in lines]
    assert sum("error" in record for record in found) == 12
    # In other degrees the last bits of log-probabilities are others.
    found_logprobs, expected_logprobs = taken_out(found), taken_out(expected)
    assert found == expected
    assert found_logprobs == pytest.approx(expected_logprobs, abs=1e-4)
    assert len(found_logprobs) > 500


def taken_out(records: list[dict]) -> list[float]:
    """The log-probabilities, which are in the records no more; the tokens are."""
    each = (one for record in records for one in record.get("outputs", ()))
    tokens = [token for one in each for token in one.get("logprobs", ())]
    return [value for x in tokens for value in (x.pop("logprob"), *x.pop("top_logprobs"))]
