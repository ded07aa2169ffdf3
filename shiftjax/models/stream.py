"""The residual stream between the parts of layers, and what they add to it.

A part gives what this device adds, before the sum over devices. The sum and the addition belong to
the norm that reads the stream next (`layers.add_norm`), so that one launch can do all three: the
pair of a stream and what is still to be added goes from layer to layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# Sums what the devices that split a weight have, and rounds to a type: `Parallel.sum`.
Reduce = Callable[[jax.Array, DTypeLike], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Addend:
    """What a part of a layer adds to the stream."""

    values: Float[Array, "*leaves tokens hidden"]  # of leaves: `sums.py`
    bias: Float[Array, " hidden"] | None = None  # of the sum; None: none
    is_partial: bool = field(default=False, metadata={"static": True})  # to be summed over devices
    # Of the sum, and of the stream; None: that of the values.
    dtype: DTypeLike | None = field(default=None, metadata={"static": True})

    def summed(self, reduce: Reduce) -> Float[Array, "tokens hidden"]:
        """Return the sum over devices, without its bias."""
        dtype = self.values.dtype if self.dtype is None else self.dtype
        return reduce(self.values, dtype) if self.is_partial else self.values

    def whole(self, reduce: Reduce) -> Float[Array, "tokens hidden"]:
        """Return the sum over devices, with its bias."""
        values = self.summed(reduce)
        return values if self.bias is None else values + self.bias[None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stream:
    """The residual stream `x`, and what is still to be added to it; None: nothing.

    `before` are partial sums that other devices may still read, where a switch adds them up
    (`sum_backend.py`): their memory is kept until the next such sum.
    """

    x: Float[Array, "tokens hidden"]
    addend: Addend | None = None
    before: Float[Array, "tokens hidden"] | None = None

    def whole(self, reduce: Reduce, scale: float = 1.0) -> Float[Array, "tokens hidden"]:
        """Return the stream with all of it; `scale` times what is added, rounded once."""
        if self.addend is None:
            return self.x
        return self.x + scaled(self.addend.whole(reduce), scale)


def scaled(x: Float[Array, "..."], scale: float) -> Float[Array, "..."]:
    """Multiply by a number that the type of `x` need not have, and round once."""
    return x if scale == 1 else (x.astype(jnp.float32) * scale).astype(x.dtype)
