"""The gated activations of MLPs, in a kernel: what `down` multiplies."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)


class Gate(NamedTuple):
    """What `down` multiplies: g * sigmoid(slope * (g + cubic * g^3)) * u, of gate and up g and u.

    With a limit g is at most that, u is between it and its negative, and 1 is added to u then.
    """

    slope: float = 1.0
    limit: float | None = None
    cubic: float = 0.0


SILU = Gate()
GELU_TANH = Gate(2 * math.sqrt(2 / math.pi), cubic=0.044715)  # 1 + tanh(x) is 2 sigmoid(2x)


def activate(gate: Gate, g: jax.Array, u: jax.Array) -> jax.Array:
    """Return the gated activation of gate and up, float32."""
    if gate.limit is not None:
        g = jnp.minimum(g, gate.limit)
        u = jnp.minimum(jnp.maximum(u, -gate.limit), gate.limit) + 1.0
    inner = g + gate.cubic * (g * g * g) if gate.cubic else g
    return g / (1.0 + jnp.exp2(inner * (-LOG2_E * gate.slope))) * u
