"""`shiftjax plan` for a load, and for a number of GPUs, as users type it."""

import json
from pathlib import Path

import pytest

from serving.cli.main import main

ASKED = ("plan", "--model", "llama-8b", "--machine", "l4x8,h100x8", "--input", "500")
LIMITS = ("--ttft", "1", "--tpot", "0.05")


@pytest.mark.thorough
def test_plan_finds_the_least_gpus_and_writes_them_down(capsys, tmp_path):
    argv = [*ASKED, *LIMITS, "--rate", "5", "--output", "30"]
    argv += ["--gpu-price", "l4x8=0.8,h100x8=2.5", "--out", str(tmp_path)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    data = json.loads((tmp_path / "advice.json").read_text())
    assert out.startswith("Take ") and out.startswith(data["advice"])
    assert "for a million tokens in and out" in out
    assert data["asked"] == {"rate": 5.0, "num_devices": None}
    assert data["limits"] == {"ttft": 1.0, "tpot": 0.05, "percentile": 90, "margin": 0.05}
    assert data["best"]["ttft_seconds"] <= 1.0 and data["best"]["meets"] is True
    rows = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert data["best"] in rows and data["best"]["seeds"] == 5
    assert "model: " in (tmp_path / "engine.yaml").read_text()
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 2 and len(list(tmp_path.glob("*.svg"))) == 2


@pytest.mark.thorough
def test_plan_finds_the_most_load_for_gpus(capsys, tmp_path):
    argv = ["plan", "--model", "llama-8b", "--machine", "l4x8", "--input", "500", "--output", "30"]
    assert main([*argv, *LIMITS, "--gpus", "8", "--max-num-seqs", "32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 devices of l4x8: ") and "Of these 90% get 1 s to" in out
    assert ": shiftjax serve llama-8b --sp " in out.splitlines()[3]


@pytest.mark.thorough
@pytest.mark.parametrize("question", [("--users", "60"), ("--users", "most", "--gpus", "4")])
def test_plan_answers_for_users(capsys, tmp_path, question):
    argv = ["plan", "--model", "llama-8b", "--machine", "l4x8", "--input", "500", "--output", "30"]
    argv += ["--think", "2", "--max-num-seqs", "32", "--out", str(tmp_path)]
    assert main([*argv, *LIMITS, *question]) == 0
    out = capsys.readouterr().out
    data = json.loads((tmp_path / "advice.json").read_text())
    assert data["asked"]["think_seconds"] == 2.0 and data["best"]["users_each"] >= 1
    assert "users think for 2 s on average" in out and "Start" in out
    first, second, *_ = out.splitlines()
    if "most" in question:
        assert first.startswith("4 devices of l4x8: ") and " users (throughput" in first
    else:
        assert first.startswith("Take ") and second.startswith("For 60 users, of which")
    rows = (tmp_path / "by_users.jsonl").read_text().splitlines()
    assert rows and "users" in json.loads(rows[0])


def write_trace(path: Path, count: int) -> None:
    """Requests a second apart that share a prefix."""
    lengths = {"prompt_tokens": 1100, "output_tokens": 4, "prefix_ids": [0, 1]}
    rows = [json.dumps({"arrival_seconds": at} | lengths) for at in range(count)]
    path.write_text("\n".join(rows))


def test_plan_answers_for_a_trace(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, 40)
    assert main(["plan", "--model", "llama-8b", "--trace", str(trace), *LIMITS]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Take 1 devices of h200x8: one server of 1, TP 1, KV cache bfloat16.")
    assert "For 1.02564 requests/s" in out and "(40 requests of a trace)" in out


def test_users_ask_what_a_trace_has(capsys, tmp_path):
    """Though all of it came at once, so that it has no rate."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_seconds": 0.0, "prompt_tokens": 1100, "output_tokens": 4}] * 40
    trace.write_text("\n".join(map(json.dumps, rows)))
    argv = ["plan", "--model", "llama-8b", "--trace", str(trace), *LIMITS]
    assert main([*argv, "--rate", "1"]) == 2
    assert "there is no rate to plan for" in capsys.readouterr().err
    assert main([*argv, "--users", "3"]) == 0
    out = capsys.readouterr().out
    assert "For 3 users, of which" in out and "40 requests of a trace; users ask again" in out


def test_plan_ends_with_1_where_nothing_is_quick_enough(capsys):
    assert main([*ASKED, "--rate", "5", "--ttft", "1e-5", "--tpot", "1e-5"]) == 1
    assert "Nothing that was tried answers 5 requests/s" in capsys.readouterr().out


def test_a_trace_with_prompts_that_fit_nowhere_is_a_reason(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, 3)
    rows = trace.read_text().replace("1100", "200000", 1)
    trace.write_text(rows)
    assert main(["plan", "--model", "llama-8b", "--trace", str(trace), *LIMITS]) == 2
    assert "1 of 3 requests of this trace have more than 131,072" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpus", "8", "--rate", "3"), "--gpus asks how many requests/s they answer"),
        (("--gpus", "0"), "--gpus must be at least 1"),
        (("--gpus", "8", "--gpu-price", "3"), "--gpu-price chooses how many GPUs"),
        (("--rate", "3", "--margin", "1"), "--margin must be a share of the limits"),
        (("--users", "8", "--rate", "3"), "--users ask again when they are answered"),
        (("--users", "0"), "--users must be at least 1"),
        (("--users", "8", "--gpus", "8"), "say how many, or with --gpus that it is the `most`"),
        (("--users", "most"), "say how many, or with --gpus that it is the `most`"),
        (("--think", "2", "--rate", "3"), "--think is for --users"),
        (("--users", "8", "--think", "-1"), "--think must be 0 or more seconds"),
        (("--rate", "3", "--length-cv", "-1"), "--length-cv must be a number from 0 to 100"),
    ],
)
def test_flags_that_make_no_sense_are_refused(capsys, flags, words):
    assert main([*ASKED, *LIMITS, *flags]) == 2
    assert words in capsys.readouterr().err
