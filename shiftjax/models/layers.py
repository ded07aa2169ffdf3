"""What decoder layers share: a step's context, norms, rotary embedding, matrix products."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shiftjax.arch.config import ModelConfig, RopeScaling
from shiftjax.models.attention import AttentionMetadata, RowMetadata
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.models.exchange import Parallel


class Rope(NamedTuple):
    """Rotary tables of this device's tokens."""

    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]


class LogitRows(NamedTuple):
    """The tokens of a step whose logits are wanted; the same on every device."""

    tokens: Int[Array, " rows"]  # which of the step's
    positions: Int[Array, " tokens"]  # of all of the step's, in their sequences
    late: RowMetadata | None  # None: no layer computes rows alone


class Context(NamedTuple):
    """What a step's layers have in common, made once; tokens are this device's.

    For layers that compute logit rows alone, tokens are these rows, and `metadata.work` theirs.
    """

    rope: Rope
    metadata: AttentionMetadata
    backend: AttentionBackend
    parallel: Parallel


def look_up(
    table: Float[Array, "rows_split width"], token_ids: Int[Array, " tokens"], axes: tuple[str, ...]
) -> Float[Array, "tokens width"]:
    """Return the rows of this device's part of a table that `axes` split, zeros for all others.

    The sum over the devices of `axes` is what the whole table has.
    """
    local = token_ids - jax.lax.axis_index(axes) * table.shape[0]
    mine = ((local >= 0) & (local < table.shape[0]))[:, None]
    found = table[jnp.clip(local, 0, table.shape[0] - 1)]
    return jnp.where(mine, found, jnp.zeros((), table.dtype))


def rms_norm(
    x: Float[Array, "... width"], weight: Float[Array, " width"], eps: float
) -> Float[Array, "... width"]:
    """Root-mean-square norm (arXiv 1910.07467), in float32, returned in the type of `x`."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    # Rounded before the weight is applied, as the published models were trained.
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> list[float]:
    """Return the head_dim / 2 rotary frequencies in radians per position, scaling applied."""
    exponents = (2 * i / config.head_dim for i in range(config.head_dim // 2))
    frequencies = [config.rope_theta**-e for e in exponents]
    if config.rope_scaling is None:
        return frequencies
    return [_scale_frequency(f, config.rope_scaling) for f in frequencies]


def _scale_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Slow one rotary frequency down (Llama 3.1: only where the wavelength is long)."""
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = min(1.0, max(0.0, (turns - low) / (high - low)))
    return blend * frequency + (1 - blend) * slow


def rope_tables(positions: Int[Array, " tokens"], config: ModelConfig) -> Rope:
    """Return cosine and sine of every token's rotary angles, float32."""
    frequencies = jnp.asarray(rope_frequencies(config), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    # The barrier keeps XLA from recomputing sines inside every layer that uses them.
    return jax.lax.optimization_barrier(Rope(jnp.cos(angles), jnp.sin(angles)))


def apply_rope(
    x: Float[Array, "tokens heads head_dim"], rope: Rope
) -> Float[Array, "tokens heads head_dim"]:
    """Rotate the halves of each head against each other (arXiv 2104.09864), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (table[:, None] for table in rope)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
