"""What decoder layers share: a step's context, norms, rotary embedding, matrix products."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shiftjax.arch.config import ModelConfig, QueryGrowth, RopeKind
from shiftjax.arch.rotary import rope_frequencies
from shiftjax.models.attention import AttentionMetadata, PoolPlace, RowMetadata
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.models.exchange import Parallel
from shiftjax.models.expert_backend import XLA_EXPERTS, ExpertBackend
from shiftjax.models.norm_backend import XLA_NORMS, NormBackend
from shiftjax.models.open_sums import OpenSums, is_summed
from shiftjax.models.product_backend import XLA_PRODUCTS, Products
from shiftjax.models.products import Activations, quantise_blocks
from shiftjax.models.stream import Stream
from shiftjax.parallel.grid import ALL_AXES, WEIGHT_AXES


class Rope(NamedTuple):
    """What layers do to heads by positions, of this device's tokens."""

    cos: Float[Array, "tokens half"] | None  # None: nothing is rotated
    sin: Float[Array, "tokens half"] | None
    query_gain: Float[Array, " tokens"] | None = None  # of models whose queries grow


class LogitRows(NamedTuple):
    """The tokens of a step whose logits are wanted; the same on every device."""

    tokens: Int[Array, " rows"]  # which of the step's
    positions: Int[Array, " tokens"]  # of all of the step's, in their sequences
    late: RowMetadata | None  # None: no layer computes rows alone


class Context(NamedTuple):
    """What a step's layers have in common, made once; tokens are this device's.

    For layers that compute logit rows alone, tokens are these rows, and `metadata.work` theirs.
    """

    ropes: tuple[Rope, ...]  # one for each of the model's `ropes`
    metadata: AttentionMetadata
    backend: AttentionBackend
    parallel: Parallel
    experts: ExpertBackend = XLA_EXPERTS
    place: PoolPlace | None = None  # of the layer that runs
    token_ids: Int[Array, " all_tokens"] | None = None  # of the step, for what layers look up
    # Layers of experts append what they have to tell, each its own; None: no layer does.
    counted: list[Any] | None = None
    tells: bool = False  # with the experts that each token has chosen
    products: Products = XLA_PRODUCTS  # with matrices that are no experts'
    norms: NormBackend = XLA_NORMS  # of the stream
    sums: OpenSums | None = None  # of partial sums with the norms behind them; None: XLA's
    # The slot of each token's adapter, of this device's and of all; None: no token has one.
    slot: Int[Array, " tokens"] | None = None
    all_slots: Int[Array, " all_tokens"] | None = None
    # Of all tokens, where a kernel takes heads to attention that were exchanged; else `ropes`.
    whole_ropes: tuple[Rope, ...] = ()


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


def looked_up(
    table: Float[Array, "rows_split width"],
    token_ids: Int[Array, " all_tokens"],
    parallel: Parallel,
) -> Float[Array, "tokens width"]:
    """Return rows of this device's tokens; `token_ids` are those of the step."""
    if parallel.gathers:
        return parallel.sum_of_all(look_up(table, token_ids, ALL_AXES))
    return parallel.reduce(look_up(table, parallel.local_tokens(token_ids), WEIGHT_AXES))


def rms_norm(
    x: Float[Array, "... width"],
    weight: Float[Array, "... width"],
    eps: float,
    *,
    in_float32: bool = False,
    centred: bool = False,
) -> Float[Array, "... width"]:
    """Root-mean-square norm (arXiv 1910.07467), in float32, returned in the type of `x`.

    It is rounded before the weight is applied, or, with `in_float32`, after: each as the models
    that have it were trained. A `centred` one is a layer norm without a bias (arXiv 1607.06450).
    """
    wide = x.astype(jnp.float32)
    if centred:
        wide = wide - _mean(wide)
    scale = _inverse_root(_mean(wide * wide) + eps)
    return weighted(wide * scale, weight, x.dtype, in_float32=in_float32)


def unit_norm(x: Float[Array, "... width"], eps: float) -> Float[Array, "... width"]:
    """Root-mean-square norm without a weight, in float32, rounded once."""
    wide = x.astype(jnp.float32)
    scale = _inverse_root(_mean(wide * wide) + eps)
    return (wide * scale).astype(x.dtype)


def _mean(x: Float[Array, "*rows width"]) -> Float[Array, "*rows 1"]:
    """Return the mean of each row.

    On CPUs by sums of halves: the order of XLA:CPU's own depends on how many rows there are.
    """

    def by_halves(x: Array) -> Array:
        total = x
        while total.shape[-1] % 2 == 0:
            half = total.shape[-1] // 2
            total = total[..., :half] + total[..., half:]
        columns = (total[..., i : i + 1] for i in range(total.shape[-1]))
        return functools.reduce(jnp.add, columns) / x.shape[-1]

    own = functools.partial(jnp.mean, axis=-1, keepdims=True)
    return jax.lax.platform_dependent(x, cpu=by_halves, default=own)


