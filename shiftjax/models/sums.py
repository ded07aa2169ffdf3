"""How partial products are summed over devices: the rows of `arch/numerics.py`, as JAX.

Of strict numerics a device adds up its own leaves, which are a subtree; what is exchanged are the
upper levels:

    leaves (float32)      l0  l1  l2  l3  l4  l5  l6  l7
    one binary tree         \\/      \\/      \\/      \\/
                               \\  /            \\  /
                                   \\          /
    rounded once                     bfloat16

Bytes sent and received by a device of `ways`, of a number of 2 bytes (an all-reduce of such: 4):
`float32` 8, `invariant` 4 + 2, `integer` 8 and a float32 for each token.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

Part = Float[Array, "tokens width"]


class Ways(NamedTuple):
    """The devices that split a weight."""

    axes: tuple[str, ...]
    num: int
    num_leaves: int  # of all of them, a power of two where numerics are strict


def tree_sum(parts: Sequence[Float[Array, "..."]]) -> Float[Array, "..."]:
    """Sum neighbours, then neighbouring sums; there is a power of two of them."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _sum_at_once(part: Part, ways: Ways, dtype: DTypeLike) -> Part:
    return (part if ways.num == 1 else jax.lax.psum(part, ways.axes)).astype(dtype)


def _sum_in_tree(part: Part, ways: Ways, dtype: DTypeLike) -> Part:
    """Sum float32 parts in one binary tree; each device some rows, which all then gather."""
    if ways.num == 1:
        return part.astype(dtype)
    rows, width = part.shape
    sent = jnp.pad(part, ((0, -rows % ways.num), (0, 0))).reshape(ways.num, -1, width)
    got = jax.lax.all_to_all(sent, ways.axes, split_axis=0, concat_axis=0)
    return jax.lax.all_gather(tree_sum(list(got)).astype(dtype), ways.axes, tiled=True)[:rows]


class Units(NamedTuple):
    """Of fixed-point numbers, for each token a power of two."""

    exponent: Int32[Array, " tokens"]
    is_finite: Bool[Array, " tokens"]


def largest_of(leaves: Float[Array, "leaves tokens width"]) -> Float[Array, " tokens"]:
    """Return the largest size of a token's numbers; infinite where one is not finite."""
    return jnp.max(jnp.where(jnp.isnan(leaves), jnp.inf, jnp.abs(leaves)), axis=(0, 2))


def units_for(largest: Float[Array, " tokens"], num_leaves: int) -> Units:
    """Return units so small that so many leaves of the largest size do not overflow: 30 bits."""
    bits, is_finite = 30 - (num_leaves - 1).bit_length(), largest < jnp.inf
    _, exponent = jnp.frexp(jnp.where(is_finite, largest, 1))
    return Units(jnp.maximum(exponent - bits, -120), is_finite)


def in_units(
    leaves: Float[Array, "leaves tokens width"], units: Units
) -> Int32[Array, "tokens width"]:
    """Return the sum of leaves, each of which is rounded to whole units."""
    counts = jnp.rint(jnp.ldexp(leaves, -units.exponent[None, :, None]))
    return jnp.sum(counts.astype(jnp.int32), axis=0)


def of_units(total: Int32[Array, "tokens width"], units: Units) -> Part:
    """Undo it, in float32; NaN for what is not finite."""
    wide = jnp.ldexp(total.astype(jnp.float32), units.exponent[:, None])
    return jnp.where(units.is_finite[:, None], wide, jnp.nan)


def _sum_as_integers(
    leaves: Float[Array, "leaves tokens width"], ways: Ways, dtype: DTypeLike
) -> Part:
    """Sum leaves as fixed-point numbers, which no order changes: any all-reduce will do."""
    largest = largest_of(leaves)
    largest = largest if ways.num == 1 else jax.lax.pmax(largest, ways.axes)
    units = units_for(largest, ways.num_leaves)
    total = in_units(leaves, units)
    total = total if ways.num == 1 else jax.lax.psum(total, ways.axes)
    return of_units(total, units).astype(dtype)


class Sum(NamedTuple):
    """What a device keeps of its leaves, and how all devices' are summed."""

    own: Callable[[Sequence[Part]], Float[Array, "..."]]
    over: Callable[[Any, Ways, DTypeLike], Part]  # rounds to a type


AT_ONCE = Sum(lambda leaves: leaves[0], _sum_at_once)
SUMS: Mapping[str, Sum] = MappingProxyType(
    {
        "fast": AT_ONCE,
        "float32": AT_ONCE,
        "invariant": Sum(tree_sum, _sum_in_tree),
        "integer": Sum(jnp.stack, _sum_as_integers),
    }
)
