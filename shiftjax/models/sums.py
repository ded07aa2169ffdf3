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
from jaxtyping import Array, Float

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


def _sum_as_integers(
    leaves: Float[Array, "leaves tokens width"], ways: Ways, dtype: DTypeLike
) -> Part:
    """Sum leaves as fixed-point numbers, which no order changes: any all-reduce will do.

    Units are a power of two for each token, so small that the largest leaf of all devices has 30
    bits less those that the sum of all leaves may need. What is not finite gives NaN.
    """
    largest = jnp.max(jnp.where(jnp.isnan(leaves), jnp.inf, jnp.abs(leaves)), axis=(0, 2))
    largest = largest if ways.num == 1 else jax.lax.pmax(largest, ways.axes)
    is_finite = largest < jnp.inf
    bits = 30 - (ways.num_leaves - 1).bit_length()
    _, exponent = jnp.frexp(jnp.where(is_finite, largest, 1))
    exponent = jnp.maximum(exponent - bits, -120)[:, None]  # of the units
    total = jnp.sum(jnp.rint(jnp.ldexp(leaves, -exponent[None])).astype(jnp.int32), axis=0)
    total = total if ways.num == 1 else jax.lax.psum(total, ways.axes)
    wide = jnp.ldexp(total.astype(jnp.float32), exponent)
    return jnp.where(is_finite[:, None], wide, jnp.nan).astype(dtype)


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
