"""The checks of the grouped product can fail: every fault below, put into it, is found."""

import numpy as np
import pytest
from grouped_cases import (
    BIASED,
    CANCELS,
    E2M1,
    FP8,
    INT4,
    Case,
    cancelling,
    make_step,
    run,
    worst,
)
from mutations import fit, load
from spent import mutants

PARTS = ("_fetch", "_product", "_combine", "_codes", "")  # imports come before
FIRST = (
    "product_ring",
    "gates",
    "grouped_work",
    "grouped_rows",
    "grouped_split",
    "four_bits",
    "grouped_problem",
    *("block_problem", "block_fetch", "block_finish", "block_product"),
)
MODULES = (*FIRST, *(f"grouped{part}" for part in PARTS))
CHOSEN = np.array([[0, 2], [2, -1], [-1, 0], *[[2, 1]] * 18])  # two tiles of expert 2
PLAIN = Case(CHOSEN, hidden=128, width=128)
WIDE = Case(CHOSEN[:3], hidden=320)
CODES = Case(CHOSEN[:3], hidden=256, width=128, weight_dtype=FP8)
SQUARES = CODES._replace(has_squares=True)
CUT_CODES = CODES._replace(width=256, parts=(2, 2), **BIASED)
LIMITED = Case(CHOSEN[:3], **BIASED)
CUT = Case(CHOSEN[:3], hidden=256, width=384, parts=(2, 3), **BIASED)
PACKED = Case(CHOSEN[:3], hidden=128, width=128, weight_dtype=E2M1, **BIASED)
INTEGERS = Case(CHOSEN[:3], weight_dtype=INT4, group=64, has_zeros=True)
FAULTS = {
    "a tile of the expert before": (
        "grouped_problem", "tiles.expert[some])", "tiles.expert[jnp.maximum(some - 1, 0)])", PLAIN
    ),
    "the tile is the same for all of an expert": (
        "grouped_problem", "tile = begin + within - piece * siblings", "tile = begin", PLAIN
    ),
    "up is gate": ("grouped_fetch", "min(operand, len(inputs.weights) - 1)", "0", PLAIN),
    "the channels before": (
        "grouped_fetch", "item.column * problem.width + offset", "0 * item.column + offset", WIDE
    ),
    "the second half of channels is the first": (
        "grouped_fetch", "0 if problem.gated else PART\n", "0\n", WIDE
    ),
    "rows are not waited for": (
        "grouped_product", "            plgpu.barrier_wait(shared.full.at[slot])\n", "", PLAIN
    ),
    "a stage is overwritten while it is read": (
        "product_ring", "pl.when(count >= stages)", "pl.when(count > stages)", PLAIN
    ),
    "what is written is not committed": (
        "grouped_product", "= flipped\n    plgpu.commit_smem()\n", "= flipped\n", PLAIN
    ),
    "up's scale is gate's": ("block_finish", "matrices[i + n]", "matrices[i]", CODES),
    "scales of the expert before": (
        "block_finish", "numbers.at[item.expert, here]",
        "numbers.at[jnp.maximum(item.expert - 1, 0), here]", CODES,
    ),
    "squares of the expert before": (
        "block_product", "blocks[item.expert,", "blocks[jnp.maximum(item.expert - 1, 0),", SQUARES
    ),
    "codes of the expert before": (
        "block_fetch", "matrix.at[item.expert,", "matrix.at[jnp.maximum(item.expert - 1, 0),", CODES
    ),
    "codes of the row before": (
        "grouped_rows", "source = token[place]", "source = token[jnp.maximum(place - 1, 0)]", CODES
    ),
    "codes have no gain": (
        "grouped_codes", "(*out), down, tiles, gains)", "(*out), down, tiles)", CODES
    ),
    "the sums of up's codes are gate's": (
        "block_finish", "(part * worker.problem.columns +", "(0 * part +", CUT_CODES
    ),
    "sums of codes are of the tile before": (
        "grouped_codes", "item = Item(tile,", "item = Item(jnp.maximum(tile - 1, 0),", CUT_CODES
    ),
    "codes of every part are the first's": (
        "grouped_codes", "item._replace(split=split)", "item", CUT_CODES
    ),
    "the first part of down's codes is dropped": (
        "grouped_codes", "for part in out]", "for part in out[1:]]", CUT_CODES
    ),
    "no gain": ("grouped", """("down",), row_gains)""", """("down",), None)""", PLAIN),
    "no gain of the bias": (
        "grouped_product", "bias = bias * _of_rows(inputs.gain, item, shape)", "pass", LIMITED
    ),
    "up's bias is gate's": ("grouped_product", "inputs.biases[part]", "inputs.biases[0]", LIMITED),
    "up has no limit below": (
        "gates", "jnp.maximum(u, -gate.limit)", "u", LIMITED
    ),
    "the row of the pair, not of the token": (
        "grouped", "placed.pair // k, gains", "jnp.minimum(placed.pair, 20), gains", PLAIN
    ),
    "rows are collected into the tile before": (
        "grouped_rows", "out.at[pl.ds(begin, COLLECTED)]",
        "out.at[pl.ds(jnp.maximum(begin - 8, 0), COLLECTED)]", PLAIN,
    ),
    "places do not count padding": (
        "grouped_work", "padded = -(-routed.sizes // tile) * tile", "padded = routed.sizes", PLAIN
    ),
    "every part is the first": (
        "grouped_problem", "lax.rem(piece, jnp.int32(problem.parts))", "jnp.int32(0)", CUT
    ),
    "parts begin a step late": (
        "grouped_fetch", "problem.steps + k\n", "problem.steps + k + 1\n", CUT
    ),
    "parts end a step early": (
        "grouped_split", "return -(-steps // parts)", "return max(1, steps // parts - 1)", CUT
    ),
    "every part adds the bias": (
        "grouped_product", " * (item.part == 0).astype(jnp.float32)", "", CUT
    ),
    "the sums of up are gate's": ("grouped_product", "operand * problem.gated", "0", CUT),
    "the last part of gate and up is dropped": (
        "grouped_combine", "num_parts // at_once, add", "num_parts // at_once - 1, add",
        CUT._replace(rows=128),
    ),
    "the first part is in all places of gate and up": (
        "grouped_combine", "nth * at_once + i for", "nth * at_once for", CUT
    ),
    "sums do not begin at zero": ("grouped_combine", "rows), 0.0)", "rows), 1.0)", CUT),
    "the first part of down is dropped": (
        "grouped_combine", "for part in sums]", "for part in sums[1:]]", CUT
    ),
    "a part of down is counted twice": (
        "grouped_combine", "for part in sums]", "for part in (*sums, sums[0])]", CUT
    ),
    "halves of bytes are exchanged": (
        "four_bits", "_shifted(word, 12 - 4 * pair), _shifted(word, 6 - 4 * pair)",
        "_shifted(word, 12 - 4 * (pair ^ 1)), _shifted(word, 6 - 4 * (pair ^ 1))", PACKED
    ),
    "the group after": (
        "grouped_fetch", "lax.div(nth * problem.step, jnp", "lax.div((nth + 1) * problem.step, jnp",
        PACKED,
    ),
    "the groups of a unit are exchanged": (
        "four_bits", "jnp.repeat(values.T, 2", "jnp.repeat(values.T[:, ::-1], 2", PACKED
    ),
    "every unit of a step has the first's groups": (
        "four_bits", "first = unit * UNIT // coded.group", "first = 0", PACKED
    ),
    "inputs come as they are": ("grouped", "x = in_order(x) if weights.are_four_bits else x",
                                "x = x", PACKED),
    "channels of gate and up come as they are": (
        "grouped_problem", "inputs.groups[0], gate is not None)", "inputs.groups[0], False)", PACKED
    ),
    "biases of channels that come in another order": (
        "grouped_product", "is_turned = problem.coded is not None and problem.coded.are_turned",
        "is_turned = False", PACKED
    ),
    "sums are not times their unit": (
        "grouped_product", "total * problem.coded.unit for", "total for", PACKED
    ),
    "up's groups are gate's": (
        "grouped_fetch", "zip(inputs.groups[which],", "zip(inputs.groups[0],", PACKED
    ),
    "zero points are 8": ("four_bits", "zero.astype(jnp.int32) | 0x4300 for",
                          "zero.astype(jnp.int32) * 0 + _ZERO for", INTEGERS),
    "a step waits for codes, not for their groups": (
        "grouped_problem", "PARTS * (1 + beside) + 1", "PARTS + 1", PACKED
    ),
    "the row before is added": ("grouped_combine", "place % rows]", "(place - 1) % rows]", CUT),
}  # fmt: skip
DISORDERED = {
    "gate": ("grouped_combine", "jnp.add, more, so_far)", "jnp.add, more[::-1], so_far)"),
    "down": ("grouped_combine", "jnp.add, found)", "jnp.add, found[::-1])"),
}


def test_every_fault_fits_its_source():
    fit(FAULTS.values())


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
@pytest.mark.parametrize("product", DISORDERED)
def test_another_order_of_parts_is_found(product):
    module = load(MODULES, *DISORDERED[product])
    assert run(CANCELS, cancelling(product), module).all()


@pytest.mark.thorough
def test_without_a_fault_nothing_is_found():
    step = make_step(PLAIN)
    assert worst(PLAIN, step, run(PLAIN, step, load(MODULES))) <= 1
