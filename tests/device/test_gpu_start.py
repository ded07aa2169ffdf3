"""What a start does, on GPUs above all: on virtual devices that pass for GPUs."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from engines import checkpoint, make, run, tokens
from oracle import numpy_llama

from shiftjax.arch.formats import Formats
from shiftjax.arch.numerics import NUMERICS
from shiftjax.arch.presets import PRESETS
from shiftjax.core.policies import make_policy
from shiftjax.core.request import SamplingParams
from shiftjax.device import strict
from shiftjax.device.all_reduces import all_reduce_kinds, warn_of_slow_all_reduces
from shiftjax.device.programs import CompileCounter, trial_step
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.step import StepDef
from shiftjax.device.strict import Chosen
from shiftjax.models.attention_backend import xla_attention
from shiftjax.models.norm_backend import XLA_NORMS, NormBackend
from shiftjax.models.product_backend import XLA_CODES, Products
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout

PROMPT = [5, 6, 7] * 4
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
ONE_SHOT = """
  %a = bf16[8] all-reduce(%x), backend_config={"kernel_strategy":"KERNEL_STRATEGY_TRITON_ONE_SHOT"}
  %b = bf16[8] all-reduce-start(%x), backend_config={"kernel_strategy":"..._TRITON_TWO_SHOT"}
  %c = bf16[8] all-reduce-done(%b)
