"""Requests that fit nowhere come with a reason."""

import pytest

from serving.cli.main import main

SYNTHETIC = ["mesh", "simulate", "--trace", "poisson", "--set", "rate=1", "--set", "seconds=5"]


@pytest.mark.parametrize(
    ("prompt", "names", "words"),
    [
        (90_000, "tp,dp1tp1", "dp1tp1 refused 5 of 5 requests: its KV cache holds "),
        (190_000, "tp", "tp refused 5 of 5 requests: the model takes 131,072 tokens of one"),
    ],
)
def test_what_was_refused_is_said_with_a_reason(capsys, prompt, names, words):
    lengths = ["--set", f"prompt_tokens={prompt}", "--set", "output_tokens=2"]
    argv = [*SYNTHETIC, *lengths, "--model", "llama-8b", "--machine", "l4x8"]
    assert main([*argv, "--rates", "1,2", "--compare", names]) == 0
    lines = capsys.readouterr().out.splitlines()
    (reason,) = [line for line in lines if "refused" in line]
    assert reason.startswith(words) and reason.endswith(f"the longest has {prompt + 2:,}")
