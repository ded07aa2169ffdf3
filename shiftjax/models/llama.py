"""The decoder of the Llama family: Llama, Mistral, SmolLM2, Qwen2, Qwen3, by flags of the config.

`arch/weights.py` says which weights there are; a module is given its own, by name. The forward
pass is written for one device's shard, inside `shard_map`; `Parallel` talks to the others.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from shiftjax.arch.config import ModelConfig
from shiftjax.models.attention import LayerPool
from shiftjax.models.exchange import Parallel
from shiftjax.models.layers import Context, apply_rope, project_in, project_out, rms_norm
from shiftjax.parallel.grid import WEIGHT_AXES

Params = dict[str, Any]  # name -> nnx.Param, or the Params of a part


class Part(nnx.Module):
    """A part of a model, with the weights that the table has under its name."""

    def __init__(self, config: ModelConfig, params: Params):
        self.config = config
        for name, param in params.items():
            setattr(self, name, param)


class Attention(Part):
    """Grouped-query attention with rotary positions over the paged KV pool."""

    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    o: nnx.Param
    q_bias: nnx.Param  # with attention_bias
    k_bias: nnx.Param
    v_bias: nnx.Param
    o_bias: nnx.Param  # with output_bias
    q_norm: nnx.Param  # with qk_norm
    k_norm: nnx.Param

    def __call__(
        self, x: Float[Array, "tokens hidden"], pool: LayerPool, context: Context
    ) -> tuple[Float[Array, "tokens hidden"], LayerPool]:
        """Return the (reduced) output and the pool with this step's keys and values written."""
        config, (rope, metadata, backend, parallel) = self.config, context
        q, k, v = (_project_heads(x, w[...]) for w in (self.q, self.k, self.v))
        if config.attention_bias:
            biases = (self.q_bias, self.k_bias, self.v_bias)
            q, k, v = (y + bias[...][None] for y, bias in zip((q, k, v), biases, strict=True))
        if config.qk_norm:
            q = rms_norm(q, self.q_norm[...], config.rms_norm_eps)
            k = rms_norm(k, self.k_norm[...], config.rms_norm_eps)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = parallel.scatter_heads(q, k, v)
        pool = backend.write(pool, k, v, metadata.slot_mapping)
        out = backend.attend(q, pool, metadata)
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


class MLP(Part):
    """The gated feed-forward part: down(silu(gate x) * up x)."""

    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    gate_bias: nnx.Param  # with mlp_bias
    up_bias: nnx.Param
    down_bias: nnx.Param

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

    def __init__(self, config: ModelConfig, params: Params):
        self.eps = config.rms_norm_eps
        self.input_norm, self.mlp_norm = params["input_norm"], params["mlp_norm"]
        self.attention = Attention(config, params["attention"])
        self.mlp = MLP(config, params["mlp"])

    def __call__(
        self, x: Float[Array, "tokens hidden"], pool: LayerPool, context: Context
    ) -> tuple[Float[Array, "tokens hidden"], LayerPool]:
        """Return the layer's output and its pool."""
        normed = rms_norm(x, self.input_norm[...], self.eps)
        out, pool = self.attention(normed, pool, context)
        x = x + out
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps), context.parallel), pool


class Llama(nnx.Module):
    """A decoder-only language model; `nnx.split` it once and merge it inside the step."""

    def __init__(self, config: ModelConfig, params: Params):
        layers = params["layers"]
        self.config = config
        self.embed, self.norm, self.lm_head = (params[n] for n in ("embed", "norm", "lm_head"))
        self.layers = nnx.List(
            [DecoderLayer(config, layers[str(index)]) for index in range(config.num_layers)]
        )

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
        self, token_ids: Int[Array, " tokens"], pools: list[LayerPool], context: Context
    ) -> tuple[list[Float[Array, "tokens hidden"]], list[LayerPool]]:
        """Return the hidden states after the embedding and each layer, and the written pools.

        `token_ids` are this device's (`Parallel.local_tokens`). Unused hidden states cost nothing
        in a compiled step; parity tests read them.
        """
        hidden, written = [self.embed_tokens(token_ids, context.parallel)], []
        for layer, pool in zip(self.layers, pools, strict=True):
            out, new_pool = layer(hidden[-1], pool, context)
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
