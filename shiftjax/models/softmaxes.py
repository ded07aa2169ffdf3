"""Softmaxes under way: what attention knows of a row before it has seen all of its context.

Parts of a context can be taken in any order, by anybody, and put together: the online softmax
(Milakov and Gimelshein, arXiv 1805.02867).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

LOWEST = -1e30  # the maximum over no keys: finite, so that exp(-inf - LOWEST) is 0 and not NaN


class State(NamedTuple):
    """An online softmax under way, float32; the output is `weighted / total`."""

    maximum: Float[Array, "lanes cached rows"]  # largest score so far
    total: Float[Array, "lanes cached rows"]  # sum of exp(score - maximum)
    weighted: Float[Array, "lanes cached rows width"]  # the same sum, each times its value


def of_normalised(
    values: Float[Array, "lanes cached rows width"], lse: Float[Array, "lanes cached rows"]
) -> State:
    """Return what has given such output; `lse` are base-2 logarithms of the sums."""
    # Not a product alone: fused with a difference it keeps more digits than what is subtracted, and
    # of no keys that is an error of 1e22.
    maximum = jnp.maximum(lse * math.log(2), LOWEST)
    return State(maximum, jnp.ones_like(maximum), values)


def joined(parts: State) -> State:
    """Return the softmaxes over several parts of their contexts, which are along a first axis.

    Summed in the order of the parts.
    """
    maximum, total, weighted = parts
    highest = maximum.max(0)
    gain = jnp.exp(maximum - highest[None])
    return State(highest, (gain * total).sum(0), (gain[..., None] * weighted).sum(0))


def both(one: State, other: State) -> State:
    """Return the softmaxes over two parts of their contexts."""
    highest = jnp.maximum(one.maximum, other.maximum)
    gains = [jnp.exp(each.maximum - highest) for each in (one, other)]
    total = gains[0] * one.total + gains[1] * other.total
    wide = [gain[..., None] for gain in gains]
    return State(highest, total, wide[0] * one.weighted + wide[1] * other.weighted)


def with_sinks(state: State, sinks: Float[Array, "cached rows"]) -> State:
    """Return the softmaxes with scores that have no values: -inf changes nothing."""
    maximum = jnp.maximum(state.maximum, sinks[None])
    decay = jnp.exp(state.maximum - maximum)
    total = state.total * decay + jnp.exp(sinks[None] - maximum)
    return State(maximum, total, state.weighted * decay[..., None])


def share_of(
    part: State,
    maximum: Float[Array, "parts lanes cached rows"],
    total: Float[Array, "parts lanes cached rows"],
) -> Float[Array, "lanes cached rows width"]:
    """Return what one part adds to the output, by the normalisers of all; zeros without keys."""
    highest = maximum.max(0)
    whole = (jnp.exp(maximum - highest[None]) * total).sum(0)
    gain = jnp.exp(part.maximum - highest) / jnp.where(whole == 0, 1.0, whole)
    return part.weighted * gain[..., None]


def normalised(
    state: State, sinks: Float[Array, "cached rows"] | None
) -> Float[Array, "lanes cached rows width"]:
    """Return the output of a softmax; zeros where no key was seen.

    `sinks` are scores without values, which only now take part: once, in however many parts a
    context was taken.
    """
    if sinks is None:
        return state.weighted / jnp.where(state.total == 0, 1.0, state.total)[..., None]
    maximum = jnp.maximum(state.maximum, sinks[None])
    decay = jnp.exp(state.maximum - maximum)
    total = state.total * decay + jnp.exp(sinks[None] - maximum)
    return state.weighted * (decay / total)[..., None]


def sinks_by_row(
    sinks: Float[Array, " heads"] | None, cached: int, times: int = 1
) -> Float[Array, "cached rows"] | None:
    """Return the sinks of the rows of a state, which has each head so many times."""
    if sinks is None:
        return None
    return jnp.tile(sinks.astype(jnp.float32).reshape(cached, -1), (1, times))