def _inverse_root(x: Float[Array, "*rows 1"]) -> Float[Array, "*rows 1"]:
    """Return 1 / sqrt(x).

    The last bit of XLA:CPU's rsqrt depends on how many numbers there are, and 1 / sqrt(x) becomes
    it; a quotient and a root are exact.
    """
    return jax.lax.platform_dependent(x, cpu=lambda x: jnp.sqrt(1 / x), default=jax.lax.rsqrt)


def weighted(
    normed: Float[Array, "... width"], weight: Float[Array, "..."], dtype: Any, *, in_float32: bool
) -> Float[Array, "... width"]:
    """Return float32 numbers of unit size times a norm's weight, which has the last dimensions."""
    weight = weight.reshape((1,) * (normed.ndim - weight.ndim) + weight.shape)
    if in_float32:
        return (normed * weight.astype(jnp.float32)).astype(dtype)
    return normed.astype(dtype) * weight.astype(dtype)


def norm_weight(weight: Float[Array, "..."], config: ModelConfig) -> Float[Array, "..."]:
    """Return what a norm multiplies by: its weight, or 1 more, in float32."""
    return 1.0 + weight.astype(jnp.float32) if config.norm_offset else weight


def norm(
    x: Float[Array, "... width"], weight: Float[Array, "... width"], config: ModelConfig
) -> Float[Array, "... width"]:
    """Apply a norm of the model, whose weight has the last dimensions of `x`."""
    how = {"in_float32": config.norm_in_float32, "centred": config.norm_centred}
    return rms_norm(x, norm_weight(weight, config), config.rms_norm_eps, **how)


def add_norm(
    stream: Stream,
    name: str,
    weight: Float[Array, " hidden"] | None,
    config: ModelConfig,
    context: Context,
    *,
    codes: bool = False,
) -> tuple[Stream, Activations]:
    """Return the new stream, with what is added, and what the next products read: its norm.

    What is partial is summed over devices. Without a weight the stream is read as it is; `name` is
    the norm's in its layer. `codes` says that the next products read codes: they are given such
    where the backend has them.
    """
    sums, norms, reduce = context.sums, context.norms, context.parallel.sum
    codes = codes and norms.gives_codes
    if weight is not None and sums is not None and is_summed(stream):
        return sums.add_norm(stream, name, weight, config, codes=codes)
    if weight is not None and norms.add_norm is not None:
        x, normed = norms.add_norm(stream, weight, reduce, codes)
    else:
        x = stream.whole(reduce, config.residual_scale)
        normed = x if weight is None else norm(x, weight, config)
        normed = quantise_blocks(normed) if codes and weight is not None else normed
    if sums is not None and weight is not None:
        return sums.kept(replace(stream, x=x, addend=None)), normed
    return Stream(x, before=stream.before), normed


def rope_tables(positions: Int[Array, " tokens"], config: ModelConfig) -> tuple[Rope, ...]:
    """Return cosine and sine of every token's rotary angles, float32, for each of `ropes`."""
    tables = (_rope_table(positions, config, rope) for rope in config.ropes)
    # The barrier keeps XLA from recomputing sines inside every layer that uses them.
    return jax.lax.optimization_barrier(tuple(tables))


def ropes_of_step(
    positions: Int[Array, " all_tokens"], config: ModelConfig, parallel: Parallel, *, enters: bool
) -> tuple[tuple[Rope, ...], tuple[Rope, ...]]:
    """Return a context's `ropes` and `whole_ropes`; `enters`: a kernel takes heads to attention."""
    own = rope_tables(parallel.local_tokens(positions), config)
    is_apart = enters and parallel.splits_tokens
    return own, rope_tables(positions, config) if is_apart else own


def _rope_table(positions: Int[Array, " tokens"], config: ModelConfig, rope: RopeKind) -> Rope:
    gain_of_queries = _query_gain(positions, rope.growth)
    if not rope.width:
        return Rope(None, None, gain_of_queries)
    longest, scaling = config.max_position_embeddings, rope.scaling
    frequencies = rope_frequencies(rope.theta, scaling, rope.width, longest)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None]
    gain = 1.0 if scaling is None else scaling.attention_factor
    return Rope(gain * jnp.cos(angles), gain * jnp.sin(angles), gain_of_queries)


def _query_gain(
    positions: Int[Array, " tokens"], growth: QueryGrowth | None
) -> Float[Array, " tokens"] | None:
    """Return what queries are multiplied by, float32."""
    if growth is None:
        return None
    times = (positions + growth.first) // growth.context
    return 1 + growth.beta * jnp.log1p(times.astype(jnp.float32))


def apply_rope(
    x: Float[Array, "tokens heads head_dim"], rope: Rope, *, interleaved: bool = False
) -> Float[Array, "tokens heads head_dim"]:
    """Rotate the halves of each head against each other (arXiv 2104.09864), in float32.

    With `interleaved`, each number against its neighbour. What a table is too narrow for, the end
    of every head, stays as it is.
    """
    assert rope.cos is not None and rope.sin is not None
    width = 2 * rope.cos.shape[-1]
    wide, rest = x[..., :width].astype(jnp.float32), x[..., width:]
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    parts = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        rotated = jnp.stack(parts, axis=-1).reshape(wide.shape)
    else:
        rotated = jnp.concatenate(parts, axis=-1)
    rotated = rotated.astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
