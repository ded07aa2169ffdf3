"""What products are given: activations, matrices, and what is added to what matrices give."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Codes and scales of activations, `[tokens, in]` and `[blocks, tokens]`; numbers have no scales.
Coded = tuple[jax.Array, jax.Array | None]


class LowRank(NamedTuple):
    """What a factor adds to a product, of inputs that another one has made few already."""

    inner: Float[Array, "tokens all_width"]  # of all matrices that read one input, joined
    first: int  # of which this matrix's own columns begin here
    factor: Float[Array, "out width"]  # row-parallel `[width, out]`
    turned: bool = False  # it is row-parallel

    @property
    def width(self) -> int:
        """How many columns are its own."""
        return self.factor.shape[0 if self.turned else 1]

    @property
    def own(self) -> Float[Array, "tokens width"]:
        """Its own columns."""
        return self.inner[:, self.first : self.first + self.width]


class Operand(NamedTuple):
    """A matrix as kernels take it: as `products.Matrix`; row-parallel numbers are in blocks."""

    values: Array
    scale: Array | None = None
    added: LowRank | None = None


class Groups(NamedTuple):
    """Channels in groups that come again and again: a token keeps its own, and zeros of others."""

    num: int
    channels: int  # of a group
    own: Int[Array, " tokens"]  # each token's; one that there is not: it keeps nothing


def plus(out: Float[Array, "tokens out"], added: LowRank | None) -> Float[Array, "tokens out"]:
    """Return a product with what is added to it, in its type."""
    if added is None:
        return out
    product = "tc,co->to" if added.turned else "tc,oc->to"
    dtype = out.dtype
    return out + jnp.einsum(product, added.own, added.factor, preferred_element_type=dtype)


def joined_inner(operands: tuple[Operand, ...]) -> Float[Array, "tokens matrices_width"] | None:
    """Return the inputs of the factors of all matrices, side by side; None: no factor adds."""
    added = [operand.added for operand in operands if operand.added is not None]
    if not added:
        return None
    ends = [one.first for one in added[1:]] + [added[0].inner.shape[1]]
    firsts = [one.first + one.width for one in added]
    if added[0].first == 0 and firsts == ends and all(o.inner is added[0].inner for o in added):
        return added[0].inner
    return jnp.concatenate([one.own for one in added], axis=1)


def kept(
    values: Float[Array, "tokens groups_channels"], groups: Groups
) -> Float[Array, "tokens groups_channels"]:
    """Return zeros for channels of groups that are not a token's, whatever those hold."""
    group = jnp.arange(values.shape[1]) // groups.channels % groups.num
    return jnp.where(groups.own[:, None] == group[None], values, 0)
