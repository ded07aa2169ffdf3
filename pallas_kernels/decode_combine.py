"""The end of decode attention: the jobs of each row, put together.

A kernel of its own, and not the last job to arrive: arrival needs atomics and flags that somebody
clears, in a launch after which nothing may be left over; this one is a launch of a few microseconds
that reads what is still in the cache, and adds in a fixed order, so that the same step gives the
same bits. And not plain XLA: jobs of a row are a ragged sum, which there is atomics or padding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_plan import DecodeConfig, num_workers
from pallas_kernels.decode_work import down_rows
from pallas_kernels.mosaic import LOWEST, WGMMA, filled, store

MOST_AT_ONCE = 4  # a warpgroup has up to so many outputs under way from memory: in registers
MAX_WARPGROUPS = 4

Sum = tuple[jax.Array, jax.Array, jax.Array]  # weighted outputs, total weight, largest lse


def combine_jobs(
    outputs: jax.Array,
    lse: jax.Array,
    row_first: jax.Array,
    row_jobs: jax.Array,
    q: jax.Array,
    out: jax.Array | None,
    *,
    config: DecodeConfig,
    interpret: Any,
) -> jax.Array:
    """Return an array like `q` with the decode rows' attention; other rows of `out`, or zeros.

    `outputs`, `lse` as `decode_kernel.run_jobs` gives them; `row_first` and `row_jobs` have an
    entry for each row that could be a decode row.
    """
    kv_heads, _, head_dim, rows = outputs.shape
    most = num_workers(config.num_blocks, kv_heads)  # jobs that one row can have
    warpgroups = min(MAX_WARPGROUPS, -(-most // (2 * MOST_AT_ONCE)), max(1, 64 // rows))
    result = jax.new_ref(jnp.zeros(q.shape, q.dtype) if out is None else out)
    group = q.shape[1] // kv_heads
    body = functools.partial(_combine_kernel, group, warpgroups, result)
    plgpu.kernel(
        body,
        scratch_types=dict(
            shared_sum=plgpu.SMEM((warpgroups, head_dim, rows), jnp.float32),
            shared_total=plgpu.SMEM((warpgroups, rows), jnp.float32),
            shared_top=plgpu.SMEM((warpgroups, rows), jnp.float32),
            staged=plgpu.SMEM((rows, head_dim), q.dtype),
            done=plgpu.Barrier(num_arrivals=warpgroups),
        ),
        grid=(row_first.shape[0], kv_heads),
        grid_names=("row", "kv_head"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name="decode_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(outputs, lse, row_first, row_jobs)
    return result[...]


def _combine_kernel(
    group: int,
    warpgroups: int,
    result: Any,
    outputs: Any,
    lse: Any,
    row_first: Any,
    row_jobs: Any,
    *,
    shared_sum: Any,
    shared_total: Any,
    shared_top: Any,
    staged: Any,
    done: Any,
) -> None:
    """Combine the jobs of one row and KV head: every warpgroup its share, then the first all."""
    row, head = lax.axis_index("row"), lax.axis_index("kv_head")
    me = lax.axis_index("warpgroup")
    first, count = row_first[row], row_jobs[row]

    @pl.when(count > 0)
    def _() -> None:
        mine = _sum_share(outputs.at[head], lse.at[head], first, count, me, warpgroups)
        shared_sum[me], shared_total[me], shared_top[me] = mine
        plgpu.barrier_arrive(done)

        @pl.when(me == 0)
        def _() -> None:
            plgpu.barrier_wait(done)
            total = _sum_shares(shared_sum, shared_total, shared_top, warpgroups)
            flipped = plgpu.layout_cast(total.astype(staged.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            store(staged.transpose((1, 0)), flipped)
            plgpu.commit_smem()
            heads = pl.ds(head * group, group)
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, group)], result.at[row, heads])
            plgpu.wait_smem_to_gmem(0)


def _sum_share(
    outputs: Any, lse: Any, first: jax.Array, count: jax.Array, me: jax.Array, warpgroups: int
) -> Sum:
    """Add up the jobs me, me + warpgroups, ... of a row, weighted; none is a sum of nothing."""
    size = outputs.shape[1:]
    at_once = max(1, MOST_AT_ONCE * 8 // size[1])
    stride = warpgroups * at_once

    def add(nth: jax.Array, carry: Sum) -> Sum:
        parts = []
        for i in range(at_once):
            place = nth * stride + i * warpgroups + me
            job = first + jnp.minimum(place, count - 1)  # past the end: one read twice, of weight 0
            parts.append(
                (
                    (place < count).astype(jnp.float32),
                    plgpu.load(lse.at[job], layout=WGMMA.reduce(0), optimized=False),
                    plgpu.load(outputs.at[job], layout=WGMMA, optimized=False),
                )
            )
        return _add(carry, parts)

    nothing = filled(size, 0.0), filled(size[1:], 0.0, WGMMA.reduce(0))
    top = filled(size[1:], LOWEST, WGMMA.reduce(0))
    return lax.fori_loop(0, lax.div(count + (stride - 1), jnp.int32(stride)), add, (*nothing, top))


def _add(carry: Sum, parts: list[tuple[jax.Array, jax.Array, jax.Array]]) -> Sum:
    """Take parts (weight 0 or 1, lse, output) into a sum whose weights are relative to its top."""
    weighted, total, top = carry
    new_top = functools.reduce(jnp.maximum, [lse for _, lse, _ in parts], top)
    decay = jnp.exp2(top - new_top)
    weighted, total = weighted * down_rows(decay, weighted.shape), total * decay
    for live, lse, output in parts:
        weight = jnp.exp2(lse - new_top) * live
        weighted, total = weighted + output * down_rows(weight, output.shape), total + weight
    return weighted, total, new_top


def _sum_shares(sums: Any, totals: Any, tops: Any, warpgroups: int) -> jax.Array:
    """Return the output of a row from what each warpgroup has added up."""
    lanes = WGMMA.reduce(0)
    all_tops = [plgpu.load(tops.at[i], layout=lanes) for i in range(warpgroups)]
    top = functools.reduce(jnp.maximum, all_tops)
    weighted, total = filled(sums.shape[1:], 0.0), filled(sums.shape[2:], 0.0, lanes)
    for i in range(warpgroups):
        weight = jnp.exp2(all_tops[i] - top)
        share = plgpu.load(sums.at[i], layout=WGMMA)
        weighted = weighted + share * down_rows(weight, share.shape)
        total = total + plgpu.load(totals.at[i], layout=lanes) * weight
    return weighted * down_rows(1.0 / total, weighted.shape)
