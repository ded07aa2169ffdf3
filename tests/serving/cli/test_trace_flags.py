"""Closed loops, as users of `mesh simulate` type them."""

import json
from pathlib import Path

import pytest

from serving.cli.main import main

LENGTHS = ("--set", "prompt_tokens=500", "--set", "output_tokens=10")
LOOP = ("mesh", "simulate", "--trace", "closed", "--set", "users=3", *LENGTHS, "--dtype", "fp8")
LINE = '{"arrival_seconds": %d, "prompt_tokens": 500, "output_tokens": 10}\n'


def test_a_loop_has_a_row_for_each_number_of_users(capsys, tmp_path):
    out = ("--out", str(tmp_path))
    assert main([*LOOP, "--compare", "tp", "--rates", "1,4", *out]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    place = head.split().index("users")
    assert [line.split()[place] for line in lines[:2]] == ["3", "12"]
    rows = map(json.loads, Path(tmp_path, "simulate.jsonl").read_text().splitlines())
    assert [row["users"] for row in rows] == [3, 12]
    assert "ttft by rate" in Path(tmp_path, "report.html").read_text()


def test_a_trace_file_becomes_a_loop(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINE % second for second in range(6)))
    flags = ("--trace", str(path), "--set", "users=2", "--compare", "tp", "--dtype", "fp8")
    assert main(["mesh", "simulate", *flags]) == 0
    assert "users" in capsys.readouterr().out.splitlines()[0]
    assert main(["mesh", "simulate", *flags, "--set", "rate=2"]) == 2
    assert "users and think_seconds make a closed loop of a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (("--set", "rate=4"), "unknown argument of closed 'rate'"),
        (("--compare", "oracle"), "when users ask depends on the deployment"),
        (("--set", "users=none"), "'none' is no number"),
    ],
)
def test_wrong_loops_are_exit_code_2(capsys, flags, fragment):
    assert main([*LOOP, *flags]) == 2
    assert fragment in capsys.readouterr().err
