"""The end of prefill attention where contexts were split: the parts of each tile, put together.

A launch of its own, for the reasons that `decode_combine` gives; parts are added in the order of
the context, so that the same step gives the same bits. A thread block takes 64 rows of one tile and
KV head and a few columns of them, so that few tiles are many thread blocks, too. For codes it has
a warpgroup for each of the few columns that share a scale.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.head_codes import BLOCK, CodedHeads, Heads, coded
from pallas_kernels.mosaic import LOWEST, WGMMA, apart, filled, store
from pallas_kernels.prefill_rows import Leaving, put_codes, put_part, row_sinks, store_scales
from pallas_kernels.prefill_terms import (
    Inputs,
    Outputs,
    PartHeads,
    Problem,
    rows_of,
    staged_shape,
)
from pallas_kernels.prefill_work import COMPUTE_WARPGROUPS, Split
from pallas_kernels.prefill_work import WARPGROUP_ROWS as ROWS

COLUMNS = 64, 32  # of a warpgroup: what leaves is a row of 128 bytes, if it may be
AT_ONCE = 128  # columns of parts that are under way: 64 registers of a thread
MOST_AT_ONCE = AT_ONCE // COLUMNS[-1]  # parts

Sum = tuple[jax.Array, jax.Array, jax.Array]  # weighted rows, total weight, largest lse


class Scratch(NamedTuple):
    """Shared memory: rows that leave, and of codes the largest sizes that warpgroups have found."""

    stage: Any  # `staged_shape` of the columns of the thread block
    units: Any = None  # [64] scales of codes, or lse
    most: Any = None  # [warpgroups, 64]
    done: Any = None


def combine_parts(problem: Problem, inputs: Inputs, outputs: Outputs) -> Heads | PartHeads:
    """Return `outputs.out` with the rows of split tiles in it, in place where that may be."""
    result, work = jax.tree.map(jax.new_ref, outputs.out), inputs.work
    splits, counts, sinks, fixed = apart((work.splits, work.counts, inputs.sinks, inputs.fixed))
    read = splits, counts, outputs.parts, outputs.lse, sinks, fixed
    arrays, tree = jax.tree.flatten(read)
    columns = columns_of(problem)
    width = columns if problem.options.codes is None else BLOCK
    warpgroups = width // columns
    scratch = Scratch(plgpu.SMEM(staged_shape(width, problem.stage_dtype), problem.stage_dtype))
    if problem.gives_units:
        scratch = scratch._replace(units=plgpu.SMEM((ROWS,), jnp.float32))
    if problem.options.codes is not None:
        scratch = scratch._replace(
            most=plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            done=plgpu.Barrier(num_arrivals=warpgroups),
        )
    plgpu.kernel(
        functools.partial(_combine_kernel, problem, tree, result),
        scratch_types=scratch._asdict(),
        grid=(
            work.splits.shape[0],
            problem.kv_heads * COMPUTE_WARPGROUPS,
            problem.head_dim // width,  # of codes one, a whole head
        ),
        grid_names=("split", "half", "column"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name="prefill_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.options.interpret,
    )(*arrays)
    return jax.tree.map(lambda ref: ref[...], result)


def columns_of(problem: Problem) -> int:
    """Return the columns of a warpgroup: of codes four share a scale."""
    if problem.options.codes is not None:
        return COLUMNS[-1]
    return next(each for each in COLUMNS if problem.head_dim % each == 0)


def _combine_kernel(problem: Problem, tree: Any, result: Any, *refs: Any, **buffers: Any) -> None:
    """Add up some columns of the rows of one warpgroup of the kernel that attends."""
    splits, counts, parts, lse, sinks, fixed = jax.tree.unflatten(tree, refs)
    scratch, me = Scratch(**buffers), lax.axis_index("warpgroup")
    index, half = lax.axis_index("split"), lax.axis_index("half")
    head = lax.div(half, jnp.int32(COMPUTE_WARPGROUPS))
    warpgroup = half - head * COMPUTE_WARPGROUPS
    block, width, own = lax.axis_index("column"), scratch.stage.shape[-1], columns_of(problem)
    columns = pl.ds(block * width + me * own, own)
    split = Split(*(splits[index, i] for i in range(len(Split._fields))))
    rows = rows_of(problem, split.begin, split.end, counts[1], warpgroup)

    @pl.when((split.parts > 0) & (rows.begin < rows.end))
    def _() -> None:
        def read(nth: jax.Array) -> tuple[jax.Array, jax.Array]:
            place = split.first_part + nth, head, warpgroup
            return (
                plgpu.load(lse.at[place], layout=WGMMA.reduce(1), optimized=False),
                plgpu.load(parts.at[*place, :, columns], layout=WGMMA, optimized=False),
            )

        sink = None if sinks is None else row_sinks(problem, sinks, head, index)
        weighted, total, top = _sum(split.parts, own, read, sink)
        combined = weighted * _along(1.0 / total, weighted)
        leaving = Leaving(result, scratch.stage, scratch.units, fixed)
        if isinstance(result, CodedHeads):
            put_block = functools.partial(put_codes, problem, leaving, rows, head)
            _with_others(scratch, problem.out_dtype, fixed, combined, put_block)
        else:
            leaving = leaving._replace(out=_some(result, columns))
            put_part(problem, leaving, rows, head, combined, top + jnp.log2(total), block == 0)
        plgpu.wait_smem_to_gmem(0)


def _some(result: Any, columns: Any) -> Any:
    """Return where some columns of heads go to."""
    if isinstance(result, PartHeads):
        return result._replace(values=result.values.at[:, :, columns])
    return result.at[:, :, columns]


def _with_others(
    scratch: Scratch, dtype: Any, fixed: Any, rows: jax.Array, put_block: Callable[[], None]
) -> None:
    """Make codes of some columns, in units that all warpgroups share; the first puts all."""
    me = lax.axis_index("warpgroup")

    def largest(own: jax.Array) -> jax.Array:
        store(scratch.most.at[me], own)
        plgpu.barrier_arrive(scratch.done)
        plgpu.barrier_wait(scratch.done)
        each = [
            plgpu.load(scratch.most.at[i], layout=WGMMA.reduce(1), optimized=False)
            for i in range(scratch.most.shape[0])
        ]
        return functools.reduce(jnp.maximum, each)

    codes, scale = coded(rows, dtype, fixed, axis=1, among=largest)
    store(scratch.stage.at[:, pl.ds(me * rows.shape[1], rows.shape[1])], codes)
    pl.when(me == 0)(lambda: store_scales(scratch.units, scale))
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.done)
    plgpu.barrier_wait(scratch.done)
    pl.when(me == 0)(put_block)


def _sum(count: jax.Array, columns: int, read: Any, sink: jax.Array | None) -> Sum:
    """Add up `count` parts (lse, rows) in their order; the weights are relative to the top.

    `sink` [64] is a logit of each row that no part has, and that has no value.
    """

    at_once = AT_ONCE // columns

    def add(nth: jax.Array, carry: Sum) -> Sum:
        weighted, total, top = carry
        places = [nth * at_once + i for i in range(at_once)]
        # Past the end one is read again, of weight 0.
        read_parts = [read(jnp.minimum(place, count - 1)) for place in places]
        new_top = functools.reduce(jnp.maximum, [lse for lse, _ in read_parts], top)
        decay = jnp.exp2(top - new_top)
        weighted, total = weighted * _along(decay, weighted), total * decay
        for place, (lse, rows) in zip(places, read_parts, strict=True):
            weight = jnp.exp2(lse - new_top) * (place < count).astype(jnp.float32)
            weighted, total = weighted + rows * _along(weight, rows), total + weight
        return weighted, total, new_top

    row = WGMMA.reduce(1)
    total, top = filled((ROWS,), 0.0, row), filled((ROWS,), LOWEST, row)
    if sink is not None:
        total, top = filled((ROWS,), 1.0, row), sink
    rounds = lax.div(count + (at_once - 1), jnp.int32(at_once))
    return lax.fori_loop(0, rounds, add, (filled((ROWS, columns), 0.0), total, top))


def _along(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Broadcast `x`, one value per row, to the shape of `rows`."""
    return lax.broadcast_in_dim(x, rows.shape, [0])
