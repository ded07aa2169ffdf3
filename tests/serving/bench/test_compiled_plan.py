"""`shiftjax plan --compile`: the engine's steps for GPUs that are not here, or why not."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from compile import aot

from serving.bench import compiled_plan
from serving.bench.compiled_cost import Kernel
from serving.bench.compiled_plan import Compiled
from serving.bench.launch_list import Launch
from serving.cli.main import main
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.machine_files import load_engine

SUMS_IN_BRANCHES = 19  # of the sampler, for rows that ask for more than their best token


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (("--machine", "a100x8-pcie", "--compile"), "are a100x8, a10x8, h100x8, h200x8, l4x8"),
        (("--compile", "3x5"), "--compile: 3x5 does not fit"),
        (("--compile", "eight"), "--compile: 'eight' is not SPxTP"),
    ],
)
def test_what_cannot_be_compiled_is_said(capsys, argv, fragment):
    assert main(["plan", *argv]) == 2
    assert fragment in capsys.readouterr().err


def test_missing_wheels_are_named(capsys, monkeypatch):
    monkeypatch.setattr("serving.bench.compiled_plan.PACKAGES", ("jax-cuda13-absent",))
    assert main(["plan", "--model", "tiny", "--compile"]) == 2
    version = importlib.metadata.version("jaxlib")
    assert f"pip install --no-deps jax-cuda13-absent=={version}" in capsys.readouterr().err


def test_launches_of_a_layer_are_listed_in_order(capsys, tmp_path, monkeypatch):
    """The compiler's part is given; tests/compile has the launches of real programs."""
    kernel, layer = Kernel("other", "fusion", "", 0, 0, 1e-6), ["qkv", "decode_attention", "out"]

    def compiled(_target, _deployment, _step, num_layers):
        names = ["embed", *layer * num_layers, "head"]
        launches = [Launch("kernel" if "_" in name else "product", name) for name in names]
        return Compiled(*(1,) * 5, Counter({kernel: len(names)}), {}, False, 1.0, launches)

    monkeypatch.setattr(compiled_plan, "PACKAGES", ())
    monkeypatch.setattr(compiled_plan, "_compile", compiled)
    sizes = ["--max-num-seqs", "8", "--compile", "1x8", "--out", str(tmp_path)]
    assert main(["plan", "--model", "llama-70b", "--machine", "h200x8", *sizes]) == 0
    assert f"sp 1 tp 8, shift of 8 tokens: {'; '.join(layer)}\n" in capsys.readouterr().out
    rows = [row for row in rows_of(tmp_path / "layers.jsonl") if row["tokens"] == 8]
    assert [row["name"] for row in rows] == layer
    assert {(row["sp"], row["tp"], row["step"]) for row in rows} == {(1, 8, "shift")}
    steps = rows_of(tmp_path / "compiled.jsonl")
    assert [row["launches_per_layer"] for row in steps] == [3, 3]
    products, attention = 4, 1  # sums are in the launches of norms: h200x8 has a switch
    engine, beside = load_engine("shiftjax"), products + attention
    largest, decodes = (engine.num_layer_launches("bfloat16", rows) for rows in (8192, 8))
    assert [row["priced_per_layer"] for row in steps] == [beside + largest, beside + decodes]


@pytest.mark.thorough
def test_a_compiled_step_moves_what_was_predicted(capsys, tmp_path):
    """With layers of codes, and a head in bfloat16."""
    _require_compilers()
    argv = ["plan", "--model", "tiny", "--dtype", "fp8", "--compile", "1x2", "--out", str(tmp_path)]
    sizes = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    assert main([*argv, *sizes]) == 0
    printed = capsys.readouterr().out
    assert "compiled: the largest step in every mode" in printed and "its kernels" in printed
    largest, decodes = rows_of(tmp_path / "compiled.jsonl")
    steps = [(row["sp"], row["tp"], row["step"], row["tokens"]) for row in (largest, decodes)]
    assert steps == [(1, 2, "shift", 64), (1, 2, "shift", 8)]
    for row in (largest, decodes):
        assert row["collectives_mb"] == row["predicted_collectives_mb"] > 0
        assert row["top_level_thunks"] == 1
        assert set(row["all_reduce_kinds"]) == {"one shot"}
        ours = [
            one for one in rows_of(tmp_path / "kernels.jsonl") if one["tokens"] == row["tokens"]
        ]
        assert sum(one["launches"] for one in ours) == row["launches"]
        total = sum(one["total_ms"] for one in ours) / 1e3
        assert row["predicted_seconds"] == pytest.approx(total)
        kinds = Counter({one["kind"]: 0 for one in ours})
        for one in ours:
            kinds[one["kind"]] += one["launches"]
        sums = sum(row["all_reduce_kinds"].values()) - SUMS_IN_BRANCHES
        assert kinds["all-reduce, one shot"] == sums
        assert kinds["product"] >= 4 * PRESETS["tiny"].num_layers
    # The arguments are the weights and kilobytes of the step's inputs, most of them biases.
    row = largest
    assert 0 <= row["weights_gb"] - row["predicted_weights_gb"] < 36e-6  # each of 256 bytes
    held = row["weights_gb"] + row["temporaries_gb"]
    foreseen = row["predicted_weights_gb"] + row["predicted_temporaries_gb"]
    assert (row["kv_tokens"] <= row["predicted_kv_tokens"]) is (held >= foreseen)


@pytest.mark.thorough
def test_it_compiles_where_no_driver_is(tmp_path):
    """Whatever the environment says of platforms: nothing, in most shells."""
    _require_compilers()
    argv = ["plan", "--model", "tiny", "--compile", "1x1", "--out", str(tmp_path)]
    sizes = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    run = subprocess.run(
        [sys.executable, "-c", "from serving.cli.entry import main; main()", *argv, *sizes],
        check=False,
        env={name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in run.stderr, run.stderr[-4000:]
    assert [row["top_level_thunks"] for row in rows_of(tmp_path / "compiled.jsonl")] == [1, 1]


def _require_compilers() -> None:
    """Skip where nothing can be compiled for GPUs."""
    if reason := aot.unavailable():
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
