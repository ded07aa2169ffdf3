"""The gated MLPs of a device's experts as an XLA loop: as many products as there are tiles.

`jax.lax.ragged_dot` is not used: XLA makes a dense product with all experts of it, on CPUs and on
GPUs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_work import ExpertWeights, Routed, divide_rows
from shiftjax.arch.config import Activation
from shiftjax.models.expert_lora import Adapted
from shiftjax.models.four_bits import is_packed
from shiftjax.models.products import Matrix, gate_with, project_out

TILE_ROWS = 16  # pairs that are multiplied together, all of one expert


def tile_loop(
    x: Float[Array, "tokens hidden"],
    weights: ExpertWeights,
    routed: Routed,
    gains: Float[Array, "tokens k"],
    activation: Activation = "silu",
    adapted: Adapted | None = None,
) -> Float[Array, "tokens k hidden"]:
    """Return every own pair's gated MLP times its gain; other pairs are unspecified.

    A loop over tiles of rows, each of one expert: as many as there are, known in the step alone.
    `adapted` is what adapters change of experts.
    """
    k, num_pairs, flat_gains = gains.shape[1], gains.size, gains.reshape(-1)
    tiles = divide_rows(routed.sizes, num_pairs, TILE_ROWS)

    def add_tile(tile: Int[Array, ""], out: Float[Array, "pairs hidden"]) -> jax.Array:
        nth = jnp.arange(TILE_ROWS)
        is_own = nth < tiles.rows[tile]
        pair = routed.row[jnp.where(is_own, tiles.first[tile] + nth, 0)]
        token, expert = pair // k, tiles.expert[tile]
        more = None
        if adapted is not None:
            more = functools.partial(adapted.added, expert=expert, slot=adapted.slot[token])
        part = _gated_mlp(x[token], weights, expert, activation, more)
        part = part * flat_gains[pair][:, None]
        return out.at[jnp.where(is_own, pair, num_pairs)].set(part.astype(x.dtype), mode="drop")

    out = jnp.zeros((num_pairs, x.shape[1]), x.dtype)
    return jax.lax.fori_loop(0, tiles.num_tiles, add_tile, out).reshape(*gains.shape, -1)


def _gated_mlp(
    x: Float[Array, "rows hidden"],
    weights: ExpertWeights,
    expert: Int[Array, ""],
    activation: Activation,
    more: Callable[..., jax.Array] | None,
) -> Float[Array, "rows hidden"]:
    """One expert's down(silu(gate x) * up x), float32, with its biases and activation.

    `more` is added to the product of an input with the matrix of a name.
    """

    def multiply(x: jax.Array, name: str) -> jax.Array:
        values = getattr(weights, name)[expert]
        parts = (getattr(weights, f"{name}{suffix}") for suffix in ("_scale", "_zero"))
        scale, zero = (None if each is None else each[expert] for each in parts)
        if is_packed(values):  # `[groups, out]` to `[out, groups]`, as of a column-parallel matrix
            scale, zero = (None if each is None else each.T for each in (scale, zero))
        out = project_out(x, Matrix(values, scale, zero=zero))
        out = out if more is None else out + more(x, name)
        bias = getattr(weights, f"{name}_bias")
        return out if bias is None else out + bias[expert][None]

    inner = gate_with(activation, multiply(x, "gate"), multiply(x, "up"))
    return multiply(inner, "down").astype(jnp.float32)
