"""The end of decode attention: the jobs of each row, put together.

A kernel of its own, and not the last job to arrive: arrival needs flags that start as zeros, and
Mosaic's semaphores are an operand that XLA fills before every call, which is a launch again (and
one that the interpreter cannot run). This one takes a few microseconds, reads what is still in the
cache, and adds in a fixed order, so that the same step gives the same bits. And not plain XLA: jobs
of a row are a ragged sum, which there is atomics or padding.

A thread block takes one row, one KV head and COLUMNS of head_dim, so that the jobs of one long
context are not all read by one block. Where head_dim is no multiple of them, the last block has
columns of the one before, too (`Shape.products`). For codes a thread
block takes all of head_dim, which shares a scale.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.call import AttentionOptions
from pallas_kernels.decode_terms import down_rows
from pallas_kernels.decode_work import JOBS_AT_ONCE, DecodeConfig, most_jobs
from pallas_kernels.head_codes import BLOCK, CodedHeads, Heads, coded, like_heads
from pallas_kernels.mosaic import COLUMNS, FP8, LOG2_E, LOWEST, WGMMA, apart, filled, store
from pallas_kernels.queries import Queries

MAX_WARPGROUPS = 4
MOST_AT_ONCE = JOBS_AT_ONCE // MAX_WARPGROUPS  # outputs of 8 rows that a warpgroup has under way
REDUCTION_BYTES = 2048  # scratch of maxima over the four warps

Sum = tuple[jax.Array, jax.Array, jax.Array]  # weighted outputs, total weight, largest lse


class Parts(NamedTuple):
    """What the jobs gave, and which of them belong to each row that could be a decode row."""

    # [kv_heads, jobs, columns, rows] as `decode_kernel.run_jobs` gives them, or [.., rows, columns]
    # as `latent_decode.run_jobs`
    outputs: Any
    lse: Any  # [kv_heads, jobs, rows]
    row_first: Any  # [decode rows] the first job of a row
    row_jobs: Any  # [decode rows] how many it has: 0 for what is not a decode row
    sinks: Any  # [kv_heads, rows]; None: there are none
    fixed: Any = None  # [1] the scale of all codes; None: they have their own, or are none


class RowParts(NamedTuple):
    """What a part of their contexts gives rows, float32: it can be put together with other parts.

    A row that sees nothing of its context there has zeros, and a logarithm of LOWEST or about it.
    """

    # [rows, kv_heads, columns, rows of q] or these turned or [rows, heads, head_dim], normalised
    values: Any
    lse: Any  # the same without columns: base-2 logarithms of the sums of exponentials


class Scratch(NamedTuple):
    """Shared memory, and its barrier: sums of every warpgroup, and the row that goes out."""

    sums: Any  # [warpgroups, columns, rows]
    totals: Any  # [warpgroups, rows]
    tops: Any
    done: Any
    staged: Any = None  # [rows, columns]; None: it goes out as it is
    units: Any = None  # [rows] scales of codes


def combine_jobs(
    parts: Parts,
    like: jax.Array | Queries,
    out: Heads | None,
    config: DecodeConfig,
    options: AttentionOptions,
) -> Heads:
    """Return attention of the decode rows in an array of the shape and type of `like`.

    Or as codes. Other rows are those of `out`, in place where that may be; without it `parts` must
    have all tokens, and what is not a decode row is zeros.
    """
    count, (kv_heads, _, all_columns, rows) = parts.row_first.shape[0], parts.outputs.shape
    columns = COLUMNS if options.codes is None else BLOCK
    parts = parts._replace(fixed=None if options.codes is None else options.codes.fixed)
    scratch = _scratch(parts, columns, config)._replace(
        staged=plgpu.SMEM((rows, columns), like.dtype if options.codes is None else FP8),
        units=None if options.codes is None else plgpu.SMEM((rows,), jnp.float32),
    )
    result = None if out is None else jax.tree.map(jax.new_ref, out)
    if out is not None:
        parts = Parts(*parts[:2], *apart(parts[2:]))
    written, out_tree = jax.tree.flatten(like_heads(like, options.codes))
    arrays, tree = jax.tree.flatten(parts)
    kernel = functools.partial(_combine_kernel, (tree, out_tree), like.dtype, result)
    grid, types = (count, kv_heads, all_columns // columns), tuple(written)
    made = _launch(kernel, scratch, grid, () if result is not None else types, options)(*arrays)
    if result is None:
        return jax.tree.unflatten(out_tree, made)
    return jax.tree.map(lambda ref: ref[...], result)


def combine_parts(
    parts: Parts, config: DecodeConfig, options: AttentionOptions, *, heads_first: bool = False
) -> RowParts:
    """Return what the rows see here, with the sums' logarithms; there may be more of it elsewhere.

    `[rows, kv_heads, columns, rows of q]`, in the columns of `Shape.products`; with `heads_first`
    rows of q come before columns, here as in `parts`.
    """
    count, (kv_heads, _, *size) = parts.row_first.shape[0], parts.outputs.shape
    parts = parts._replace(sinks=None, fixed=None)
    arrays, tree = jax.tree.flatten(parts)
    values = jax.ShapeDtypeStruct((count, kv_heads, *size), jnp.float32)
    lse = jax.ShapeDtypeStruct((count, kv_heads, parts.lse.shape[-1]), jnp.float32)
    axis = 1 - heads_first  # of the rows of q
    scratch, grid = _scratch(parts, COLUMNS, config), (count, kv_heads, size[1 - axis] // COLUMNS)
    if heads_first:
        sums = plgpu.SMEM((*scratch.totals.shape, COLUMNS), jnp.float32)
        scratch = scratch._replace(sums=sums)
    kernel = functools.partial(_parts_kernel, tree, axis)
    return RowParts(*_launch(kernel, scratch, grid, (values, lse), options)(*arrays))


def _scratch(parts: Parts, columns: int, config: DecodeConfig) -> Scratch:
    """Return the shared memory of thread blocks that take so many columns."""
    kv_heads, rows = parts.outputs.shape[0], parts.lse.shape[-1]
    most = most_jobs(config, kv_heads)
    if config.fixed_rounds is None:  # else the order of a row's jobs must not depend on other rows
        most = min(most, 2 * (most // parts.row_first.shape[0] + 1))  # of many rows each has few
    warpgroups = min(MAX_WARPGROUPS, -(-most // (2 * MOST_AT_ONCE)), max(1, 128 // rows))
    per_warpgroup = plgpu.SMEM((warpgroups, rows), jnp.float32)
    return Scratch(
        sums=plgpu.SMEM((warpgroups, columns, rows), jnp.float32),
        totals=per_warpgroup,
        tops=per_warpgroup,
        done=plgpu.Barrier(num_arrivals=warpgroups),
    )


def _launch(
    kernel: Callable[..., None],
    scratch: Scratch,
    grid: tuple[int, int, int],
    types: tuple[Any, ...],
    options: AttentionOptions,
) -> Callable[..., Any]:
    """Return what runs a kernel for every row, KV head and block of columns."""
    return plgpu.kernel(
        kernel,
        out_type=types,
        scratch_types=scratch._asdict(),
        grid=grid,
        grid_names=("row", "kv_head", "columns"),
        num_threads=scratch.totals.shape[0],
        thread_name="warpgroup",
        kernel_name="decode_combine",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES
        ),
        interpret=options.interpret,
    )


def _parts_kernel(tree: Any, axis: int, *refs: Any, **buffers: Any) -> None:
    """Combine the jobs of one row and KV head, and say how much they weigh; as `_combine_kernel`.

    What goes out is what comes in, turned by whoever reads it: numbers of 32 bits are not turned.
    """
    parts, result = jax.tree.unflatten(tree, refs[:-2]), RowParts(*refs[-2:])
    scratch, me = Scratch(**buffers), lax.axis_index("warpgroup")
    row, head, block = (lax.axis_index(name) for name in ("row", "kv_head", "columns"))
    columns = (*[slice(None)] * (1 - axis), pl.ds(block * COLUMNS, COLUMNS))
    outputs, lse = parts.outputs.at[head, :, *columns], parts.lse.at[head]
    jobs = parts.row_first[row], parts.row_jobs[row]
    mine = _sum_share(outputs, lse, *jobs, me, scratch.tops.shape[0], axis)
    scratch.sums[me], scratch.totals[me], scratch.tops[me] = mine
    plgpu.barrier_arrive(scratch.done)

    @pl.when(me == 0)
    def _() -> None:
        plgpu.barrier_wait(scratch.done)
        weighted, total, top = _merged(scratch, None, axis)
        values = weighted * _repeated(1 / total, weighted.shape, axis)
        store(result.values.at[row, head, *columns], values)
        pl.when(block == 0)(lambda: store(result.lse.at[row, head], top + jnp.log2(total)))


def _combine_kernel(
    trees: tuple[Any, Any], dtype: Any, kept: Any, *refs: Any, **buffers: Any
) -> None:
    """Combine the jobs of one row and KV head: every warpgroup its share, then the first all.

    The result is `kept`, of which rows without jobs stay as they are, or else the last of `refs`.
    Numbers are rounded to `dtype`.
    """
    tree, out_tree = trees
    parts = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    scratch, result = Scratch(**buffers), kept
    if kept is None:
        result = jax.tree.unflatten(out_tree, refs[tree.num_leaves :])
    values = result.values if isinstance(result, CodedHeads) else result
    row, head = lax.axis_index("row"), lax.axis_index("kv_head")
    block, width = lax.axis_index("columns"), scratch.staged.shape[1]
    columns = pl.ds(block * width, width)
    me, q_per_kv = lax.axis_index("warpgroup"), values.shape[1] // parts.outputs.shape[0]
    first, count = parts.row_first[row], parts.row_jobs[row]

    def combine() -> None:
        outputs, lse = parts.outputs.at[head, :, columns], parts.lse.at[head]
        mine = _sum_share(outputs, lse, first, count, me, scratch.tops.shape[0])
        scratch.sums[me], scratch.totals[me], scratch.tops[me] = mine
        plgpu.barrier_arrive(scratch.done)

        @pl.when(me == 0)
        def _() -> None:
            plgpu.barrier_wait(scratch.done)
            sinks = None if parts.sinks is None else parts.sinks.at[head]
            total, staged = _sum_shares(scratch, sinks), scratch.staged
            if isinstance(result, CodedHeads):
                codes, scale = coded(total, dtype, parts.fixed, axis=0)
                store(scratch.units, jnp.broadcast_to(scale, scratch.units.shape))
                # Numbers of 16 bits can be turned, and float16 holds every code.
                turned = _turned(codes.astype(jnp.float16)).astype(FP8)
            else:
                turned = _turned(total.astype(dtype))
            store(staged.transpose((1, 0)), turned)
            plgpu.commit_smem()
            if isinstance(result, CodedHeads):
                _put_codes(scratch, result, row, head * q_per_kv, q_per_kv)
            else:
                _put(staged, result.at[row, pl.ds(head * q_per_kv, q_per_kv)], block)

    combine() if kept is None else pl.when(count > 0)(combine)


def _turned(values: jax.Array) -> jax.Array:
    return plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)


def _put_codes(
    scratch: Scratch, out: CodedHeads, row: jax.Array, first: jax.Array, heads: int
) -> None:
    """Write some heads from `first` on, and their scales."""
    target = out.values.at[row, pl.ds(first, heads)]
    plgpu.copy_smem_to_gmem(scratch.staged.at[pl.ds(0, heads)], target)
    for head in range(heads):
        out.scale[first + head, row] = scratch.units[head]
    plgpu.wait_smem_to_gmem(0)


def _put(staged: Any, target: Any, block: jax.Array) -> None:
    """Write a block of columns to `target` [heads, head_dim]: those that the next one does not."""
    heads, head_dim = target.shape
    whole, rest = head_dim // COLUMNS, head_dim % COLUMNS

    def put_all() -> None:
        first = jnp.minimum(block * COLUMNS, head_dim - COLUMNS)
        columns = pl.ds(first, COLUMNS)
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, heads)], target.at[:, columns])

    def put_first() -> None:
        for head in range(heads):  # TMA reads from where a head begins, and nowhere in it
            source = staged.at[head, pl.ds(0, rest)]
            plgpu.copy_smem_to_gmem(source, target.at[head, pl.ds((whole - 1) * COLUMNS, rest)])

    if rest:
        pl.when(block != whole - 1)(put_all)
        pl.when(block == whole - 1)(put_first)
    else:
        put_all()
    plgpu.wait_smem_to_gmem(0)


def _sum_share(
    outputs: Any,
    lse: Any,
    first: jax.Array,
    count: jax.Array,
    me: jax.Array,
    warpgroups: int,
    axis: int = 1,
) -> Sum:
    """Add up the jobs me, me + warpgroups, ... of a row, weighted; none is a sum of nothing.

    The rows of q are along `axis` of the outputs.
    """
    size, lanes = outputs.shape[1:], WGMMA.reduce(1 - axis)
    rows = size[axis : axis + 1]
    at_once = max(1, MOST_AT_ONCE * 8 // rows[0])
    stride = warpgroups * at_once

    def add(nth: jax.Array, carry: Sum) -> Sum:
        parts = []
        for i in range(at_once):
            place = nth * stride + i * warpgroups + me
            job = first + jnp.minimum(place, count - 1)  # past the end: one read twice, of weight 0
            parts.append(
                (
                    (place < count).astype(jnp.float32),
                    plgpu.load(lse.at[job], layout=lanes, optimized=False),
                    plgpu.load(outputs.at[job], layout=WGMMA, optimized=False),
                )
            )
        return _add(carry, parts, axis)

    nothing, top = (filled(size, 0.0), filled(rows, 0.0, lanes)), filled(rows, LOWEST, lanes)
    return lax.fori_loop(0, lax.div(count + (stride - 1), jnp.int32(stride)), add, (*nothing, top))


def _add(carry: Sum, parts: list[tuple[jax.Array, jax.Array, jax.Array]], axis: int) -> Sum:
    """Take parts (weight 0 or 1, lse, output) into a sum whose weights are relative to its top."""
    weighted, total, top = carry
    new_top = functools.reduce(jnp.maximum, [lse for _, lse, _ in parts], top)
    decay = jnp.exp2(top - new_top)
    weighted, total = weighted * _repeated(decay, weighted.shape, axis), total * decay
    for live, lse, output in parts:
        weight = jnp.exp2(lse - new_top) * live
        weighted = weighted + output * _repeated(weight, output.shape, axis)
        total = total + weight
    return weighted, total, new_top


def _repeated(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Repeat a number of each row of q, which are along `axis`."""
    return lax.broadcast_in_dim(x, shape, [axis])


