"""The online softmax of the prefill kernel, and how its compute warpgroups keep step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import LOG2_E, LOWEST, WGMMA, Accumulator, filled, remainder
from pallas_kernels.prefill_terms import Problem, Share, Shared
from pallas_kernels.prefill_work import WARPGROUP_ROWS as ROWS
from pallas_kernels.window import first_seen

# Maxima begin here: below every logit, and so far above LOWEST times any scale that a row gives no
# weight to a round of which it sees nothing. With LOWEST for both, that is 2^(a rounding error).
FLOOR = -1e20


class Softmax(NamedTuple):
    """An online softmax under way: the output is `weighted / total`."""

    weighted: jax.Array  # [64, head_dim]
    maximum: jax.Array  # [64] of the logits, times log2(e)
    total: jax.Array  # [64]


class Place(NamedTuple):
    """The warpgroup, its share of the piece of work, and its offset in the ring of stages."""

    warpgroup: jax.Array
    share: Share
    last: jax.Array  # one past the last round of the block: the other warpgroup's may be later
    offset: jax.Array  # from a round to the step of this block, hence to its stage


def empty(problem: Problem, sinks: jax.Array | None) -> Softmax:
    """Return the softmax of no keys but `sinks` [64], which have no values."""
    row = WGMMA.reduce(1)
    weighted = filled((ROWS, problem.head_dim), 0.0)
    if sinks is not None:
        return Softmax(weighted, sinks, filled((ROWS,), 1.0, row))
    return Softmax(weighted, filled((ROWS,), FLOOR, row), filled((ROWS,), 0.0, row))


def take_turn(problem: Problem, shared: Shared) -> None:
    """Wait for the other compute warpgroup to come to its own `take_turn`."""
    if problem.config.ping_pong:
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)


def slot_of(problem: Problem, place: Place, j: jax.Array) -> jax.Array:
    """Return the stage of round j."""
    return lax.rem(j + place.offset, jnp.int32(problem.stages))


def await_keys(problem: Problem, shared: Shared, place: Place, j: jax.Array) -> None:
    """Wait for the keys of round j, if there is one."""
    ready = shared.k_ready.at[slot_of(problem, place, j)]
    pl.when(j < place.last)(lambda: plgpu.barrier_wait(ready))


def first_products(problem: Problem, shared: Shared, place: Place, j: jax.Array) -> jax.Array:
    """Return the products [64, kv_tile] of the queries and the keys of round j, which have come.

    The turn is taken when they are under way, the stage of the keys given back when they are there.
    """

    def multiply(accumulator):
        begin_logits(problem, shared, place, j, accumulator)
        take_turn(problem, shared)
        return accumulator[...]

    products = pl.run_scoped(multiply, Accumulator((ROWS, problem.kv_tile), jnp.float32))
    plgpu.barrier_arrive(shared.k_free.at[slot_of(problem, place, j)])
    return products


def begin_logits(
    problem: Problem, shared: Shared, place: Place, j: jax.Array, accumulator: Any
) -> None:
    """Begin the product of the queries and the keys of round j, which have come."""
    mine = place.warpgroup
    if problem.head_dim > 192:  # the compiler must not keep where each 16 columns are: it spills
        mine = jnp.minimum(mine, mine + j)
    keys = shared.k.at[slot_of(problem, place, j)].transpose((1, 0))
    plgpu.wgmma(accumulator, shared.q.at[mine], keys)


def weights(
    problem: Problem,
    shared: Shared,
    place: Place,
    logit_scale: jax.Array,
    j: jax.Array,
    logits: jax.Array,
    state: Softmax,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the weights of the values of round j, what the sums so far decay by, and new sums.

    `logits` [64, kv_tile] are the products as they come; the new sums are maxima and totals.
    """
    logits, factor = cap(problem, logits, logit_scale)
    logits = hide_unseen(problem, shared, place, j, logits)
    maximum = jnp.maximum(state.maximum, logits.max(axis=1) * factor)
    decay = jnp.exp2(state.maximum - maximum)
    p = jnp.exp2(logits * factor - lax.broadcast_in_dim(maximum, logits.shape, [0]))
    total = state.total * decay + p.sum(axis=1)
    return p, decay, maximum, total


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


def cap(problem: Problem, products: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (x, c) so that x * c are the logits, times log2(e), but for one constant."""
    soft_cap = problem.options.soft_cap
    if soft_cap is None:
        return products, scale * LOG2_E
    # tanh x = 1 - 2 / (1 + e^2x), as in decode: the chip's own tanh has 11 bits. A softmax is the
    # same without the 1. The square of a root's reciprocal has 21 bits; a division has 23, five
    # times the instructions, and takes registers that spill.
    growth = jnp.exp2(products * (scale * (2 * LOG2_E / soft_cap)))
    root = lax.rsqrt(1.0 + growth)
    return -root * root, jnp.float32(2 * soft_cap * LOG2_E)


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
    token = token.astype(jnp.int32)
    share = place.share
    last = token + (share.position + share.rows.start - share.rows.begin)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + j * problem.kv_tile
    is_past = key <= lax.broadcast_in_dim(last, shape, [0])
    window = problem.options.window
    if window is None:
        return is_past
    first = first_seen(last, window, remainder)
    return is_past & (key >= lax.broadcast_in_dim(first, shape, [0]))
