"""The compute warpgroups of the prefill kernel: multiply, and keep an online softmax."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import LOG2_E, LOWEST, WGMMA, Accumulator, filled, store
from pallas_kernels.prefill_terms import (
    Kernel,
    Piece,
    Problem,
    Share,
    Shared,
    for_each_head,
    read_piece,
    read_share,
)
from pallas_kernels.prefill_work import WARPGROUP_ROWS as ROWS


class Softmax(NamedTuple):
    """An online softmax under way: the output is `weighted / total`."""

    weighted: jax.Array  # [64, head_dim]
    maximum: jax.Array  # [64] of the logits, times log2(e)
    total: jax.Array  # [64]


class Place(NamedTuple):
    """Where a compute warpgroup is."""

    warpgroup: jax.Array
    share: Share
    last: jax.Array  # one past the last round of the block: the other warpgroup's may be later
    offset: jax.Array  # from a round to the step of this block, hence to its stage


def compute_piece(
    kernel: Kernel, warpgroup: jax.Array, turn: jax.Array, step: jax.Array
) -> jax.Array:
    """Compute a warpgroup's share of a piece of work; `step` counts rounds and is returned."""
    problem, inputs, _, shared = kernel
    piece = read_piece(problem, inputs, turn)
    share = read_share(problem, piece, warpgroup)
    take_queries(shared, warpgroup)
    place = Place(warpgroup, share, piece.last, offset=step - piece.first)
    logit_scale = problem.options.scale * inputs.k_scale[piece.head]

    def body(j, state):
        return run_round(problem, shared, place, logit_scale, j, state)

    def skip(j, _):
        skip_round(problem, shared, place, j)

    await_keys(problem, shared, place, piece.first)
    pl.when(warpgroup == 1)(lambda: take_turn(problem, shared))
    state = lax.fori_loop(share.first, share.last, body, empty(problem))
    lax.fori_loop(share.last, piece.last, skip, None)
    pl.when(warpgroup == 0)(lambda: take_turn(problem, shared))
    total = jnp.where(state.total > 0, state.total, 1.0)
    gain = lax.broadcast_in_dim(inputs.v_scale[piece.head] / total, state.weighted.shape, [0])
    put_out(kernel, piece, place, state.weighted * gain)
    return step + piece.last - piece.first


def note_row_tokens(problem: Problem, shared: Shared, warpgroup: jax.Array) -> None:
    """Write down which token a row belongs to: kept in registers, it would make others spill."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1))
    shared.row_token.at[warpgroup][...] = lax.rem(row, jnp.full_like(row, problem.n))


def take_queries(shared: Shared, warpgroup: jax.Array) -> None:
    """Bring the queries that have come into the layout that wgmma wants."""
    plgpu.barrier_wait(shared.q_ready.at[warpgroup])
    rows = plgpu.load(shared.q_in.at[warpgroup], layout=WGMMA, optimized=False)
    shared.q.at[warpgroup][...] = rows
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.q_free.at[warpgroup])


def empty(problem: Problem) -> Softmax:
    """Return the softmax of no keys."""
    row = WGMMA.reduce(1)
    weighted = filled((ROWS, problem.head_dim), 0.0)
    return Softmax(weighted, filled((ROWS,), LOWEST, row), filled((ROWS,), 0.0, row))


def take_turn(problem: Problem, shared: Shared) -> None:
    """Wait for the other compute warpgroup to come to its own `take_turn`."""
    if problem.config.ping_pong:
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)


def slot_of(problem: Problem, place: Place, j: jax.Array) -> jax.Array:
    """Return the stage of round j."""
    return lax.rem(j + place.offset, jnp.int32(problem.config.stages))


def await_keys(problem: Problem, shared: Shared, place: Place, j: jax.Array) -> None:
    """Wait for the keys of round j, if there is one."""
    ready = shared.k_ready.at[slot_of(problem, place, j)]
    pl.when(j < place.last)(lambda: plgpu.barrier_wait(ready))


def run_round(
    problem: Problem,
    shared: Shared,
    place: Place,
    logit_scale: jax.Array,
    j: jax.Array,
    state: Softmax,
) -> Softmax:
    """Take the keys of round j, which have come, and its values into the softmax."""
    slot, shape = slot_of(problem, place, j), (ROWS, problem.kv_tile)

    def multiply(accumulator):
        keys = shared.k.at[slot].transpose((1, 0))
        plgpu.wgmma(accumulator, shared.q.at[place.warpgroup], keys)
        take_turn(problem, shared)
        return accumulator[...]

    logits = pl.run_scoped(multiply, Accumulator(shape, jnp.float32))
    plgpu.barrier_arrive(shared.k_free.at[slot])
    logits, factor = cap(problem, logits, logit_scale)
    logits = hide_unseen(problem, shared, place, j, logits)
    maximum = jnp.maximum(state.maximum, logits.max(axis=1) * factor)
    decay = jnp.exp2(state.maximum - maximum)
    p = jnp.exp2(logits * factor - lax.broadcast_in_dim(maximum, shape, [0]))
    total = state.total * decay + p.sum(axis=1)
    weighted = state.weighted * lax.broadcast_in_dim(decay, state.weighted.shape, [0])
    p = p.astype(problem.dtype)
    if problem.interpreted:
        p = in_shared_memory(shared, place, p)
    take_turn(problem, shared)
    plgpu.barrier_wait(shared.v_ready.at[slot])

    def weigh(accumulator):
        plgpu.wgmma(accumulator, p, shared.v.at[slot])
        await_keys(problem, shared, place, j + 1)

    weighted = multiplied(problem, weigh, weighted)
    plgpu.barrier_arrive(shared.v_free.at[slot])
    return Softmax(weighted, maximum, total)


def multiplied(problem: Problem, multiply: Callable[[Any], None], start: jax.Array) -> jax.Array:
    """Return an accumulator that held `start` before it went through `multiply`."""

    def from_zero(accumulator):
        multiply(accumulator)
        return accumulator[...]

    if problem.interpreted:
        return start + pl.run_scoped(
            from_zero, Accumulator((start.shape[0], start.shape[1]), jnp.float32)
        )
    accumulated: Any = pl.run_state(multiply)(Accumulator.init(start))
    return accumulated


def in_shared_memory(shared: Shared, place: Place, p: jax.Array) -> Any:
    """Put the weights where the interpreter's multiplication looks for them."""
    shared.p.at[place.warpgroup][...] = p
    plgpu.commit_smem()
    return shared.p.at[place.warpgroup]