def _sum_shares(scratch: Scratch, sinks: Any) -> jax.Array:
    """Return the output of a row from what each warpgroup has added up, and its sinks."""
    weighted, total, _ = _merged(scratch, sinks)
    return weighted * down_rows(1.0 / total, weighted.shape)


def _merged(scratch: Scratch, sinks: Any, axis: int = 1) -> Sum:
    """Return the sum of what each warpgroup has added up, and of sinks; no jobs: total 1."""
    sums, totals, tops = scratch[:3]
    lanes = WGMMA.reduce(1 - axis)
    all_tops = [plgpu.load(tops.at[i], layout=lanes) for i in range(tops.shape[0])]
    top = functools.reduce(jnp.maximum, all_tops)
    weighted, total = filled(sums.shape[1:], 0.0), filled(tops.shape[1:], 0.0, lanes)
    if sinks is not None:  # only here, and so once, in however many jobs a context was read
        sink = plgpu.load(sinks, layout=lanes, optimized=False).astype(jnp.float32) * LOG2_E
        top = jnp.maximum(top, sink)
        total = jnp.exp2(sink - top)
    for i in range(tops.shape[0]):
        weight = jnp.exp2(all_tops[i] - top)
        share = plgpu.load(sums.at[i], layout=WGMMA)
        weighted = weighted + share * _repeated(weight, share.shape, axis)
        total = total + plgpu.load(totals.at[i], layout=lanes) * weight
    return weighted, jnp.where(total > 0, total, 1.0), top
