"""Rounds of the prefill kernel with the next product under way while a softmax is computed.

The intra-warpgroup overlap of FlashAttention-3 (Shah et al., arXiv 2407.08608, section 3.2): the
logits of a round are multiplied together with the values of the round before, and the softmax
begins when the first of the two products is there.

    products   S0      | S1  P0 V0 | S2  P1 V1 |      P2 V2
    softmax       p0   |     p1    |     p2    |
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import Accumulator, filled
from pallas_kernels.prefill_softmax import (
    Place,
    Softmax,
    await_keys,
    begin_logits,
    empty,
    first_products,
    in_shared_memory,
    multiplied,
    slot_of,
    take_turn,
    weights,
)
from pallas_kernels.prefill_terms import Problem, Shared
from pallas_kernels.prefill_work import WARPGROUP_ROWS as ROWS

Ahead = tuple[Softmax, jax.Array]  # sums with the weights of the last round, and these weights


def run_overlapped(
    problem: Problem,
    shared: Shared,
    place: Place,
    logit_scale: jax.Array,
    sinks: jax.Array | None,
) -> Softmax:
    """Take the rounds of this warpgroup into a softmax; the keys of the first have come."""
    share = place.share
    some = share.first < share.last

    def begin() -> Ahead:
        start = empty(problem, sinks)
        logits = first_products(problem, shared, place, share.first)
        p, _, maximum, total = weights(
            problem, shared, place, logit_scale, share.first, logits, start
        )
        await_keys(problem, shared, place, share.first + 1)
        take_turn(problem, shared)
        return Softmax(start.weighted, maximum, total), p.astype(problem.dtype)

    def nothing() -> Ahead:
        p = filled((ROWS, problem.kv_tile), 0.0).astype(problem.dtype)
        return empty(problem, sinks), p

    def body(j: jax.Array, ahead: Ahead) -> Ahead:
        return run_round(problem, shared, place, logit_scale, j, ahead)

    def end(ahead: Ahead) -> Softmax:
        state, p = ahead
        slot = slot_of(problem, place, share.last - 1)
        plgpu.barrier_wait(shared.v_ready.at[slot])
        p = in_shared_memory(shared, place, p) if problem.interpreted else p

        def weigh(accumulator):
            plgpu.wgmma(accumulator, p, shared.v.at[slot])

        weighted = multiplied(problem, weigh, state.weighted)
        plgpu.barrier_arrive(shared.v_free.at[slot])
        return state._replace(weighted=weighted)

    ahead = lax.cond(some, begin, nothing)
    ahead = lax.fori_loop(share.first + 1, share.last, body, ahead)
    return lax.cond(some, end, lambda ahead: ahead[0], ahead)


def run_round(
    problem: Problem,
    shared: Shared,
    place: Place,
    logit_scale: jax.Array,
    j: jax.Array,
    ahead: Ahead,
) -> Ahead:
    """Multiply the keys of round j and the values of the round before; then the softmax of j."""
    state, p = ahead
    slot, before = slot_of(problem, place, j), slot_of(problem, place, j - 1)
    p = in_shared_memory(shared, place, p) if problem.interpreted else lax.optimization_barrier(p)

    def multiply(logits, weighted):
        if not problem.interpreted:
            weighted[...] = state.weighted
        begin_logits(problem, shared, place, j, logits)
        plgpu.barrier_wait(shared.v_ready.at[before])
        plgpu.wgmma(weighted, p, shared.v.at[before])
        take_turn(problem, shared)
        products = plgpu.wgmma_accumulator_load(logits, wait_n=1)
        plgpu.barrier_arrive(shared.k_free.at[slot])
        new = weights(problem, shared, place, logit_scale, j, products, state)
        await_keys(problem, shared, place, j + 1)
        return new, weighted[...]

    (p, decay, maximum, total), weighted = pl.run_scoped(
        multiply,
        Accumulator((ROWS, problem.kv_tile), jnp.float32),
        Accumulator((ROWS, problem.head_dim), jnp.float32),
    )
    plgpu.barrier_arrive(shared.v_free.at[before])
    if problem.interpreted:
        weighted = state.weighted + weighted
    take_turn(problem, shared)
    weighted = weighted * lax.broadcast_in_dim(decay, weighted.shape, [0])
    # Now that the product before has read the last weights: they take the same registers.
    return Softmax(weighted, maximum, total), p.astype(problem.dtype)
