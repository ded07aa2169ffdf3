"""Decoders over rows that hold several whole texts each, as encoders have them (`bert.py`).

The forward pass is the decoder's own (`llama.py`). Instead of a paged cache its layers get
attention inside of the rows: a token sees those of its own text up to itself, and the keys and
values of a layer are what the step has just computed, one block a token.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.window import first_seen
from shiftjax.arch.config import ModelConfig
from shiftjax.models.attention import AttentionMetadata, LayerPool, LayerTerms, ModelPools
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.models.bert import PerToken
from shiftjax.models.exchange import Parallel
from shiftjax.models.layers import Context, rope_tables
from shiftjax.models.llama import Llama
from shiftjax.parallel.layout import Layout


def decode_rows(
    model: Llama, token_ids: PerToken, positions: PerToken, owners: PerToken
) -> Float[Array, "rows width hidden"]:
    """Return the hidden states after the final norm, of all tokens.

    A device computes rows of its own and holds the whole model; inside of `shard_map`.
    """
    config, (rows, width) = model.config, owners.shape
    layout = Layout(config, 1, 1)
    sees = (owners[:, :, None] == owners[:, None, :]) & jnp.tri(width, dtype=bool)[None]
    firsts = (first_seen(positions, window)[:, :, None] for window in config.windows)
    seen = tuple(sees & (positions[:, None, :] >= first) for first in firsts)
    nothing = AttentionMetadata(*[None] * len(AttentionMetadata._fields))
    context = Context(
        rope_tables(positions.reshape(-1), config),
        nothing,
        packed_attention(seen, config),
        Parallel(layout, layout.shift),
    )
    streams, _ = model(token_ids.reshape(-1), _no_pools(model, rows * width), context)
    hidden = model.hidden_states(streams[-1], context.parallel)
    return model.normed(hidden).reshape(rows, width, -1)


def scores_of_last(
    model: Llama, last: Float[Array, "rows slots hidden"]
) -> Float[Array, "rows slots labels"]:
    """Return the numbers of all labels, float32, of the hidden states of last tokens."""
    weight = model.score[...].astype(jnp.float32)
    return jnp.einsum("rsh,lh->rsl", last, weight, precision=jax.lax.Precision.HIGHEST)


def packed_attention(
    seen: tuple[Bool[Array, "rows width width"], ...], config: ModelConfig
) -> AttentionBackend:
    """Return attention inside of rows; `seen[w][r, t, u]`: in window w token t attends to u."""
    rows, width, _ = seen[0].shape

    def write(pool: LayerPool, k: jax.Array, v: jax.Array, *_: Any) -> LayerPool:
        return k[:, :, None], v[:, :, None]

    def attend(q: jax.Array, pool: LayerPool, _: Any, terms: LayerTerms) -> jax.Array:
        in_rows = (x.reshape(rows, width, -1, q.shape[-1]) for x in (q, *pool))
        mask, scale = seen[terms.window][:, None], config.attention_scale
        out = jax.nn.dot_product_attention(*in_rows, mask=mask, scale=scale)
        return out.reshape(q.shape)

    def unused(*_: Any) -> Any:
        raise NotImplementedError("rows of texts have no paged cache")

    return AttentionBackend("packed", unused, unused, attend, unused, write)


def _no_pools(model: Llama, num_tokens: int) -> ModelPools:
    """Return placeholder KV pools of zeros, one per layer: `write` replaces them unread."""
    config, dtype = model.config, model.embed[...].dtype
    return [
        tuple(jnp.zeros(entry.pool_shape(num_tokens, 1), dtype) for entry in cache.spec.entries)
        for cache in config.caches
        for _ in cache.layers
    ]
