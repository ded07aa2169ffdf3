"""Layers of experts: which tokens go to which, and the experts that one device has.

A token's router logits are float32, computed on every device that has the token: what they choose
depends on the token alone. The pairs of a token and an expert that a device has are sorted by
expert, so that each expert multiplies rows that lie together, and no product is made with an expert
that no token has chosen. `jax.lax.ragged_dot` is not used: XLA makes a dense product with all
experts of it, on CPUs and on GPUs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.grouped_work import ExpertWeights, Routed, divide_rows
from shiftjax.arch.config import Experts
from shiftjax.models.products import Matrix, project_out

TILE_ROWS = 16  # pairs that are multiplied together, all of one expert


def route(
    x: Float[Array, "tokens hidden"], router: Float[Array, "experts hidden"], experts: Experts
) -> tuple[Float[Array, "tokens k"], Int32[Array, "tokens k"]]:
    """Return every token's experts and their weights, float32; see `arch.config.Experts`."""
    logits = jnp.einsum(
        "th,eh->te",
        x,
        router,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    largest, chosen = jax.lax.top_k(logits, experts.per_token)
    if experts.norm_topk:
        return jax.nn.softmax(largest, axis=-1), chosen
    return jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), chosen, axis=-1), chosen


def own_experts(
    x: Float[Array, "tokens hidden"],
    weights: ExpertWeights,
    gains: Float[Array, "tokens k"],
    chosen: Int32[Array, "tokens k"],
    first: Int[Array, ""],
    num_tokens: Int[Array, ""],
) -> Float[Array, "tokens hidden"]:
    """Return what the experts of this device, `first` and those after it, add to every token.

    The first `num_tokens` tokens are real; padding chooses no expert, so that none is read for it.
    """
    num = weights.gate.shape[0]
    is_real = jnp.arange(x.shape[0]) < num_tokens
    is_own = (chosen >= first) & (chosen < first + num) & is_real[:, None]
    routed = sort_pairs(jnp.where(is_own, chosen - first, num), num)
    parts = tile_loop(x, weights, routed, gains).astype(jnp.float32)
    return jnp.where(is_own[..., None], parts, 0).sum(axis=1).astype(x.dtype)


def sort_pairs(expert: Int[Array, "tokens k"], num_experts: int) -> Routed:
    """Sort pairs by this device's experts, `num_experts` standing for one that it has not."""
    flat = expert.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.bincount(flat, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    return Routed(order, sizes)


def tile_loop(
    x: Float[Array, "tokens hidden"],
    weights: ExpertWeights,
    routed: Routed,
    gains: Float[Array, "tokens k"],
) -> Float[Array, "tokens k hidden"]:
    """Return every own pair's gated MLP times its gain; other pairs are unspecified.

    A loop over tiles of rows, each of one expert: as many as there are, known in the step alone.
    """
    k, num_pairs, flat_gains = gains.shape[1], gains.size, gains.reshape(-1)
    tiles = divide_rows(routed.sizes, num_pairs, TILE_ROWS)

    def add_tile(tile: Int[Array, ""], out: Float[Array, "pairs hidden"]) -> jax.Array:
        nth = jnp.arange(TILE_ROWS)
        is_own = nth < tiles.rows[tile]
        pair = routed.row[jnp.where(is_own, tiles.first[tile] + nth, 0)]
        part = _gated_mlp(x[pair // k], weights, tiles.expert[tile]) * flat_gains[pair][:, None]
        return out.at[jnp.where(is_own, pair, num_pairs)].set(part.astype(x.dtype), mode="drop")

    out = jnp.zeros((num_pairs, x.shape[1]), x.dtype)
    return jax.lax.fori_loop(0, tiles.total[0], add_tile, out).reshape(*gains.shape, -1)


def _gated_mlp(
    x: Float[Array, "rows hidden"], weights: ExpertWeights, expert: Int[Array, ""]
) -> Float[Array, "rows hidden"]:
    """One expert's down(silu(gate x) * up x), float32."""

    def multiply(x: jax.Array, values: jax.Array, scale: jax.Array | None) -> jax.Array:
        return project_out(x, Matrix(values[expert], None if scale is None else scale[expert]))

    gate = multiply(x, weights.gate, weights.gate_scale)
    inner = jax.nn.silu(gate) * multiply(x, weights.up, weights.up_scale)
    return multiply(inner, weights.down, weights.down_scale).astype(jnp.float32)
