"""The decoder of the Llama family: Llama, Mistral, SmolLM2, Qwen2, Qwen3, by flags of the config.

Every weight is declared once, by `weight(...)`: stored shape, logical axes, the checkpoint's
name and orientation. Loading, sharding and random initialisation derive from that. The forward
pass is written for one device's shard, inside `shard_map`; `Parallel` talks to the others.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shiftjax.arch.config import ModelConfig
from shiftjax.models.attention import AttentionMetadata, LayerPool
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.models.exchange import Parallel
from shiftjax.models.layers import apply_rope, project_in, project_out, rms_norm, rope_tables
from shiftjax.parallel.grid import WEIGHT_AXES
from shiftjax.parallel.layout import Layout


class Rope(NamedTuple):
    """Rotary tables of this device's tokens, made once per step."""

    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]


def weight(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    source: str,
    dtype: DTypeLike,
    *,
    transposed: bool = False,
) -> nnx.Param:
    """Declare a weight: stored global BASE shape, logical axes and checkpoint tensor.

    `transposed` marks row-parallel weights: checkpoints hold `[out, in]`, the engine `[in, out]`,
    so that the dimension that is split comes first and a shard is contiguous.
    """
    struct = jax.ShapeDtypeStruct(shape, dtype)
    return nnx.Param(struct, axes=axes, source=source, transposed=transposed)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions over the paged KV pool."""

    def __init__(self, config: ModelConfig, layout: Layout, dtype: DTypeLike, prefix: str):
        hidden, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = layout.num_heads, sum(map(len, layout.base_kv_heads))
        shape, axes = (heads, head_dim, hidden), ("heads", None, None)
        kv_shape, kv_axes = (kv_heads, head_dim, hidden), ("kv_heads", None, None)
        self.config = config
        self.q = weight(shape, axes, f"{prefix}.q_proj.weight", dtype)
        self.k = weight(kv_shape, kv_axes, f"{prefix}.k_proj.weight", dtype)
        self.v = weight(kv_shape, kv_axes, f"{prefix}.v_proj.weight", dtype)
        self.o = weight(shape, axes, f"{prefix}.o_proj.weight", dtype, transposed=True)
        if config.attention_bias:
            self.q_bias = weight(shape[:2], axes[:2], f"{prefix}.q_proj.bias", dtype)
            self.k_bias = weight(kv_shape[:2], kv_axes[:2], f"{prefix}.k_proj.bias", dtype)
            self.v_bias = weight(kv_shape[:2], kv_axes[:2], f"{prefix}.v_proj.bias", dtype)
        if config.output_bias:
            self.o_bias = weight((hidden,), (None,), f"{prefix}.o_proj.bias", dtype)
        if config.qk_norm:
            self.q_norm = weight((head_dim,), (None,), f"{prefix}.q_norm.weight", dtype)
            self.k_norm = weight((head_dim,), (None,), f"{prefix}.k_norm.weight", dtype)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        pool: LayerPool,
        rope: Rope,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
        parallel: Parallel,
    ) -> tuple[Float[Array, "tokens hidden"], LayerPool]:
        """Return the (reduced) output and the pool with this step's keys and values written."""
        config = self.config
        q, k, v = (_project_heads(x, w[...]) for w in (self.q, self.k, self.v))
        if config.attention_bias:
            biases = (self.q_bias, self.k_bias, self.v_bias)
            q, k, v = (y + bias[...][None] for y, bias in zip((q, k, v), biases, strict=True))
        if config.qk_norm:
            q = rms_norm(q, self.q_norm[...], config.rms_norm_eps)
            k = rms_norm(k, self.k_norm[...], config.rms_norm_eps)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        q, k, v = parallel.scatter_heads(q, k, v)
        pool = attention.write(*pool, k, v, metadata.slot_mapping)
        out = attention.attend(q, *pool, metadata)
        out = parallel.gather_heads(out)
        o = self.o[...]
        out = project_in(out.reshape(out.shape[0], -1), o.reshape(-1, o.shape[-1]))
        out = parallel.reduce(out)
        return (out + self.o_bias[...][None] if config.output_bias else out), pool


def _project_heads(
    x: Float[Array, "tokens hidden"], w: Float[Array, "heads head_dim hidden"]
) -> Float[Array, "tokens heads head_dim"]:
    """Project to the q, k or v heads of this device."""
    return project_out(x, w.reshape(-1, w.shape[-1])).reshape(x.shape[0], *w.shape[:2])


