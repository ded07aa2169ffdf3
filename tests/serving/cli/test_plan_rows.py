"""What `plan` prints of rows: reasons, goals."""

import re

from serving.cli.main import main


def test_plan_says_how_long_a_request_may_be(capsys):
    argv = ("--model", "llama-70b", "--machine", "a10x8", "--input", "100000")
    assert main(["plan", *argv]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    words = r"nothing is recommended: .* 100,000 \+ 250 tokens; the longest is one of ([\d,]+), in"
    longest = re.match(words, last)
    assert longest is not None and 10_000 < int(longest[1].replace(",", "")) < 100_250


def test_a_goal_chooses_the_row(capsys):
    argv = ("plan", "--model", "qwen3-30b-a3b", "--machine", "h200x8")
    assert main([*argv, "--goal", "throughput"]) == 0
    after = capsys.readouterr().out.partition("recommended: ")[2]
    assert after.startswith("--dp 8 --sp 1 --tp 1")
    assert "has most tokens per second when full, of 16 that fit" in after
