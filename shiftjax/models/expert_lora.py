"""What adapters add to experts: in the loop over tiles of pairs, of each pair that of its slot."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shiftjax.models.operands import Groups, kept


class Adapted(NamedTuple):
    """The factors of the experts that a device has, and the slots of tokens."""

    slot: Int[Array, " tokens"]  # of the tokens whose pairs are multiplied
    gate_a: Float[Array, "experts slots rank hidden"]
    gate_b: Float[Array, "experts width slots rank"]
    up_a: Float[Array, "experts slots rank hidden"]
    up_b: Float[Array, "experts width slots rank"]
    down_a: Float[Array, "experts slots rank width"]
    down_b: Float[Array, "experts hidden slots rank"]

    def added(
        self,
        x: Float[Array, "rows in"],
        name: str,
        expert: Int[Array, ""],
        slot: Int[Array, " rows"],
    ) -> Float[Array, "rows out"]:
        """Return what is added to an expert's product with the matrix `name`."""
        a, b = (getattr(self, f"{name}_{which}")[expert] for which in "ab")
        _, num, rank = b.shape
        inner = jnp.einsum("ti,ci->tc", x, a.reshape(num * rank, -1))
        inner = kept(inner, Groups(num, rank, slot))
        return jnp.einsum("tc,oc->to", inner, b.reshape(-1, num * rank))

    @property
    def num_slots(self) -> int:
        """Slots of a device."""
        return self.gate_a.shape[1]

    def in_one(self, expert: Any, slot: Any) -> Any:
        """Return experts and slots as one number each, as pairs are sent."""
        return expert * (self.num_slots + 1) + slot + 1

    def apart(self, both: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Undo it."""
        return both // (self.num_slots + 1), both % (self.num_slots + 1) - 1