def skip_round(problem: Problem, shared: Shared, place: Place, j: jax.Array) -> None:
    """Give back a stage of which this warpgroup sees nothing, and keep the turns.

    It waits all the same: a barrier tells two phases apart, not three.
    """
    slot = slot_of(problem, place, j)
    plgpu.barrier_arrive(shared.k_free.at[slot])
    take_turn(problem, shared)
    plgpu.barrier_wait(shared.v_ready.at[slot])
    plgpu.barrier_arrive(shared.v_free.at[slot])
    await_keys(problem, shared, place, j + 1)
    take_turn(problem, shared)


def cap(problem: Problem, products: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (x, c) so that x * c are the logits, times log2(e)."""
    soft_cap = problem.options.soft_cap
    if soft_cap is None:
        return products, scale * LOG2_E
    return jnp.tanh(products * (scale / soft_cap)), jnp.float32(soft_cap * LOG2_E)


def hide_unseen(
    problem: Problem, shared: Shared, place: Place, j: jax.Array, logits: jax.Array
) -> jax.Array:
    """Make logits of keys that a row does not see too low to weigh: a branch, as most see all."""
    return lax.cond(
        (j < place.share.low) | (j >= place.share.high),
        lambda x: jnp.where(seen(problem, shared, place, j), x, LOWEST),
        lambda x: x,
        logits,
    )


def seen(problem: Problem, shared: Shared, place: Place, j: jax.Array) -> jax.Array:
    """Return which keys of round j the tokens of the rows see, [64, kv_tile]."""
    shape = (ROWS, problem.kv_tile)
    token = plgpu.load(shared.row_token.at[place.warpgroup], layout=WGMMA.reduce(1))
    share = place.share
    last = token + (share.position + share.start - share.begin)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + j * problem.kv_tile
    is_past = key <= lax.broadcast_in_dim(last, shape, [0])
    window = problem.options.sliding_window
    if window is None:
        return is_past
    return is_past & (key > lax.broadcast_in_dim(last - window, shape, [0]))


def put_out(kernel: Kernel, piece: Piece, place: Place, rows: jax.Array) -> None:
    """Write the rows of the tokens that are owned: all at once, or one by one."""
    problem, out, shared = kernel.problem, kernel.out, kernel.shared
    share, stage, n = place.share, shared.out.at[place.warpgroup], problem.n
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the rows of the piece before
    if n % 8:  # copies of n rows cannot be from tiles of 8
        store(stage, rows.astype(problem.out_dtype))
    else:
        stage[...] = rows.astype(problem.out_dtype)
    plgpu.commit_smem()

    def copy(token, count):
        def copy_head(g):
            source = stage.at[pl.ds(g * n + token - share.start, count)]
            head = piece.head * problem.q_per_kv + g
            plgpu.copy_smem_to_gmem(source, out.at[pl.ds(token, count), head])

        for_each_head(problem, piece, copy_head)

    whole = share.end - share.begin == n
    pl.when(whole)(lambda: copy(share.start, n))

    @pl.when(~whole)
    def _():
        lax.fori_loop(share.begin, share.end, lambda token, _: copy(token, 1), None)
