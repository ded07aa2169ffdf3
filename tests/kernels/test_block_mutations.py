"""The checks of block products can fail: every fault below, put into the kernel, is found."""

import jax.numpy as jnp
import pytest
from block_cases import Case, make, run, worst
from mutations import fit, load
from spent import mutants

from pallas_kernels.block_problem import Groups
from pallas_kernels.gates import SILU

MODULES = "product_ring", "gates", "block_problem", "block_added", "block_fetch", "block_finish"
MODULES = *MODULES, "block_product"
PLAIN = Case(20, 384, (192,), has_bias=True)
RAGGED = Case(8, 320, (256, 128, 64), of_channels=False)
ROW = Case(8, 384, (192,), block=64, of_channels=False)
CUT = Case(12, 512, (128,), 16, 2, has_bias=True)
CLUSTER = Case(20, 512, (128,), has_bias=True, cluster=4)
GATED_CLUSTER = Case(12, 512, (128, 128), gate=SILU, is_plain=True, cluster=2)
NUMBERS = Case(12, 512, (192,), block=128, is_plain=True, cluster=2)
CODES = Case(20, 256, (256, 256), gate=SILU, quantised=True)
ADDED = Case(12, 512, (256, 128, 64), 16, 2, is_plain=True, added=136)
ADDED_GATED = Case(12, 512, (256, 256), gate=SILU, is_plain=True, cluster=4, added=136)
GROUPS = Case(21, 256, (192,), is_plain=True, groups=Groups(3, 16))
MANY = Case(136, 256, (128, 64), 128)
MANY_CODES = Case(136, 256, (256,), 128, quantised=True)
MANY_GATED = Case(136, 256, (128, 128), 128, gate=SILU)
FAULTS = {
    "scales of the next block of inputs": (
        "block_fetch", "scale.at[item.split * problem.steps + k,",
        "scale.at[(item.split * problem.steps + k + 1) % 3,", PLAIN,
    ),
    "weights' scale of the next block": (
        "block_product", "(jnp.minimum(k, problem.steps - 1) if",
        "(jnp.minimum(k + 1, problem.steps - 1) if", ROW,
    ),
    "the last block of a ragged row is dropped": (
        "block_problem", "        steps // (splits * cluster),\n",
        "        x.shape[1] // block // splits,\n", RAGGED,
    ),
    "a matrix has the scales of the one before": (
        "block_product", "item.column >= first, read(i)", "item.column > first, read(i)", RAGGED
    ),
    "joined matrices begin a block late": (
        "block_problem", "run, i, (item.column - first) * PART", "run, i, first * PART", RAGGED
    ),
    "what follows is written over the first": (
        "block_finish", "sum(problem.outs[:i]) + first", "first", RAGGED
    ),
    "every split is the first": (
        "block_problem", "lax.rem(piece, jnp.int32(problem.splits))", "jnp.int32(0)", CUT
    ),
    "a split is dropped": (
        "block_problem", "problem.columns * problem.splits, problem",
        "problem.columns * max(1, problem.splits - 1), problem", CUT
    ),
    "every block of a cluster has the first part": (
        "block_fetch", "pl.ds((item.split * problem.steps + k) *", "pl.ds(k *", CLUSTER
    ),
    "a block of a cluster is left out": (
        "block_finish", "range(problem.cluster - 1)", "range(problem.cluster - 2)", CLUSTER
    ),
    "what others have is read before it is there": (
        "block_finish", "    plgpu.barrier_wait(worker.shared.cluster)\n", "", CLUSTER
    ),
    "another item's sums are added": (
        "block_finish", "return item.tile * worker.problem.columns + item.column",
        "return item.column", CLUSTER
    ),
    "the other warpgroup's sums are added": (
        "block_finish", "here = others.at[other, _place(worker, item), part, worker.me]",
        "here = others.at[other, _place(worker, item), part, 1 - worker.me]", CLUSTER
    ),
    "up's sums are gate's": (
        "block_finish", "here = others.at[other, _place(worker, item), part, worker.me]",
        "here = others.at[other, _place(worker, item), 0, worker.me]", GATED_CLUSTER
    ),
    "a block of numbers is the one before": (
        "block_fetch", "here = matrix.at[step, pl.ds(0, problem.block), channels]",
        "here = matrix.at[k, pl.ds(0, problem.block), channels]", NUMBERS,
    ),
    "numbers of the other warpgroup's channels": (
        "block_product", "pl.ds(0, problem.block), mine]",
        "pl.ds(0, problem.block), pl.ds(0, CHANNELS)]", NUMBERS,
    ),
    "every split adds the bias": (
        "block_finish", "(item.split == 0).astype", "(item.split >= 0).astype", CUT
    ),
    "no scale of channels": ("block_finish", "values = values * of_channels(matrix.scale)",
                             "pass", PLAIN),
    "up is gate": ("block_fetch", "inputs.matrices[i + part]", "inputs.matrices[i]", CODES),
    "up has gate's scale": ("block_finish", "matrices[i + n]", "matrices[i]", CODES),
    "the largest of one warpgroup": (
        "block_finish", "functools.reduce(jnp.maximum, found)", "found[0]", CODES
    ),
    "the largest of the other, before it is there": (
        "block_finish", "own()))\n        meet()", "own()))", CODES,
    ),
    "numbers are rounded before they become codes": (
        "block_finish", "_largest(worker, values)",
        "_largest(worker, values := values.astype(jnp.bfloat16).astype(jnp.float32))", CODES,
    ),
    "codes are rounded twice": (
        "block_finish", "[1 - axis])).astype(FP8)",
        "[1 - axis])).astype(jnp.float16).astype(FP8)", MANY_CODES,
    ),
    "scales of codes are of the tile before": (
        "block_finish", "scales_out.at[item.column, rows]",
        "scales_out.at[item.column, pl.ds(0, 16)]", CODES,
    ),
    "scales of rows are the other half's": (
        "block_product", "pl.ds(0, problem.rows) if problem.few else mine",
        "pl.ds(0, problem.rows if problem.few else CHANNELS)", MANY,
    ),
    "a stage is overwritten while it is read": (
        "product_ring", "pl.when(count >= stages)", "pl.when(count > stages)", PLAIN
    ),
    "a stage is not waited for": (
        "block_product", "        plgpu.barrier_wait(shared.full.at[slot])\n", "", PLAIN
    ),
    "scales are not waited for": (
        "block_problem", "(1 if problem.is_plain else 2)", "1", PLAIN
    ),
    "what is written is not committed": (
        "block_finish", "problem.result.dtype))\n    plgpu.commit_smem()",
        "problem.result.dtype))", PLAIN,
    ),
    "gate and up share their sums": (
        "block_product", "add(sums[part], product,", "add(sums[0], product,", MANY_GATED
    ),
    "every part of a contraction adds the factors": (
        "block_added", "return item.split == 0", "return item.split >= 0", ADDED
    ),
    "all matrices have what is added to the first": (
        "block_added", "first = (nth + part) * problem.added", "first = part * problem.added", ADDED
    ),
    "to up is added what is added to gate": (
        "block_added", "first = (nth + part) * problem.added", "first = nth * problem.added",
        ADDED_GATED,
    ),
    "the last step of a factor is left out": (
        "block_problem", "return -(-self.added // ADDED_STEP)", "return self.added // ADDED_STEP",
        ADDED,
    ),
    "a stage of a factor is not waited for": (
        "block_added", "        plgpu.barrier_wait(shared.added_full.at[slot])\n", "", ADDED
    ),
    "a row keeps the next group": (
        "block_finish", "is_own = group == lax", "is_own = group + 1 == lax", GROUPS
    ),
    "groups are those of the other warpgroup": (
        "block_finish", "item.column * PART + worker.me * CHANNELS", "item.column * PART", GROUPS
    ),
    "groups come once": ("block_finish", "groups.channels)), groups.num)",
                         "groups.channels)), 1000)", GROUPS),
}  # fmt: skip


def test_every_fault_fits_its_source():
    fit(FAULTS.values())


@pytest.mark.parametrize("fault", mutants(*FAULTS))
def test_a_fault_is_found(fault):
    *change, case = FAULTS[fault]
    module, made = load(MODULES, *change), make(case)
    try:
        error = worst(case, made, run(case, made, module))
    except Exception as problem:  # the interpreter's own: a race, a barrier left half-way
        error = problem
    assert isinstance(error, Exception) or not error <= 1


@pytest.mark.thorough
def test_without_a_fault_nothing_is_found():
    for case in (PLAIN, ROW, MANY_CODES._replace(dtype=jnp.float16)):
        made = make(case)
        assert worst(case, made, run(case, made, load(MODULES))) <= 1
