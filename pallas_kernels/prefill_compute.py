"""The compute warpgroups of the prefill kernel: multiply, and keep an online softmax."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WGMMA, scales_of_head, store
from pallas_kernels.prefill_overlap import run_overlapped
from pallas_kernels.prefill_rows import Leaving, put_heads, row_sinks
from pallas_kernels.prefill_softmax import (
    FLOOR,
    Place,
    Softmax,
    await_keys,
    empty,
    first_products,
    in_shared_memory,
    multiplied,
    slot_of,
    take_turn,
    weights,
)
from pallas_kernels.prefill_terms import (
    Kernel,
    Piece,
    Problem,
    Shared,
    read_part,
    read_piece,
    read_share,
)
from pallas_kernels.prefill_work import COMPUTE_WARPGROUPS
from pallas_kernels.prefill_work import WARPGROUP_ROWS as ROWS


def compute_piece(
    kernel: Kernel, warpgroup: jax.Array, turn: jax.Array, step: jax.Array
) -> jax.Array:
    """Compute a warpgroup's share of a piece of work; `step` counts rounds and is returned."""
    problem, inputs, _, shared = kernel
    piece = read_piece(problem, inputs, turn)
    share = read_share(problem, inputs, piece, warpgroup)
    sinks = sinks_of(kernel, piece, turn)
    take_queries(problem, shared, warpgroup)
    place = Place(warpgroup, share, piece.last, offset=step - piece.first)
    k_scale, v_scale = scales_of_head(problem.options.kv_scales, inputs.scales, piece.head)
    logit_scale = jnp.asarray(problem.options.scale * k_scale, jnp.float32)

    def body(j, state):
        return run_round(problem, shared, place, logit_scale, j, state)

    def skip(j, _):
        skip_round(problem, shared, place, j)

    await_keys(problem, shared, place, piece.first)
    pl.when(warpgroup == 1)(lambda: take_turn(problem, shared))
    if problem.config.overlap:
        state = run_overlapped(problem, shared, place, logit_scale, sinks)
    else:
        state = lax.fori_loop(share.first, share.last, body, empty(problem, sinks))
    lax.fori_loop(share.last, piece.last, skip, None)
    pl.when(warpgroup == 0)(lambda: take_turn(problem, shared))
    total = jnp.where(state.total > 0, state.total, 1.0)
    gain = lax.broadcast_in_dim(v_scale / total, state.weighted.shape, [0])
    put_out(kernel, piece, place, turn, state.weighted * gain, state.maximum + jnp.log2(total))
    return step + piece.last - piece.first


def sinks_of(kernel: Kernel, piece: Piece, turn: jax.Array) -> jax.Array | None:
    """Return the sinks that the softmax of a piece begins with, [64]; None: there are none.

    They begin it, since its sums are in registers then anyhow; at the end they would need others.
    Of a part they weigh nothing: its tile has them once, where its parts are combined.
    """
    problem, inputs, outputs, _ = kernel
    if inputs.sinks is None:
        return None
    sinks = row_sinks(problem, inputs.sinks, piece.head, piece.seq)
    if outputs.parts is None:
        return sinks
    return sinks + jnp.where(read_part(problem, inputs, turn) < 0, 0.0, FLOOR)


def note_row_tokens(problem: Problem, shared: Shared, warpgroup: jax.Array) -> None:
    """Write down which token a row belongs to: kept in registers, it would make others spill."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1))
    token = lax.rem(row, jnp.full_like(row, problem.n))
    shared.row_token.at[warpgroup][...] = token.astype(shared.row_token.dtype)


def take_queries(problem: Problem, shared: Shared, warpgroup: jax.Array) -> None:
    """Bring the queries that have come into the layout that wgmma wants."""
    plgpu.barrier_wait(shared.q_ready.at[warpgroup])
    rows = plgpu.load(shared.q_in.at[warpgroup], layout=WGMMA, optimized=False)
    shared.q.at[warpgroup][...] = rows
    plgpu.commit_smem()
    if not problem.out_in_queries:
        plgpu.barrier_arrive(shared.q_free.at[warpgroup])


def run_round(
    problem: Problem,
    shared: Shared,
    place: Place,
    logit_scale: jax.Array,
    j: jax.Array,
    state: Softmax,
) -> Softmax:
    """Take the keys of round j, which have come, and its values into the softmax."""
    slot = slot_of(problem, place, j)
    logits = first_products(problem, shared, place, j)
    p, decay, maximum, total = weights(problem, shared, place, logit_scale, j, logits, state)
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


def put_out(
    kernel: Kernel,
    piece: Piece,
    place: Place,
    turn: jax.Array,
    rows: jax.Array,
    lse: jax.Array,
) -> None:
    """Write the rows of the tokens that are owned; or all rows, as a part of their result."""
    problem, outputs, shared = kernel.problem, kernel.outputs, kernel.shared
    stage = (shared.q_in if problem.out_in_queries else shared.out).at[place.warpgroup]
    units = None if shared.units is None else shared.units.at[place.warpgroup]
    if problem.gives_lse:
        units = shared.row_token.at[COMPUTE_WARPGROUPS + place.warpgroup]
    leaving = Leaving(outputs.out, stage, units, kernel.inputs.fixed)

    def put_whole():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the rows of the piece before
        put_heads(problem, leaving, place.share.rows, piece.head, rows, lse)

    def put_part(part):
        target = part, piece.head, place.warpgroup
        store(outputs.parts.at[target], rows)
        store(outputs.lse.at[target], lse)

    if outputs.parts is None:
        put_whole()
    else:
        part = read_part(problem, kernel.inputs, turn)
        pl.when(part < 0)(put_whole)
        pl.when(part >= 0)(lambda: put_part(part))
    if problem.out_in_queries:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.q_free.at[place.warpgroup])
