"""`shiftjax plan --compile`: the engine's steps for GPUs that are not here, or why not."""

import importlib.metadata
import json

import pytest

from serving.bench.compiled_plan import PACKAGES, collective_bytes
from serving.cli.main import main

HLO = """
  %a = f32[8,64]{1,0} all-reduce(%x), channel_id=1
  ROOT %b = (f32[2,4]{1,0}, f32[2,4]{1,0}) all-to-all(%y, %z), channel_id=2
  %c = (f32[4]{0}, f32[16]{0}) all-gather-start(%w), channel_id=3
  %d = f32[16]{0} all-gather-done(%c)
  %e = f32[9]{0} add(%d, %d)
"""


def test_collectives_are_counted_by_kind_and_once():
    assert collective_bytes(HLO) == {"all-reduce": 2048, "all-to-all": 64, "all-gather": 64}


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (("--machine", "a100x8-pcie", "--compile"), "are a100x8, a10x8, h100x8, h200x8, l4x8"),
        (("--dtype", "fp8", "--compile"), "use --dtype bfloat16"),
        (("--model", "llama-17b-16e", "--compile"), "the engine has no experts"),
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


def wheels_are_here() -> bool:
    try:
        versions = {importlib.metadata.version(name) for name in PACKAGES}
    except importlib.metadata.PackageNotFoundError:
        return False
    return versions == {importlib.metadata.version("jaxlib")}


@pytest.mark.skipif(not wheels_are_here(), reason="compiling for a GPU needs " + str(PACKAGES))
def test_a_compiled_step_moves_what_was_predicted(capsys, tmp_path):
    argv = ["plan", "--model", "tiny", "--compile", "1x2", "--out", str(tmp_path)]
    sizes = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    assert main([*argv, *sizes]) == 0
    assert "compiled, the largest step" in capsys.readouterr().out
    (row,) = [json.loads(line) for line in (tmp_path / "compiled.jsonl").read_text().splitlines()]
    assert (row["sp"], row["tp"]) == (1, 2)
    assert row["shift_collectives_mb"] == row["predicted_shift_collectives_mb"] > 0
    # The arguments are the weights and some kilobytes of the step's inputs.
    assert 0 <= row["weights_gb"] - row["predicted_weights_gb"] < 20e-6
    held = row["weights_gb"] + row["temporaries_gb"]
    foreseen = row["predicted_weights_gb"] + row["predicted_temporaries_gb"]
    assert (row["kv_tokens"] <= row["predicted_kv_tokens"]) is (held >= foreseen)
