"""The memory's warpgroup of the decode kernel: it keeps the ring of K and V tiles full by TMA.

One warp brings the queries and K, another V; the other two have nothing to do. Single warps,
because every thread that issues a copy also arrives at its barrier: with blocks of 16 tokens a copy
is 4 KB, and 128 arrivals would take about as long as the copy itself.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_terms import Inputs, Shape, my_jobs, read_job


class Stream(NamedTuple):
    """K or V: where it comes from, where it goes, and the barriers of each place."""

    blocks: Any
    ring: Any
    full: Any
    free: Any


def load(shape: Shape, inputs: Inputs, buffers: Any) -> None:
    """Copy the queries and tiles of this worker's jobs, each as soon as there is room for it.

    `buffers` are those of the kernel of few heads or of the one of many.
    """
    k = Stream(inputs.kv.k_pool, buffers.k, buffers.k_full, buffers.k_free)

    def run(warp: jax.Array) -> None:
        pl.when(warp == 0)(lambda: _load_stream(shape, inputs, k, buffers))
        if shape.options.values_in_keys is None:
            v = Stream(inputs.kv.v_pool, buffers.v, buffers.v_full, buffers.v_free)
            pl.when(warp == 1)(lambda: _load_stream(shape, inputs, v, None))

    plgpu.warp_map(run)


def _load_stream(shape: Shape, inputs: Inputs, stream: Stream, buffers: Any) -> None:
    """Copy one of K and V; with `buffers`, the queries, too."""
    first, last = my_jobs(inputs)

    def load_job(index: jax.Array, count: jax.Array) -> jax.Array:
        job = read_job(shape, inputs, index)
        if buffers is not None:
            _load_query(shape, inputs, buffers, job.row, index - first)

        def load_round(nth: jax.Array, count: jax.Array) -> jax.Array:
            _load_tile(shape, inputs, stream, job.seq, nth, count)
            return count + 1

        return lax.fori_loop(job.begin, job.end, load_round, count)

    count = lax.fori_loop(first, last, load_job, jnp.int32(0))
    _drain(stream.free, shape.stages, count)
    if buffers is not None:
        _drain(buffers.q_free, shape.q_slots, last - first)


def _load_query(
    shape: Shape, inputs: Inputs, buffers: Any, row: jax.Array, count: jax.Array
) -> None:
    """Copy the query of this worker's job number `count`."""
    slot = lax.rem(count, jnp.int32(shape.q_slots))
    pl.when(count >= shape.q_slots)(lambda: plgpu.barrier_wait(buffers.q_free.at[slot]))
    source, place = inputs.q.at[row, lax.axis_index("kv_head")], buffers.q.at[slot]
    plgpu.copy_gmem_to_smem(source, place, buffers.q_full.at[slot])


def _load_tile(
    shape: Shape,
    inputs: Inputs,
    stream: Stream,
    seq: jax.Array,
    nth: jax.Array,
    count: jax.Array,
) -> None:
    """Copy round `nth` of a sequence, block by block; `count` rounds came before it.

    Past the end of a context a table has the null block, or ends: what is copied there is masked.
    """
    step, per_block = shape.copy_tokens, jnp.int32(shape.copies_per_block)
    copies = shape.kv_tile // step
    tables, sources = inputs.kv.block_tables, []
    head = lax.axis_index("kv_head") if shape.options.values_in_keys is None else jnp.int32(0)
    for i in range(copies):
        part = nth * copies + i
        column = jnp.minimum(lax.div(part, per_block), tables.shape[1] - 1)
        tokens = pl.ds(lax.rem(part, per_block) * step, step)
        sources.append((tables[seq, column], head, tokens))
    slot = lax.rem(count, jnp.int32(shape.stages))
    pl.when(count >= shape.stages)(lambda: plgpu.barrier_wait(stream.free.at[slot]))
    for i, source in enumerate(sources):
        place = stream.ring.at[slot, pl.ds(i * step, step)]
        plgpu.copy_gmem_to_smem(stream.blocks.at[source], place, stream.full.at[slot])


def _drain(free: Any, size: int, count: jax.Array) -> None:
    """Wait until the last users of a ring of `size`, used `count` times, have let go of it."""
    for slot in range(size):
        pl.when(slot < count)(functools.partial(plgpu.barrier_wait, free.at[slot]))
