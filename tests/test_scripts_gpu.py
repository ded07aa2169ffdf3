"""The scripts for a GPU machine, as far as a machine without one can run them."""

import json
import math
import os
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_run  # noqa: E402
import tune_kernels  # noqa: E402
from gpu_weights import make_weight  # noqa: E402

from pallas_kernels.measure import Ceilings, DecodeShape, row_of  # noqa: E402
from pallas_kernels.tuned import from_row, read_table  # noqa: E402
from serving.bench import kernels as bench_kernels  # noqa: E402
from serving.cli.main import main  # noqa: E402
from shiftjax.arch.weights import Weight  # noqa: E402
from shiftjax.costs.machine_files import load_machine  # noqa: E402

ENGINE = {"decode step", "prefill step", "greedy", "serve", "switch"}
PREDICTED = {"decode step", "prefill step", "serve", "kernels"}


def test_a_dry_run_goes_through_every_part(tmp_path):
    command = [sys.executable, "scripts/gpu_run.py", "--dry-run", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((tmp_path / "gpu_run.json").read_text())
    parts = {row["part"] for row in rows}
    ran = {part.__name__ for part in gpu_run.PARTS} - {"engine"}
    assert parts == {"environment", "ceilings"} | ran | ENGINE
    for row in rows:
        if row["part"] in PREDICTED:
            assert row.get("predicted_us", row.get("predicted_seconds", 0)) > 0
    switches = [row for row in rows if row["part"] == "switch"]
    assert [(row["sp"], row["tp"]) for row in switches] == [(1, 1), (2, 1)]
    assert all(row["same_tokens"] == row["batch"] for row in switches)
    assert json.loads((tmp_path / "hf_config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.parametrize("transposed", [False, True])
def test_the_weights_are_what_their_description_says(transposed):
    """Another program makes the same ones from the same words."""
    shape, name = (12, 64), "model.layers.0.mlp.down_proj.weight"
    axes = ("intermediate", None)
    weight = Weight("down", shape, axes, name, transposed=transposed)
    stored = make_weight(
        weight, np.dtype(jnp.bfloat16), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    got = np.asarray(stored, np.float64)
    got = got.T if transposed else got
    start, columns = zlib.crc32(name.encode()), got.shape[1]
    for i, value in enumerate(got.ravel()):
        h = (i * 0x9E3779B1 + start) % 2**32
        h = (h ^ (h >> 15)) * 0x85EBCA77 % 2**32
        h ^= h >> 13
        k = round(math.log2(columns**-0.5 / 73.9))
        assert value == ((h >> 24) - 127.5) * 2.0**k


def rows_of(monkeypatch, tmp_path, *parts, seconds=600.0):
    monkeypatch.setattr(gpu_run, "PARTS", parts)
    return gpu_run.run_all(tmp_path, True, seconds)[2:]  # after environment and ceilings


def test_a_part_that_fails_is_a_row_and_the_next_one_runs(monkeypatch, tmp_path):
    def broken(run):
        yield {"number": 1}
        raise RuntimeError("no such kernel")

    def sound(run):
        yield {"number": 2}

    one, failed, two = rows_of(monkeypatch, tmp_path, broken, sound)
    assert (one["number"], two["number"]) == (1, 2)
    assert "no such kernel" in failed["failed"] and failed["part"] == "broken"
    assert not gpu_run.is_right(failed) and gpu_run.is_right(two)
    assert not gpu_run.is_right({"right": False})
    assert len(json.loads((tmp_path / "gpu_run.json").read_text())) == 5


def test_the_run_ends_when_the_time_is_up(monkeypatch, tmp_path):
    def endless(run):
        while True:
            yield {}

    def next_part(run):
        yield {}

    rows = rows_of(monkeypatch, tmp_path, endless, next_part, seconds=0.0)
    assert [row["part"] for row in rows] == ["endless", "endless"]
    assert "0 s are over" in rows[-1]["stopped"] and rows[-1]["not_run"] == ["next_part"]


def test_an_alternative_that_does_not_run_says_so(capsys):
    """The rows of `bench kernels` as people see them."""
    shape, ceilings = DecodeShape(64, 2048), Ceilings(3e12, 8e14)

    def no_cudnn():
        raise RuntimeError("cuDNN is not found\nstack")

    times = {"fast": lambda: 1e-3, "cuDNN": no_cudnn}
    rows = [row_of(shape, 2e-4, ceilings)]
    rows += bench_kernels._alternatives(shape, times, ceilings)
    bench_kernels.print_rows("kernels", rows)
    out = capsys.readouterr().out
    first, fast, cudnn = (re.split(r"  +", line.strip()) for line in out.splitlines()[2:])
    assert first == ["decode", "64 x 2048", "200.0", "2,684", "GB/s", "89"]
    assert fast[:3] == ["fast", "64 x 2048", "1,000.0"]
    assert "cuDNN is not found" in cudnn and "stack" not in out


def test_bench_kernels_needs_a_gpu(capsys):
    assert main(["bench", "kernels"]) == 2
    assert "needs a Hopper GPU (H100, H200): JAX sees only cpu here" in capsys.readouterr().err


def test_measured_kernels_renew_a_machine_file(tmp_path):
    rows = [
        {"kernel": "ceilings", "device": "NVIDIA H200", "flops_per_second": 0.8 * 989.5e12},
        *({"kernel": "decode", "rate": rate} for rate in (2400, 3600, 4000)),
        {"kernel": "  cuDNN", "rate": 1.0},
        {"kernel": "prefill", "rate": 494.75},
    ]
    file = tmp_path / "here.yaml"
    file.write_text(bench_kernels.machine_file("h200x8", rows))
    renewed = {"matmul_efficiency": 0.8, "kv_efficiency": 0.75, "attention_efficiency": 0.5}
    assert load_machine(str(file)) == replace(load_machine("h200x8"), **renewed)


@pytest.mark.parametrize("head_dim", tune_kernels.HEAD_DIMS)
@pytest.mark.parametrize("block_size", tune_kernels.BLOCK_SIZES)
def test_every_shape_has_candidates_of_both_kernels(head_dim, block_size):
    every = list(tune_kernels.all_candidates([head_dim], [block_size]))
    for kernel in ("prefill", "decode"):
        kept = tune_kernels.candidates_for(kernel, head_dim, block_size)
        tried = [one.settings for one in every if one.kernel == kernel]
        assert kept and all(settings in tried for settings in kept)


def test_what_does_not_fit_shared_memory_is_pruned():
    deepest = {"kv_tile": 128, "stages": 4}
    for settings in tune_kernels.candidates_for("prefill", 128, 16):
        assert not deepest.items() <= settings.items()


def test_the_table_that_is_shipped_can_be_read():
    for row in json.loads(read_table()):
        from_row(row)


def tuned_row(kernel: str, score: float, **settings) -> dict:
    return {"kernel": kernel, "head_dim": 128, "block_size": 16} | {
        "settings": settings,
        "score": score,
    }


def test_the_best_settings_replace_those_of_the_same_gpu_and_shape(tmp_path):
    table = tmp_path / "tuned.json"
    rows = [
        tuned_row("prefill", 2.0, kv_tile=64),
        tuned_row("prefill", 1.0, kv_tile=128),
        tuned_row("decode", 3.0, num_blocks=264),
        tuned_row("decode", 4.0, num_blocks=132),
    ]
    tune_kernels.write_best("GPU A", rows, table)
    tune_kernels.write_best("GPU B", rows, table)
    rows[0]["score"] = 0.5
    tune_kernels.write_best("GPU A", rows, table)
    b, a = json.loads(table.read_text())
    assert (a["gpu"], b["gpu"]) == ("GPU A", "GPU B")
    assert (from_row(a).prefill.kv_tile, from_row(b).prefill.kv_tile) == (64, 128)
    assert from_row(a).decode.num_blocks == 264
