"""The arithmetic's warpgroup of the decode kernel: an online softmax, transposed.

Its first axis is the long side of a matrix instruction: context tokens in logits and weights,
head_dim in outputs. The second is the query heads.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.call import AttentionOptions
from pallas_kernels.decode_terms import (
    Q_SLOTS,
    Buffers,
    Inputs,
    Round,
    Shape,
    down_rows,
    my_jobs,
    read_job,
)
from pallas_kernels.mosaic import (
    LOG2_E,
    LOWEST,
    WGMMA,
    Accumulator,
    columns_of,
    filled,
    scales_of_head,
    store,
)

Values = tuple[jax.Array, ...]  # weighted values, one array for each of `Shape.products`
Carry = tuple[jax.Array, Values, jax.Array, jax.Array]


def compute(shape: Shape, inputs: Inputs, out: Any, lse: Any, buffers: Buffers) -> None:
    """Attend to this worker's jobs, one after the other."""
    first, last = my_jobs(inputs)
    head = lax.axis_index("kv_head")
    scores = shape.kv_tile, shape.rows
    k_scale, v_scale = scales_of_head(shape.options.kv_scales, inputs.scales, head)

    def run_job(index: jax.Array, count: jax.Array) -> jax.Array:
        job, slot = read_job(shape, inputs, index), lax.rem(index - first, jnp.int32(Q_SLOTS))
        plgpu.barrier_wait(buffers.q_full.at[slot])

        def run_round(nth: jax.Array, carry: Carry) -> Carry:
            part = Round(nth * shape.kv_tile, job.low, job.length)
            return _attend(shape, buffers, part, buffers.q.at[slot], k_scale, carry)

        top = filled((shape.rows,), LOWEST, WGMMA.reduce(0))
        nothing = tuple(filled((size, shape.rows), 0.0) for _, size in shape.products)
        carry = count, nothing, top, filled(scores, 0.0)
        count, weighted, top, sums = lax.fori_loop(job.begin, job.end, run_round, carry)
        plgpu.barrier_arrive(buffers.q_free.at[slot])
        total = sums.sum(axis=0)
        total = jnp.where(total > 0, total, 1.0)  # no rounds: LOWEST then weighs nothing
        place = 0
        for values in weighted:
            rows = pl.ds(place, values.shape[0])
            store(out.at[head, index, rows], values * down_rows(v_scale / total, values.shape))
            place += values.shape[0]
        store(lse.at[head, index], top + jnp.log2(total))
        return count

    lax.fori_loop(first, last, run_job, jnp.int32(0))