class MLP(nnx.Module):
    """The gated feed-forward part: down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig, layout: Layout, dtype: DTypeLike, prefix: str):
        hidden, width = config.hidden_size, layout.intermediate_size
        shape, axes = (width, hidden), ("intermediate", None)
        self.config = config
        self.gate = weight(shape, axes, f"{prefix}.gate_proj.weight", dtype)
        self.up = weight(shape, axes, f"{prefix}.up_proj.weight", dtype)
        self.down = weight(shape, axes, f"{prefix}.down_proj.weight", dtype, transposed=True)
        if config.mlp_bias:
            self.gate_bias = weight((width,), axes[:1], f"{prefix}.gate_proj.bias", dtype)
            self.up_bias = weight((width,), axes[:1], f"{prefix}.up_proj.bias", dtype)
            self.down_bias = weight((hidden,), (None,), f"{prefix}.down_proj.bias", dtype)

    def __call__(
        self, x: Float[Array, "tokens hidden"], parallel: Parallel
    ) -> Float[Array, "tokens hidden"]:
        """Return the (reduced) output."""
        gate, up = project_out(x, self.gate[...]), project_out(x, self.up[...])
        if self.config.mlp_bias:
            gate, up = gate + self.gate_bias[...][None], up + self.up_bias[...][None]
        out = parallel.reduce(project_in(jax.nn.silu(gate) * up, self.down[...]))
        return out + self.down_bias[...][None] if self.config.mlp_bias else out


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, layout: Layout, dtype: DTypeLike, index: int):
        prefix = f"model.layers.{index}"
        shape, axes = (config.hidden_size,), (None,)
        self.eps = config.rms_norm_eps
        self.input_norm = weight(shape, axes, f"{prefix}.input_layernorm.weight", dtype)
        self.attention = Attention(config, layout, dtype, f"{prefix}.self_attn")
        self.mlp_norm = weight(shape, axes, f"{prefix}.post_attention_layernorm.weight", dtype)
        self.mlp = MLP(config, layout, dtype, f"{prefix}.mlp")

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        pool: LayerPool,
        rope: Rope,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
        parallel: Parallel,
    ) -> tuple[Float[Array, "tokens hidden"], LayerPool]:
        """Return the layer's output and its pool."""
        normed = rms_norm(x, self.input_norm[...], self.eps)
        out, pool = self.attention(normed, pool, rope, metadata, attention, parallel)
        x = x + out
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps), parallel), pool


class Llama(nnx.Module):
    """A decoder-only language model; `nnx.split` it once and merge it inside the step."""

    def __init__(self, config: ModelConfig, layout: Layout, dtype: DTypeLike):
        vocab, hidden = layout.vocab_size, config.hidden_size
        embed = "model.embed_tokens.weight"
        head = embed if config.tie_word_embeddings else "lm_head.weight"
        self.config = config
        self.embed = weight((vocab, hidden), ("vocab", None), embed, dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, layout, dtype, index) for index in range(config.num_layers)]
        )
        self.norm = weight((hidden,), (None,), "model.norm.weight", dtype)
        self.lm_head = weight((vocab, hidden), ("lm_vocab", None), head, dtype)

    def embed_tokens(
        self, token_ids: Int[Array, " tokens"], parallel: Parallel
    ) -> Float[Array, "tokens hidden"]:
        """Look tokens up in a table whose rows are split over the weight axes."""
        table = self.embed[...]
        local = token_ids - jax.lax.axis_index(WEIGHT_AXES) * table.shape[0]
        mine = ((local >= 0) & (local < table.shape[0]))[:, None]
        found = table[jnp.clip(local, 0, table.shape[0] - 1)]
        return parallel.reduce(jnp.where(mine, found, jnp.zeros((), table.dtype)))

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        pools: list[LayerPool],
        metadata: AttentionMetadata,
        attention: AttentionBackend,
        parallel: Parallel,
    ) -> tuple[list[Float[Array, "tokens hidden"]], list[LayerPool]]:
        """Return the hidden states after the embedding and each layer, and the written pools.

        Token arrays hold this device's tokens (`parallel.local_tokens`). Unused hidden states
        cost nothing in a compiled step; parity tests read them.
        """
        # The barrier keeps XLA from recomputing sines inside every layer that uses them.
        rope = Rope(*jax.lax.optimization_barrier(rope_tables(positions, self.config)))
        hidden, written = [self.embed_tokens(token_ids, parallel)], []
        for layer, pool in zip(self.layers, pools, strict=True):
            out, new_pool = layer(hidden[-1], pool, rope, metadata, attention, parallel)
            hidden.append(out)
            written.append(new_pool)
        return hidden, written

    def logits(
        self,
        hidden: Float[Array, "tokens hidden"],
        rows: Int[Array, " rows"],
        parallel: Parallel,
    ) -> Float[Array, "rows_tp_sp vocab"]:
        """Return float32 logits of the tokens at `rows`, each device holding its share of rows."""
        sampled = parallel.take_rows(hidden, rows)
        normed = rms_norm(sampled, self.norm[...], self.config.rms_norm_eps)
        head = self.lm_head[...]
        logits = jnp.einsum("ti,oi->to", normed, head, preferred_element_type=jnp.float32)
        return parallel.rows_from_vocab(logits)
