"""The grouped product of experts is tried before it serves: what is wrong with it is said."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped import GroupedConfig, grouped_mlp
from shiftjax.arch.config import Codes
from shiftjax.arch.formats import Formats, formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.device import attention_cases
from shiftjax.device.attention_cases import try_experts
from shiftjax.device.attention_check import shape_of
from shiftjax.device.expert_cases import (
    OTHERS,
    ExpertStep,
    expert_steps,
    loop,
    outputs_of,
    wrong_with_pairs,
)
from shiftjax.models.expert_backend import GATES, ExpertShape, expert_shape, why_not_traced
from shiftjax.models.tiles import tile_loop
from shiftjax.parallel.layout import Layout

SHAPE = ExpertShape(hidden=128, width=64, per_token=2, dtype="bfloat16", weights="bfloat16")
CODES = SHAPE._replace(weights="fp8")
SQUARES = ExpertShape(256, 128, 2, "bfloat16", "fp8", squares=128)
BIASED = SHAPE._replace(activation="clamped_swiglu", has_bias=True)
MXFP4 = BIASED._replace(weights="mxfp4", group=32)
INT4 = SHAPE._replace(weights="int4", group=64, has_zeros=True)
STEP = ExpertStep("few", 16, np.random.default_rng(1).choice([0, 2, OTHERS], (9, 2)))


def judged(multiply, shape: ExpertShape = SHAPE, num_runs: int = 2) -> str | None:
    """What is said of an implementation; None: nothing is wrong."""
    devices = jax.devices()[:1]
    run, right = (outputs_of(each, shape, STEP, devices) for each in (multiply, loop(shape)))
    wrong = partial(wrong_with_pairs, shape=shape)
    found = attention_cases.judged(run, right(), wrong, devices, num_runs)
    return None if found is None else found.problem


@pytest.mark.costs(8)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SHAPE, id="bfloat16", marks=pytest.mark.thorough),
        pytest.param(CODES, id="codes", marks=pytest.mark.thorough),
        pytest.param(SQUARES, id="squares", marks=pytest.mark.thorough),
        pytest.param(BIASED, id="biased"),
        pytest.param(MXFP4, id="mxfp4", marks=pytest.mark.thorough),
        pytest.param(INT4, id="int4", marks=pytest.mark.thorough),
    ],
)
def test_the_kernels_are_right(shape):
    config, gate = GroupedConfig(STEP.rows, num_blocks=2, stages=2), GATES[shape.activation]
    interpreter = plgpu.InterpretGPUParams(detect_races=False)
    more = {"config": config, "interpret": interpreter, "gate": gate}
    assert judged(lambda *step: grouped_mlp(*step, **more), shape, 1) is None


def test_the_loop_is_its_own_measure():
    assert judged(tile_loop) is None


@pytest.mark.parametrize("shape", [SHAPE, CODES, SQUARES], ids=["bfloat16", "codes", "squares"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, routed, gains: (x, w, routed, gains * 1.1),
        lambda x, w, routed, gains: (x, w._replace(gate=w.up), routed, gains),
        lambda x, w, routed, gains: (x, w._replace(down=w.down[::-1]), routed, gains),
        lambda x, w, routed, gains: (x * jnp.bfloat16(1.1), w, routed, gains),
    ],
    ids=["gains", "gate", "experts", "tokens"],
)
def test_what_is_wrong_is_found(change, shape):
    words = judged(lambda *step: tile_loop(*change(*step)), shape, 1)
    assert words is not None and "is off by" in words


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w._replace(up_bias=w.gate_bias),
        lambda w: w._replace(down_bias=w.down_bias * 1.2),
    ],
)
def test_wrong_biases_are_found(change):
    def multiply(x, weights, routed, gains):
        return tile_loop(x, change(weights), routed, gains, BIASED.activation)

    assert "is off by" in (judged(multiply, BIASED, 1) or "")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "change"),
    [
        (MXFP4, lambda w: w._replace(gate=(w.gate >> 4) | (w.gate << 4))),
        (MXFP4, lambda w: w._replace(down_scale=jnp.roll(w.down_scale, 1, axis=1))),
        (INT4, lambda w: w._replace(up_scale=w.up_scale.at[:, -1].set(w.up_scale[:, -2]))),
        (INT4, lambda w: w._replace(up_zero=None)),
        (CODES, lambda w: w._replace(up_scale=w.gate_scale)),
        (SQUARES, lambda w: w._replace(gate_scale=w.gate_scale[:, :, ::-1])),
    ],
    ids=[
        *("halves of bytes", "the group before", "the last group", "zero points"),
        *("another matrix's scales", "squares of other inputs"),
    ],
)
def test_wrong_codes_and_scales_are_found(shape, change):
    def multiply(x, weights, routed, gains):
        return tile_loop(x, change(weights), routed, gains, shape.activation)

    assert "is off by" in (judged(multiply, shape, 1) or "")


def test_another_activation_is_found():
    assert "is off by" in (judged(tile_loop, BIASED, 1) or "")


def test_what_changes_from_run_to_run_is_found():
    places = iter(range(1 << 10))

    def disturb(out):
        out = np.array(out)
        out.reshape(-1).view(np.uint16)[:: next(places) + 2] ^= 1
        return out

    def multiply(*step):
        out = tile_loop(*step)
        return jax.pure_callback(disturb, jax.ShapeDtypeStruct(out.shape, out.dtype), out)

    assert judged(multiply) == "numbers change from run to run"


def test_kernels_that_do_not_compile_are_a_problem():
    problem = try_experts(STEP, SHAPE, jax.devices()[:1])
    assert problem is not None and "the kernels do not compile" in problem.problem


def test_steps_have_an_expert_without_tokens_and_tokens_without_experts():
    for step in expert_steps(2):
        assert step.routed.sizes[1] == 0 < step.routed.sizes[0]
        assert (step.chosen == OTHERS).all(axis=1).any()


def test_only_experts_that_the_kernels_take_are_tried():
    assert why_not_traced(SHAPE) is None and why_not_traced(CODES) is None
    assert why_not_traced(MXFP4) is None and why_not_traced(INT4) is None
    assert why_not_traced(SQUARES) is None
    narrow = why_not_traced(SQUARES._replace(width=192, squares=64)) or ""
    assert "scales (3, 2) are not of 128 outputs and a block: (2, 2)" in narrow
    squares = replace(PRESETS["qwen3-30b-a3b"], codes=Codes(rows_of_scale=128))
    coded, widened = (expert_shape(squares, each) for each in (formats_of("fp8"), Formats()))
    assert coded is not None and coded.squares == 128 and why_not_traced(coded) is None
    assert widened is not None and not widened.squares
    assert "multiples of 64" in (why_not_traced(SHAPE._replace(hidden=100)) or "")
    assert "are not of groups of 32, 64, 128" in (
        why_not_traced(INT4._replace(hidden=512, group=0)) or ""
    )

    def experts_of(name: str) -> ExpertShape | None:
        layout = Layout(PRESETS[name], 1, 1)
        return shape_of(layout, Formats(), 16, Bucket(8, 8), False).experts

    assert experts_of("qwen3-30b-a3b") == ExpertShape(2048, 768, 8, "bfloat16", "bfloat16")
    assert experts_of("llama-8b") is None  # has none
    biased = ExpertShape(2880, 2880, 4, "bfloat16", "bfloat16", "clamped_swiglu", has_bias=True)
    assert experts_of("gpt-oss-20b") == biased and why_not_traced(biased) is None
    packed = biased._replace(weights="mxfp4", group=32)
    published = Layout(PRESETS["gpt-oss-20b"], 1, 1), formats_of("mxfp4")
    assert shape_of(*published, 16, Bucket(8, 8), False).experts == packed
    assert why_not_traced(packed) is None
    assert why_not_traced(SHAPE._replace(activation="gelu_tanh")) is None
