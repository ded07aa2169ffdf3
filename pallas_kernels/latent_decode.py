"""Decode attention over latents with many heads, which are on the long side of the instructions.

`decode_kernel` puts tokens there, and has room for 16 heads; of 128 heads eight thread blocks would
read each latent. Here a thread block has up to 64, and reads it once for all of them:

    S = Q K^T      [64 heads, kv_tile]
    O = P V        [64 heads, 256] for each half of a value, the first numbers of the tile of K

as FlashMLA does (DeepSeek, 2025). Sums of 64 heads are more than a warpgroup has registers, so two
share them, in three warpgroups:

    lead      S0 p0 O0 | S1 p1 O1 | ...    all logits and weights, and the first half of the values
    follow          O0      | O1      |    the other half, with weights from shared memory
    memory    tiles by TMA, as `decode_memory` brings them to the other kernel

Tiles of fp8 are first widened to float16, of which there is one: each of the two widens what it
alone multiplies with weights, and the follower the rest, as soon as it has done so with the last.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.decode_memory import load
from pallas_kernels.decode_terms import Inputs, Job, Shape, my_jobs, read_job
from pallas_kernels.decode_work import MANY_HEADS as HEADS
from pallas_kernels.mosaic import (
    COLUMNS,
    FP8,
    LOG2_E,
    LOWEST,
    WGMMA,
    Accumulator,
    filled,
    scales_of_head,
    store,
    swizzled,
)

MOST_WIDTH = 2 * 256  # numbers of a value: an instruction's columns, twice
REDUCTION_BYTES = 512
LEAD, FOLLOW, MEMORY = range(3)  # the warpgroups
REGISTERS = 232, 40  # of a thread that computes, and of one that copies
ROW = WGMMA.reduce(1)  # the layout of a number for each head


class Buffers(NamedTuple):
    """Shared memory, and barriers: `full` is said by who brings, `free` by who has read."""

    q: Any  # [1, 64, head_dim]
    k: Any  # [stages, kv_tile, head_dim]
    wide: Any  # [kv_tile, head_dim] float16 of a tile of fp8; None without fp8
    p: Any  # [64, kv_tile] weights of a round
    gain: Any  # [64] by what sums are multiplied before the round, and at the end of a job
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    wide_full: Any  # said of what the follower widens; None without fp8
    p_full: Any
    p_free: Any


class Softmax(NamedTuple):
    """An online softmax under way, of the leading warpgroup."""

    weighted: jax.Array  # [64, half of the width]
    top: jax.Array  # [64] maxima, times log2(e)
    total: jax.Array  # [64]


def wrong_sizes(head_dim: int, width: int) -> list[str]:
    """Return what is wrong with latents of `head_dim` numbers, `width` of which are values."""
    wrong = []
    if head_dim % COLUMNS:
        wrong.append(
            f"latents of {head_dim} numbers are no multiple of {COLUMNS}, with many heads or codes"
        )
    if width % (2 * COLUMNS) or width > MOST_WIDTH:
        wrong.append(f"values of {width} numbers are no multiple of 128 up to {MOST_WIDTH}")
    return wrong


def run_jobs(shape: Shape, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Return of every job the output, normalised, and the base-2 log of the sum of exponentials.

    `[groups of heads, jobs, 64, width]` and `[groups, jobs, 64]`, float32; what belongs to no job
    is not written.
    """
    groups, jobs = inputs.q.shape[1], inputs.job_row.shape[0]
    arrays, tree = jax.tree.flatten(inputs)
    run = plgpu.kernel(
        functools.partial(_kernel, shape, tree),
        out_type=(
            jax.ShapeDtypeStruct((groups, jobs, HEADS, shape.width), jnp.float32),
            jax.ShapeDtypeStruct((groups, jobs, HEADS), jnp.float32),
        ),
        scratch_types=_buffers(shape, inputs.kv.k_pool.dtype)._asdict(),
        grid=(inputs.worker_first.shape[0] - 1, groups),
        grid_names=("worker", "kv_head"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="latent_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES
        ),
        interpret=shape.options.interpret,
    )
    return run(*arrays)


