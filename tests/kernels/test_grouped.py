"""The grouped product of experts against its definition, in the Mosaic interpreter with races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import INTERPRETER, watched_races
from grouped_cases import (
    BIASED,
    CANCELS,
    E2M1,
    FP8,
    INT4,
    OTHERS,
    Case,
    cancelling,
    make_step,
    run,
    worst,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from spent import quick

from pallas_kernels.grouped import GroupedConfig, config_for, grouped_mlp
from pallas_kernels.grouped_split import Items, products_of
from pallas_kernels.grouped_work import ExpertWeights

SOME = np.random.default_rng(3).integers(OTHERS, 3, (20, 2))
CASES = {
    "more than a block of channels, the last of them half": Case(SOME[:7], hidden=320, width=192),
    "codes, blocks that end half-way, as many stages as fit": Case(
        SOME[:7], hidden=320, width=192, weight_dtype=FP8, stages=None
    ),
    "codes, scales of squares, biases": Case(
        SOME[:7], hidden=256, width=256, weight_dtype=FP8, has_squares=True, **BIASED
    ),
    "codes, gate and up cut, biases": Case(
        SOME[:7], hidden=512, width=256, weight_dtype=FP8, parts=(2, 1), **BIASED
    ),
    "codes, gate and up cut, large tiles, scales of squares": Case(
        SOME[:7], 3, 256, 192, 64, weight_dtype=FP8, has_squares=True, parts=(2, 1)
    ),
    "codes, many rows, biases": Case(
        np.full((140, 1), 1), hidden=256, width=128, rows=128, weight_dtype=FP8, **BIASED
    ),
    "float16, large tiles, one expert, biases, limited": Case(
        np.full((70, 1), 1), rows=64, dtype=jnp.float16, weight_dtype=jnp.float16, **BIASED
    ),
    "cut, channels that fill no block, biases": Case(
        SOME[:7], hidden=192, width=320, parts=(3, 5), **BIASED
    ),
    "gate and up cut, large tiles": Case(SOME[:7], hidden=256, rows=128, parts=(4, 1)),
    "e2m1, steps that end in zeros, cut there, biases": Case(
        SOME[:3], hidden=2112, weight_dtype=E2M1, stages=3, parts=(2, 1), **BIASED
    ),
    "e2m1, groups in one step and in several": Case(
        SOME[:7], hidden=128, width=320, weight_dtype=E2M1
    ),
    "integers, zero points, a group a step, channels that fill no block": Case(
        SOME[:7], hidden=192, width=384, weight_dtype=INT4, group=64, has_zeros=True, stages=None
    ),
    "integers, groups of steps, large tiles, cut": Case(
        SOME[:7],
        hidden=256,
        width=128,
        weight_dtype=INT4,
        group=128,
        rows=64,
        parts=(2, 1),
        scale_dtype=jnp.bfloat16,
    ),
    "down cut, codes": Case(SOME[:7], hidden=128, width=256, weight_dtype=FP8, parts=(1, 2)),
}

PACKED = "e2m1, groups in one step and in several"


@pytest.mark.parametrize(
    "name",
    [
        *quick(
            [name for name in CASES if name != PACKED],
            "cut, channels that fill no block, biases",
            "codes, gate and up cut, biases",
        ),
        pytest.param(PACKED, marks=pytest.mark.costs(15)),
    ],
)
def test_every_own_pair_is_its_experts_mlp(name):
    case = CASES[name]
    step = make_step(case)
    assert worst(case, step, run(case, step)) <= 1


@pytest.mark.thorough
def test_any_routing():
    """Routing is data: one program takes all of it, an empty step and all on one expert, too."""
    tokens, k, case = 10, 2, Case(None, weight_dtype=FP8, **BIASED)
    config = GroupedConfig(case.rows, num_blocks=2, stages=case.stages)
    settings_of = {"config": config, "interpret": INTERPRETER, "gate": case.gate}
    multiply = jax.jit(lambda *step: grouped_mlp(*step, **settings_of))

    def check(chosen):
        routed = case._replace(chosen=np.reshape(chosen, (tokens, k)))
        step = make_step(routed)
        with watched_races() as states:
            out = np.asarray(multiply(*step).astype(jnp.float32))
        assert states and not any(state.races_found for state in states)
        assert worst(routed, step, out) <= 1

    pairs = tokens * k
    for expert in (OTHERS, 2):
        check([expert] * pairs)
    routing = st.lists(st.integers(OTHERS, case.experts - 1), min_size=pairs, max_size=pairs)
    settings(deadline=None, max_examples=3)(given(routing)(check))()


@pytest.mark.thorough
def test_neither_tiles_nor_other_tokens_change_a_bit():
    case = Case(SOME[:12], width=128, weight_dtype=FP8)
    step = make_step(case)
    whole = run(case, step)
    alone = case._replace(chosen=SOME[:4], rows=32, stages=3)
    part = run(alone, make_step(alone, step=step))
    own = SOME[:4] != OTHERS
    np.testing.assert_array_equal(part[own], whole[:4][own])


@pytest.mark.thorough
@pytest.mark.parametrize("product", ["gate", "down"])
def test_parts_are_added_in_their_order(product):
    """In any other order the sum that cancels is not zero."""
    assert not run(CANCELS, cancelling(product)).any()


@pytest.mark.parametrize(
    ("mean_pairs", "experts", "config"),
    [
        (8 / 128, 16, GroupedConfig(16, parts=(8, 6))),  # a token on 8 devices: a tile
        (8 * 8 / 128, 16, GroupedConfig(16, parts=(4, 4))),  # a bucket of 8: 4 tiles
        (8 * 8 / 128, 128, GroupedConfig(16)),  # on one device: 28
        (64 * 8 / 128, 16, GroupedConfig(16)),
        (32.0, 16, GroupedConfig(32)),
        (256.0, 16, GroupedConfig(128)),
    ],
)
def test_settings_suit_the_rows_that_experts_have(mean_pairs, experts, config):
    inner, outer = (experts, 768, 2048), (experts, 2048, 768)  # Qwen3-30B-A3B
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (inner, inner, outer)]
    assert config_for(mean_pairs, ExpertWeights(*shapes)) == config


def shapes_of_codes(scales: tuple[int, ...] = ()) -> ExpertWeights:
    """Those of Qwen3-30B-A3B on one of 8 devices, with scales of so many squares or of channels."""
    inner, outer = (16, 768, 2048), (16, 2048, 768)
    shapes = [jax.ShapeDtypeStruct(shape, FP8) for shape in (inner, inner, outer)]
    own = [(16, *scales) if scales else shape[:2] for shape in (inner, inner, outer)]
    return ExpertWeights(*shapes, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in own))


def test_items_of_codes_are_blocks():
    """Of 128 inputs and channels, but for channels that end half-way."""
    assert products_of(768, 2048, 1) == (Items(6, 128, 16), Items(16, 128, 6))
    assert products_of(2880, 320, 1) == (Items(23, 128, 3), Items(3, 128, 23))


def test_squares_have_tiles_of_64_rows_at_most():
    assert config_for(256.0, shapes_of_codes()) == GroupedConfig(128)
    assert config_for(256.0, shapes_of_codes((6, 16))) == GroupedConfig(64)
    assert config_for(8 / 128, shapes_of_codes((6, 16))) == GroupedConfig(16, parts=(8, 3))
    case = Case(SOME[:2], hidden=128, width=128, rows=128, weight_dtype=FP8, has_squares=True)
    with pytest.raises(ValueError, match="registers are for 64 with scales of blocks"):
        run(case, make_step(case))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden=96), "hidden 96 and width 64 must be multiples of 64"),
        (dict(dtype=jnp.float32), "x of float32 and weights of bfloat16"),
        (dict(weight_dtype=jnp.float16), "x of bfloat16 and weights of float16"),
        (dict(rows=24), "tiles of 24 rows; there are those of 16, 32, 64, 128"),
        (dict(stages=1), "1 stages"),
        (dict(hidden=320, parts=(2, 1)), r"parts \(2, 1\) of \(5, 1\) steps"),
        (dict(hidden=16384), "hidden 16384 is more than the 14400 of rows"),
    ],
)
def test_what_it_cannot_take_is_said(change, message):
    case = Case(SOME[:2])._replace(**change)
    with pytest.raises(ValueError, match=message):
        run(case, make_step(case))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=jnp.float16), "x of float16: codes take bfloat16 only"),
        (dict(weight_dtype=INT4, group=16), "gate: scales 3x4x64 are not of groups of 32, 64, 128"),
        (dict(width=96), "hidden 64 and width 96 must be multiples of 64"),
        (dict(hidden=320, parts=(2, 1)), r"parts \(2, 1\) of \(5, 1\) steps"),
    ],
)
def test_what_it_cannot_take_of_four_bits_is_said(change, message):
    case = Case(SOME[:2], weight_dtype=E2M1)._replace(**change)
    with pytest.raises(ValueError, match=message):
        run(case, make_step(case))


@pytest.mark.parametrize(
    ("mean_pairs", "experts", "parts"),
    [
        (4 / 128, 16, (4, 8)),  # a token of gpt-oss on 8 devices: 23 steps, 6 or 3 of a part
        (4 / 128, 128, (1, 4)),  # and on one
    ],
)
def test_parts_of_four_bits_need_not_divide_the_steps(mean_pairs, experts, parts):
    shapes = [jax.ShapeDtypeStruct((experts, 2880, 1440), jnp.uint8)] * 3
    assert config_for(mean_pairs, ExpertWeights(*shapes)) == GroupedConfig(16, parts=parts)


def test_codes_want_scales():
    step = make_step(Case(SOME[:2], weight_dtype=FP8))
    weights = step.weights._replace(up_scale=None, gate_scale=None)
    with pytest.raises(ValueError, match="weights of float8_e4m3fn want scales"):
        grouped_mlp(*step._replace(weights=weights))
