"""`shiftjax bench`: engines without a server; the flags of every kind; what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.thorough
def test_startup(tmp_path):
    row = run(tmp_path, "startup", "--starts=1")
    assert row["warm_best"]["compile_seconds"] < row["cold"]["compile_seconds"]
    assert row["cold"]["total_seconds"] > row["cold"]["compile_seconds"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("latency", "--batch=0"), "--batch must be 1 or more, got 0"),
        (("startup", "--starts=-1"), "--starts must be 1 or more, got -1"),
        (
            ("latency", "--prompt-tokens=60", "--output-tokens=60"),
            "maximum context length is 64 tokens",
        ),
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
        (("serve", "--key-file=/dev/null"), "--key-file: /dev/null is empty"),
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


def test_what_serving_costs(tmp_path):
    command = [sys.executable, "scripts/bench.py", "overhead", "--streams=3", "--tokens=20"]
    command += ["--rounds=1", "--step-milliseconds", "1"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    rows = {row["over"]: row for row in json.loads(run.stdout.splitlines()[-1])["rows"]}
    assert set(rows) == {"engine", "http", "grpc"}
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert all(rows[name]["events_per_second"] > 0 for name in ("http", "grpc"))
