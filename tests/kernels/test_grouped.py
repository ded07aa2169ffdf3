"""The grouped product of experts against its definition, in the Mosaic interpreter with races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import INTERPRETER, watched_races
from grouped_cases import BIASED, FP8, OTHERS, Case, make_step, run, worst
from hypothesis import given, settings
from hypothesis import strategies as st
from spent import quick

from pallas_kernels.grouped import GroupedConfig, config_for, grouped_mlp

SOME = np.random.default_rng(3).integers(OTHERS, 3, (20, 2))
CASES = {
    "more than a block of channels, the last of them half": Case(SOME[:7], hidden=320, width=192),
    "codes, as many stages as fit": Case(
        SOME[:7], hidden=128, width=192, weight_dtype=FP8, stages=None
    ),
    "float16, large tiles, one expert, biases, limited": Case(
        np.full((70, 1), 1), rows=64, dtype=jnp.float16, weight_dtype=jnp.float16, **BIASED
    ),
}


@pytest.mark.parametrize("name", quick(CASES, "float16, large tiles, one expert, biases, limited"))
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


@pytest.mark.parametrize(
    ("pairs", "experts", "rows"), [(8, 128, 16), (4096, 128, 32), (32768, 128, 128), (512, 8, 64)]
)
def test_tiles_are_as_large_as_experts_have_rows(pairs, experts, rows):
    assert config_for(pairs, experts).rows == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden=96), "hidden 96 and width 64 must be multiples of 64"),
        (dict(dtype=jnp.float32), "x of float32 and weights of bfloat16"),
        (dict(weight_dtype=jnp.float16), "x of bfloat16 and weights of float16"),
        (dict(rows=24), "tiles of 24 rows; there are those of 16, 32, 64, 128"),
        (dict(stages=1), "1 stages"),
        (dict(hidden=16384), "hidden 16384 is more than the 14400 of rows"),
    ],
)
def test_what_it_cannot_take_is_said(change, message):
    case = Case(SOME[:2])._replace(**change)
    with pytest.raises(ValueError, match=message):
        run(case, make_step(case))


def test_codes_want_scales():
    step = make_step(Case(SOME[:2], weight_dtype=FP8))
    weights = step.weights._replace(up_scale=None, gate_scale=None)
    with pytest.raises(ValueError, match="weights of float8_e4m3fn want scales"):
        grouped_mlp(*step._replace(weights=weights))
