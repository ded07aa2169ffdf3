"""The checks of the grouped product can fail: every fault below, put into it, is found."""

import numpy as np
import pytest
from grouped_cases import BIASED, FP8, Case, make_step, run, worst
from mutations import load
from spent import mutants

MODULES = ("grouped_work", "grouped_rows", "grouped_product", "grouped")  # imports come before
CHOSEN = np.array([[0, 2], [2, -1], [-1, 0], *[[2, 1]] * 18])  # two tiles of expert 2
PLAIN = Case(CHOSEN, hidden=128, width=128)
WIDE = Case(CHOSEN[:3], hidden=320)
CODES = Case(CHOSEN[:3], weight_dtype=FP8)
LIMITED = CODES._replace(**BIASED)
FAULTS = {
    "a tile of the expert before": (
        "grouped_product", "tiles.expert[some])", "tiles.expert[jnp.maximum(some - 1, 0)])", PLAIN
    ),
    "the tile is the same for all of an expert": (
        "grouped_product", "tile = begin + within - column * siblings", "tile = begin", PLAIN
    ),
    "up is gate": ("grouped_product", "gate, up = inputs.weights[0], inputs.weights[-1]",
                   "gate, up = inputs.weights[0], inputs.weights[0]", PLAIN),
    "the channels before": (
        "grouped_product", "item.column * problem.width + offset", "0 * item.column + offset", WIDE
    ),
    "the second half of channels is the first": (
        "grouped_product", "0 if problem.gated else PART\n", "0\n", WIDE
    ),
    "rows are not waited for": (
        "grouped_product", "            plgpu.barrier_wait(shared.full.at[slot])\n", "", PLAIN
    ),
    "a stage is overwritten while it is read": (
        "grouped_product", "pl.when(count >= stages)", "pl.when(count > stages)", PLAIN
    ),
    "what is written is not committed": (
        "grouped_product", "    plgpu.commit_smem()\n", "", PLAIN
    ),
    "up's scale is gate's": (
        "grouped_product", "inputs.scales[part]", "inputs.scales[0]", CODES
    ),
    "no gain": ("grouped", """("down",), row_gains)""", """("down",), None)""", PLAIN),
    "no gain of the bias": (
        "grouped", "gain = None if gated or biases is None else row_gains", "gain = None", LIMITED
    ),
    "up's bias is gate's": ("grouped_product", "inputs.biases[part]", "inputs.biases[0]", LIMITED),
    "up has no limit below": (
        "grouped_product", "jnp.maximum(u, -gate.limit)", "u", LIMITED
    ),
    "the row of the pair, not of the token": (
        "grouped", "placed.pair // k, gains", "jnp.minimum(placed.pair, 20), gains", PLAIN
    ),
    "rows are collected into the tile before": (
        "grouped_rows", "out.at[pl.ds(begin, COLLECTED)]",
        "out.at[pl.ds(jnp.maximum(begin - 8, 0), COLLECTED)]", PLAIN,
    ),
    "a scale of a part of the row": (
        "grouped_rows", "lax.fori_loop(0, width // columns, widen", "lax.fori_loop(0, 1, widen",
        CODES._replace(width=192),
    ),
    "places do not count padding": (
        "grouped_work", "padded = -(-routed.sizes // tile) * tile", "padded = routed.sizes", PLAIN
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", mutants(*FAULTS))
def test_a_fault_is_found(fault):
    *change, case = FAULTS[fault]
    module = load(MODULES, *change)
    step = make_step(case)
    try:
        error = worst(case, step, run(case, step, module))
    except Exception as problem:  # the interpreter's own: a race, a barrier left half-way
        error = problem
    assert isinstance(error, Exception) or error > 1


@pytest.mark.thorough
def test_without_a_fault_nothing_is_found():
    step = make_step(PLAIN)
    assert worst(PLAIN, step, run(PLAIN, step, load(MODULES))) <= 1