"""


@pytest.fixture(scope="module")
def built():
    """An engine, the programs that ran before its first request, and what the log said."""
    directory, config, tensors = checkpoint()
    ran, try_out = [], DeviceRunner._try_out

    def noted(runner, program, mode):
        pools = jax.tree.map(np.asarray, runner.memory.pools)
        try_out(runner, program, mode)
        after = jax.tree.map(np.asarray, runner.memory.pools)
        ran.append((program.bucket.tokens, mode.label, pools, after))

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shiftjax").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepDef, "platform", "gpu")
        patch.setattr(DeviceRunner, "_try_out", noted)
        made = make(directory, 2, 1, token_buckets=[32])
    logging.getLogger("shiftjax").removeHandler(handler)
    return made, ran, lines, (config, tensors)


@pytest.mark.thorough
def test_every_program_runs_twice_before_traffic(built):
    """All of them once, then all again: what comes later lets go of the graphs before it."""
    made, ran, _, _ = built
    programs = made.runners[0].programs
    compiled = [(p.bucket.tokens, mode.label) for p in programs for mode in p.steps]
    assert [one[:2] for one in ran] == 2 * compiled
    assert {label for _, label in compiled} == {"base", "shift"}


@pytest.mark.costs(8)
def test_a_mode_that_is_not_compiled_is_no_reason_to_compile(uncached, monkeypatch):
    """Whoever asks for one gets another, which is there, and the same tokens."""
    monkeypatch.setattr(StepDef, "platform", "gpu")
    directory, config, tensors = checkpoint()
    made = make(directory, 2, 1, policy="shift")
    (runner,) = made.runners
    compiled = [list(program.steps) for program in runner.programs]
    assert compiled == [[runner.step.layout.shift]]
    made.engine.policy = make_policy("base", None)
    counter = CompileCounter()
    counter.start()
    try:
        events = run(made.engine, [PROMPT], [GREEDY])
    finally:
        counter.stop()
    assert tokens(events[0, 0]) == numpy_llama.greedy(config, tensors, PROMPT, 5)
    assert [list(program.steps) for program in runner.programs] == compiled
    assert counter.count == 0


KERNELS = Chosen(
    xla_attention(128, (None,), 16)._replace(name="pallas"),
    NormBackend("pallas"),
    Products(codes=XLA_CODES._replace(name="pallas")),
)


@pytest.mark.parametrize(
    ("model", "chosen", "name"),
    [
        ({}, KERNELS._replace(attention=xla_attention(128, (None,), 16)), "attention as xla"),
        ({}, KERNELS._replace(norms=XLA_NORMS), "norms as xla"),
        ({}, KERNELS._replace(products=Products()), "products of codes that XLA multiplies"),
        ({"rope_interleaved": True}, KERNELS, "heads that XLA makes: neighbours"),
        ({"experts": PRESETS["qwen3-30b-a3b"].experts}, KERNELS, "the experts of"),
        ({}, KERNELS, ""),
    ],
)
def test_strict_numerics_on_gpus_need_kernels_of_one_tile(monkeypatch, model, chosen, name):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
    how = replace(PRESETS["llama-8b"], **model), Formats("fp8"), chosen
    monkeypatch.setattr(strict, "refusal", lambda *_: None)
    strict.check_strict(jax.devices()[0], NUMERICS["invariant"], *how)
    strict.check_strict(gpu, NUMERICS["float32"], *how)
    if not name:
        strict.check_strict(gpu, NUMERICS["invariant"], *how)
        monkeypatch.setattr(strict, "refusal", lambda _, name, value: f"no {name}")
        name = "this version of XLA: no xla_gpu_override_gemm_autotuner"
    words = f"numerics = invariant cannot be had on NVIDIA H100 with {name}"
    with pytest.raises(ConfigError, match=words):
        strict.check_strict(gpu, NUMERICS["invariant"], *how)


@pytest.mark.parametrize(
    ("name", "tp", "more", "tile"),
    [
        ("llama-70b", 8, {}, 128),
        ("smollm2-135m", 1, {}, 64),
        ("llama-1b", 1, {}, 128),
        ("llama-1b", 1, {"widest": 8}, 64),  # as on 8 devices, of which each has a head of 64
        ("llama-1b", 1, {"leaves": 8}, 64),
    ],
)
def test_channels_that_are_joined_are_whole_tiles(name, tp, more, tile):
    layout = Layout(PRESETS[name], 1, tp, **more)
    options = strict.strict_options("gpu", layout, Formats())
    assert options[strict.TILE] == strict.TILES[tile]
    assert strict.TILE not in strict.strict_options("cpu", layout, Formats())


def test_on_a_cpu_small_programs_run_before_traffic(monkeypatch):
    """With a row and a tile, so that the products of every loop are prepared."""
    ran, loops, try_out = [], [], DeviceRunner._try_out

    def noted(runner, program, mode):
        (work,) = trial_step(runner.step, runner.pool, program.bucket).attention.work
        loops.append((work.rows.num_waves.item(), work.tiles.num_tiles.item()))
        ran.append(program.bucket.tokens)
        try_out(runner, program, mode)

    monkeypatch.setattr(DeviceRunner, "_try_out", noted)
    made = make(checkpoint()[0], 1, 1, token_buckets=[16, 256])
    assert [program.bucket.tokens for program in made.runners[0].programs] == [16, 256]
    assert (ran, loops) == ([16], [(1, 1)])


@pytest.mark.costs(12)
def test_a_trial_step_writes_to_the_null_block_only(built):
    made, ran, _, _ = built
    _, _, before, after = ran[0]
    num_blocks = made.runners[0].pool.num_blocks
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        was, now = (x.reshape(-1, num_blocks, x.shape[1]) for x in (old, new))  # by layer
        assert len(was) == 2
        np.testing.assert_array_equal(was[:, 1:], now[:, 1:])


def test_inputs_at_a_fixed_address_are_the_same_inputs(built):
    made, _, _, (config, tensors) = built
    events = run(made.engine, [PROMPT], [GREEDY])
    assert tokens(events[0, 0]) == numpy_llama.greedy(config, tensors, PROMPT, 5)


def test_sums_by_nccl_are_said(built):
    *_, lines, _ = built
    (line,) = [line for line in lines if "go through NCCL" in line]
    assert "step of 32 tokens" in line and "NVLink" in line


def test_sums_by_kernels_are_not(caplog):
    assert all_reduce_kinds(ONE_SHOT) == {"one shot": 1, "two shot": 1}
    assert all_reduce_kinds("  %a = f32[8]{0} all-reduce(%x), channel_id=1") == {"nccl": 1}


def test_an_odd_group_is_told_why(built, caplog):
    program = built[0].runners[0].programs[0]
    mode = next(mode for mode in program.steps if mode.sp == 1)
    warn_of_slow_all_reduces(program, mode, 6)
    assert "a power of two of devices, and these are 6" in caplog.text