def _attend(
    shape: Shape,
    buffers: Buffers,
    part: Round,
    q: Any,
    k_scale: float | jax.Array,
    carry: Carry,
) -> Carry:
    """Take a round into the softmax under way.

    The carry: rounds so far, weighted values, maxima, and weights, summed over rounds only: over
    the tokens of a round they are summed once, at the end of a job.
    """
    count, weighted, top, sums = carry
    slot = lax.rem(count, jnp.int32(shape.stages))
    plgpu.barrier_wait(buffers.k_full.at[slot])
    k = _widened(buffers.k.at[slot], buffers.wide_k, buffers.k_free.at[slot])
    [scores] = _multiply([k], q.transpose((1, 0)))
    if buffers.wide_k is None and buffers.v is not None:
        plgpu.barrier_arrive(buffers.k_free.at[slot])
    logits = _masked(shape, part, _logits(shape.options, scores, k_scale))
    new_top = jnp.maximum(top, logits.max(axis=0))
    decay = jnp.exp2(top - new_top)
    p = jnp.exp2(logits - down_rows(new_top, logits.shape))
    flipped = plgpu.layout_cast(p.astype(shape.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    buffers.p.transpose((1, 0))[...] = flipped
    if buffers.v is None:
        v = k
    else:
        plgpu.barrier_wait(buffers.v_full.at[slot])
        v = _widened(buffers.v.at[slot], buffers.wide_v, buffers.v_free.at[slot])
    _clear_unseen(shape, part, v)
    plgpu.commit_smem()
    columns = [v.at[:, pl.ds(*part)].transpose((1, 0)) for part in shape.products]
    if buffers.v is None:
        weighted = _added(shape, columns, buffers.p.transpose((1, 0)), weighted, decay)
        plgpu.barrier_arrive(buffers.k_free.at[slot])
        return count + 1, weighted, new_top, sums * down_rows(decay, sums.shape) + p
    new = _multiply(columns, buffers.p.transpose((1, 0)))
    if buffers.wide_v is None:
        plgpu.barrier_arrive(buffers.v_free.at[slot])
    pairs = zip(weighted, new, strict=True)
    weighted = tuple(old * down_rows(decay, old.shape) + more for old, more in pairs)
    return count + 1, weighted, new_top, sums * down_rows(decay, sums.shape) + p


def _widened(tile: Any, wide: Any, free: Any) -> Any:
    """Return a tile that the matrix unit takes; an fp8 tile is widened and its place given back."""
    if wide is None:
        return tile
    size = columns_of(tile.shape[1])
    for column in range(0, tile.shape[1], size):  # not all: two blocks share the registers
        columns = slice(None), pl.ds(column, size)
        narrow = plgpu.load(tile.at[columns], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        wide[columns] = narrow.astype(wide.dtype)
    plgpu.commit_smem()  # before the next copy into the tile, and before the product
    plgpu.barrier_arrive(free)
    return wide


def _multiply(lefts: Sequence[Any], right: Any) -> Values:
    def products(*sums: Any) -> Values:
        for result, left in zip(sums, lefts, strict=True):
            plgpu.wgmma(result, left, right)
        return tuple(result[...] for result in sums)

    shapes = [(left.shape[0], right.shape[1]) for left in lefts]
    return pl.run_scoped(products, *(Accumulator(shape, jnp.float32) for shape in shapes))


def _added(
    shape: Shape, lefts: Sequence[Any], right: Any, weighted: Values, decay: jax.Array
) -> Values:
    """Return sums that decay with products added, in the accumulators: no room is for both.

    The interpreter starts these at zero.
    """
    decayed = tuple(old * down_rows(decay, old.shape) for old in weighted)
    if shape.options.interpret:
        new = _multiply(lefts, right)
        return tuple(old + more for old, more in zip(decayed, new, strict=True))

    def one(old: jax.Array, left: Any) -> jax.Array:
        def product(total: Any) -> None:
            plgpu.wgmma(total, left, right)
            plgpu.wgmma_wait(0)

        return pl.run_state(product)(Accumulator.init(old))  # pyright: ignore[reportReturnType]

    return tuple(one(*each) for each in zip(decayed, lefts, strict=True))


def _logits(options: AttentionOptions, scores: jax.Array, k_scale: float | jax.Array) -> jax.Array:
    """Return logits in base 2."""
    if options.soft_cap is None:
        return scores * (k_scale * (options.scale * LOG2_E))
    # tanh x = 1 - 2 / (1 + e^2x): the chip's own tanh has 11 bits, of which a cap of 50 leaves few.
    growth = jnp.exp2(scores * (k_scale * (2 * options.scale * LOG2_E / options.soft_cap)))
    return (1.0 - 2.0 / (1.0 + growth)) * (options.soft_cap * LOG2_E)


def _masked(shape: Shape, part: Round, logits: jax.Array) -> jax.Array:
    return jnp.where(_seen(shape, part, logits.shape), logits, LOWEST)


def _seen(shape: Shape, part: Round, size: tuple[int, ...]) -> jax.Array:
    """Whether the row sees each token of a round, which run down the first axis."""
    positions = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=WGMMA) + part.begin
    seen = positions < part.length
    return seen if shape.options.window is None else seen & (positions >= part.low)


def _clear_unseen(shape: Shape, part: Round, v: Any) -> None:
    """Make zeros of values without weight: they may be NaN. Only the ends of contexts have any."""

    @pl.when((part.begin < part.low) | (part.begin + shape.kv_tile > part.length))
    def _() -> None:
        size = columns_of(shape.head_dim)
        seen = _seen(shape, part, (shape.kv_tile, size))
        for column in range(0, shape.width, size):
            columns = slice(None), pl.ds(column, size)
            values = plgpu.load(v.at[columns], layout=WGMMA)
            v[columns] = jnp.where(seen, values, jnp.zeros_like(values))