def _buffers(shape: Shape, kv_dtype: DTypeLike) -> Buffers:
    tile, is_coded = shape.kv_tile, kv_dtype == FP8
    one = plgpu.Barrier()
    return Buffers(
        q=swizzled((1, HEADS, shape.head_dim), shape.dtype),
        k=swizzled((shape.stages, tile, shape.head_dim), kv_dtype),
        wide=swizzled((tile, shape.head_dim), shape.dtype) if is_coded else None,
        p=swizzled((HEADS, tile), shape.dtype),
        gain=plgpu.SMEM((HEADS,), jnp.float32),
        q_full=plgpu.Barrier(num_barriers=1),
        q_free=plgpu.Barrier(num_barriers=1),
        k_full=plgpu.Barrier(num_arrivals=tile // shape.copy_tokens, num_barriers=shape.stages),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        wide_full=one if is_coded else None,
        p_full=one,
        p_free=one,
    )


def _kernel(shape: Shape, tree: Any, *refs: Any, **scratch: Any) -> None:
    inputs, (out, lse), buffers = jax.tree.unflatten(tree, refs[:-2]), refs[-2:], Buffers(**scratch)
    warpgroup = lax.axis_index("warpgroup")
    compute_registers, memory_registers = REGISTERS

    @pl.when(warpgroup == LEAD)
    def _() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        _lead(shape, inputs, out, lse, buffers)

    @pl.when(warpgroup == FOLLOW)
    def _() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        _follow(shape, inputs, out, buffers)

    @pl.when(warpgroup == MEMORY)
    def _() -> None:
        plgpu.set_max_registers(memory_registers, action="decrease")
        load(shape, inputs, buffers)


def _lead(shape: Shape, inputs: Inputs, out: Any, lse: Any, buffers: Buffers) -> None:
    """Compute all weights of this worker's jobs, and the first half of what they sum."""
    first, last = my_jobs(inputs)
    group, half = lax.axis_index("kv_head"), pl.ds(0, shape.width // 2)
    k_scale, v_scale = scales_of_head(shape.options.kv_scales, inputs.scales, jnp.int32(0))

    def run_job(index: jax.Array, count: jax.Array) -> jax.Array:
        job = read_job(shape, inputs, index)
        plgpu.barrier_wait(buffers.q_full.at[0])

        def run_round(nth: jax.Array, carry: tuple[jax.Array, Softmax]) -> Any:
            count, softmax = carry
            return count + 1, _attend(shape, buffers, job, (nth, count), k_scale, softmax)

        nothing = filled((HEADS, shape.width // 2), 0.0)
        empty = Softmax(nothing, filled((HEADS,), LOWEST, ROW), filled((HEADS,), 0.0, ROW))
        count, softmax = lax.fori_loop(job.begin, job.end, run_round, (count, empty))
        plgpu.barrier_arrive(buffers.q_free.at[0])
        total = jnp.where(softmax.total > 0, softmax.total, 1.0)  # no rounds: LOWEST weighs nothing
        gain = v_scale / total
        plgpu.barrier_wait(buffers.p_free)
        buffers.gain[...] = gain
        plgpu.barrier_arrive(buffers.p_full)
        store(out.at[group, index, :, half], softmax.weighted * _across(gain, softmax.weighted))
        store(lse.at[group, index], softmax.top + jnp.log2(total))
        return count

    lax.fori_loop(first, last, run_job, jnp.int32(0))
    plgpu.barrier_wait(buffers.p_free)


def _attend(
    shape: Shape,
    buffers: Buffers,
    job: Job,
    turn: tuple[jax.Array, jax.Array],
    k_scale: float | jax.Array,
    softmax: Softmax,
) -> Softmax:
    """Take a round of a job into its softmax; `turn`: which it is, and how many came before it."""
    nth, count = turn
    slot, begin = lax.rem(count, jnp.int32(shape.stages)), nth * shape.kv_tile
    plgpu.barrier_wait(buffers.k_full.at[slot])
    k = _widened(buffers, slot, pl.ds(0, shape.width // 2))
    if buffers.wide_full is not None:
        plgpu.barrier_wait(buffers.wide_full)

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, buffers.q.at[0], k.transpose((1, 0)))
        return accumulator[...]

    scores = pl.run_scoped(multiply, Accumulator((HEADS, shape.kv_tile), jnp.float32))
    logits = _hidden(shape, job, begin, _logits(shape, scores, k_scale))
    top = jnp.maximum(softmax.top, logits.max(axis=1))
    decay = jnp.exp2(softmax.top - top)
    p = jnp.exp2(logits - _across(top, logits))
    total = softmax.total * decay + p.sum(axis=1)
    plgpu.barrier_wait(buffers.p_free)
    buffers.p[...] = p.astype(shape.dtype)
    buffers.gain[...] = decay
    values = k.at[:, pl.ds(0, shape.width // 2)]
    _clear_unseen(shape, job, begin, values)
    plgpu.commit_smem()
    plgpu.barrier_arrive(buffers.p_full)
    weighted = _added(shape, softmax.weighted, decay, buffers.p, values)
    if buffers.wide is None:
        plgpu.barrier_arrive(buffers.k_free.at[slot])
    return Softmax(weighted, top, total)


def _follow(shape: Shape, inputs: Inputs, out: Any, buffers: Buffers) -> None:
    """Sum the second half of the values of this worker's jobs, with weights that are given."""
    first, last = my_jobs(inputs)
    half = pl.ds(shape.width // 2, shape.width // 2)
    rest = pl.ds(shape.width // 2, shape.head_dim - shape.width // 2)
    plgpu.barrier_arrive(buffers.p_free)

    def gain_of_turn(free: Callable[[], None]) -> jax.Array:
        plgpu.barrier_wait(buffers.p_full)
        gain = plgpu.load(buffers.gain, layout=ROW)
        free()
        return gain

    def run_job(index: jax.Array, count: jax.Array) -> jax.Array:
        job = read_job(shape, inputs, index)

        def run_round(nth: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            count, weighted = carry
            slot = lax.rem(count, jnp.int32(shape.stages))
            plgpu.barrier_wait(buffers.k_full.at[slot])
            values = _widened(buffers, slot, rest).at[:, half]
            if buffers.wide_full is not None:
                plgpu.barrier_arrive(buffers.wide_full)
            decay = gain_of_turn(lambda: None)
            _clear_unseen(shape, job, nth * shape.kv_tile, values)
            plgpu.commit_smem()
            weighted = _added(shape, weighted, decay, buffers.p, values)
            plgpu.barrier_arrive(buffers.p_free)
            if buffers.wide is None:
                plgpu.barrier_arrive(buffers.k_free.at[slot])
            return count + 1, weighted

        nothing = filled((HEADS, shape.width // 2), 0.0)
        count, weighted = lax.fori_loop(job.begin, job.end, run_round, (count, nothing))
        gain = gain_of_turn(lambda: plgpu.barrier_arrive(buffers.p_free))
        group = lax.axis_index("kv_head")
        store(out.at[group, index, :, half], weighted * _across(gain, weighted))
        return count

    lax.fori_loop(first, last, run_job, jnp.int32(0))


def _widened(buffers: Buffers, slot: jax.Array, columns: Any) -> Any:
    """Return a tile that has come; of one of fp8 these columns are widened, and its place free."""
    tile, wide = buffers.k.at[slot], buffers.wide
    if wide is None:
        return tile
    for column in range(columns.start, columns.start + columns.size, COLUMNS):
        part = slice(None), pl.ds(column, COLUMNS)
        narrow = plgpu.load(tile.at[part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        wide[part] = narrow.astype(wide.dtype)
    plgpu.commit_smem()  # before the next copy into the tile, and before the product
    plgpu.barrier_arrive(buffers.k_free.at[slot])
    return wide


def _added(shape: Shape, old: jax.Array, decay: jax.Array, p: Any, values: Any) -> jax.Array:
    """Return sums that decay with products added, in the accumulator: no room is for both.

    The interpreter starts it at zero.
    """
    decayed = old * _across(decay, old)

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, p, values)
        plgpu.wgmma_wait(0)

    if not shape.options.interpret:
        added: Any = pl.run_state(multiply)(Accumulator.init(decayed))
        return added

    def from_zero(accumulator: Any) -> jax.Array:
        multiply(accumulator)
        return accumulator[...]

    return decayed + pl.run_scoped(from_zero, Accumulator((HEADS, old.shape[1]), jnp.float32))


def _across(x: jax.Array, tile: jax.Array) -> jax.Array:
    """Repeat a number of each head along the rows of a tile."""
    return lax.broadcast_in_dim(x, tile.shape, [0])


def _logits(shape: Shape, scores: jax.Array, k_scale: float | jax.Array) -> jax.Array:
    """Return logits in base 2; with a soft cap as in `decode_compute`."""
    options = shape.options
    if options.soft_cap is None:
        return scores * (k_scale * (options.scale * LOG2_E))
    growth = jnp.exp2(scores * (k_scale * (2 * options.scale * LOG2_E / options.soft_cap)))
    return (1.0 - 2.0 / (1.0 + growth)) * (options.soft_cap * LOG2_E)


def _seen(shape: Shape, job: Job, begin: jax.Array, size: tuple[int, int], axis: int) -> jax.Array:
    """Whether the row sees each token of the round at `begin`, which run along `axis`."""
    positions = plgpu.broadcasted_iota(jnp.int32, size, axis, layout=WGMMA) + begin
    seen = positions < job.length
    return seen if shape.options.window is None else seen & (positions >= job.low)


def _has_unseen(shape: Shape, job: Job, begin: jax.Array) -> jax.Array:
    return (begin < job.low) | (begin + shape.kv_tile > job.length)


def _hidden(shape: Shape, job: Job, begin: jax.Array, logits: jax.Array) -> jax.Array:
    """Make logits of tokens that the row does not see too low to weigh: a branch, most see all."""
    return lax.cond(
        _has_unseen(shape, job, begin),
        lambda x: jnp.where(_seen(shape, job, begin, x.shape, 1), x, LOWEST),
        lambda x: x,
        logits,
    )


def _clear_unseen(shape: Shape, job: Job, begin: jax.Array, values: Any) -> None:
    """Make zeros of values without weight: they may be NaN. Only the ends of contexts have any."""

    @pl.when(_has_unseen(shape, job, begin))
    def _() -> None:
        seen = _seen(shape, job, begin, (shape.kv_tile, COLUMNS), 0)
        for column in range(0, values.shape[1], COLUMNS):
            columns = slice(None), pl.ds(column, COLUMNS)
            part = plgpu.load(values.at[columns], layout=WGMMA)
            values[columns] = jnp.where(seen, part, jnp.zeros_like(part))
