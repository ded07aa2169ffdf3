"""Measured kernels: files of them are read or refused, and their constants are found again."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from serving.cli.main import main
from shiftjax.costs.machine_files import load_machine
from shiftjax.options import ConfigError
from shiftjax.sim.kernel_fit import fit_kernels, part_errors
from shiftjax.sim.measured_kernels import SIZES, predicted_seconds, read_kernels

H200 = load_machine("h200x8")
HEADS = {"heads": 8, "kv_heads": 1, "head_dim": 128}
SHAPES = [  # of every kernel
    *({"kernel": "product", "rows": m, "inner": k, "columns": n, "format": fmt}
      for m in (1, 64, 512, 4096) for k, n in ((1024, 8192), (8192, 8192))
      for fmt in ("bfloat16", "fp8")),
    *({"kernel": "decode", "seqs": n, "context": c, "format": fmt, "launches": 3, **HEADS}
      for n in (1, 16, 256) for c in (100, 4000) for fmt in ("bfloat16", "fp8")),
    *({"kernel": "prefill", "tokens": n, "context": c, **HEADS}
      for n in (64, 4096) for c in (0, 20_000)),
    *({"kernel": "experts", "tokens": n, "hidden": 2048, "width": 768, "experts": 128, "own": 128,
       "k": 8, "format": fmt} for n in (8, 512, 16_384) for fmt in ("bfloat16", "fp8")),
    *({"kernel": kind, "devices": 8, "bytes": size}
      for kind in ("all-reduce", "all-to-all", "all-gather") for size in (1024, 1 << 20, 1 << 26)),
]  # fmt: skip
TRUTH = replace(
    H200,
    matmul_efficiency=0.6,
    memory_efficiency=0.7,
    kv_efficiency={"bfloat16": 0.6, "fp8": 0.3},
    attention_seconds=2e-5,
    attention_efficiency=0.4,
    expert_efficiency={"bfloat16": 0.5, "fp8": 0.9},
    all_to_all=tuple(way.scaled(2.0, 0.5) for way in H200.all_to_all),
    all_reduce=tuple(way.scaled(2.0, 0.5) for way in H200.all_reduce),
)


def measured(tmp_path: Path, suffix: str = ".jsonl") -> Path:
    """A file of all shapes as they would take on the machine to find."""
    unread = tmp_path / "unread.jsonl"
    unread.write_text("\n".join(json.dumps(shape | {"us": 1}) for shape in SHAPES))
    times = [1e6 * predicted_seconds(TRUTH, row) for row in read_kernels(unread)]
    rows = [shape | {"us": us} for shape, us in zip(SHAPES, times, strict=True)]
    path = tmp_path / f"kernels{suffix}"
    if suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_kernel_alone_does_not_heat_the_chip(tmp_path):
    hot = replace(H200, sustained_efficiency=0.5)
    rows = read_kernels(measured(tmp_path))
    for row in rows:
        assert predicted_seconds(hot, row) == predicted_seconds(H200, row), row


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_the_constants_of_measured_kernels_are_found(tmp_path, suffix):
    rows = read_kernels(measured(tmp_path, suffix))
    assert {row.kernel for row in rows} == SIZES.keys() - {"reduce-scatter"}
    assert max(part.median for part in part_errors(H200, rows)) > 0.4
    fitted = fit_kernels(H200, rows)
    assert max(part.p90 for part in part_errors(fitted, rows)) < 0.02
    for name in ("matmul_efficiency", "attention_seconds", "attention_efficiency"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUTH, name), rel=0.03), name
    for name in ("kv_efficiency", "expert_efficiency"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name
    assert fitted.all_gather == pytest.approx(H200.all_gather)


def test_parts_that_were_not_measured_stay(tmp_path):
    rows = [row for row in read_kernels(measured(tmp_path)) if row.kernel == "all-to-all"]
    fitted = fit_kernels(H200, rows)
    assert fitted != H200 and replace(fitted, all_to_all=H200.all_to_all) == H200


def test_what_a_gpu_run_writes_is_read(tmp_path):
    shape = {"seqs": 64, "context": 2048, "block_size": 16} | HEADS
    experts = {"tokens": 64, "hidden": 2048, "width": 768, "experts": 128, "own": 16, "k": 8}
    rows = [
        {"part": "environment", "device": "NVIDIA H200"},
        {"part": "decode", "kernel": "decode", "shape": shape, "us": 50.0},
        {"part": "decode", "kernel": "decode", "failed": "an error"},
        {"part": "experts", "kernel": "experts", "us": 60.0}
        | {"shape": experts | {"dtype": "float8_e4m3fn", "unit": "GB/s"}},
        {"part": "write", "kernel": "kv write", "shape": {"tokens": 64}, "us": 3.0},
    ]
    path = tmp_path / "gpu_run.json"
    path.write_text(json.dumps(rows))
    decode, grouped = read_kernels(path)
    assert decode.seconds == pytest.approx(5e-5) and decode.sizes["context"] == 2048
    assert (grouped.kernel, grouped.format) == ("experts", "fp8")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not JSON", "cannot be read"),
        ("", "has no row of product"),
        ("3", "row 1 is no table of columns"),
        ('{"kernel": "decod", "us": 1}', "unknown kernel 'decod'; did you mean decode"),
        ('{"kernel": "product", "format": "fp7", "us": 1}', "unknown format 'fp7'"),
        ('{"kernel": "all-reduce", "devices": 8, "bytes": "many", "us": 1}', "bytes must be a n"),
        ('{"kernel": "all-reduce", "devices": 8, "bytes": 8, "us": -1}', "us must be a number"),
        ('{"kernel": "all-reduce", "devices": 8, "bytes": 8, "us": NaN}', "us must be a number"),
    ],
)
def test_what_says_no_kernel_is_refused(tmp_path, text, problem):
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_kernels(path)


def test_plan_and_simulate_take_the_machine_that_was_measured(tmp_path, capsys):
    path = str(measured(tmp_path))
    common = ["--model", "llama-8b", "--dtype", "fp8"]
    found = []
    for more in ([], ["--kernels", path]):
        assert main(["plan", *common, *more]) == 0
        found.append(capsys.readouterr().out)
    assert "how far predictions are" in found[1] and "expert" in found[1]
    tables = [out.split("\n       name")[1] for out in found]
    assert tables[0] != tables[1]
    sets = ("rate=1", "seconds=2", "prompt_tokens=9", "output_tokens=2")
    trace = ["--trace", "poisson", "--compare", "tp", *(w for one in sets for w in ("--set", one))]
    assert main(["mesh", "simulate", *common, *trace, "--kernels", path]) == 0
    assert "how far predictions are" in capsys.readouterr().out
    goal = ["--rate", "1", "--ttft", "1", "--tpot", "1", "--kernels", path]
    assert main(["plan", *common, *goal]) == 2
    assert "--kernels is of one machine" in capsys.readouterr().err
    assert main(["plan", "--kernels", str(tmp_path / "none.csv")]) == 2
