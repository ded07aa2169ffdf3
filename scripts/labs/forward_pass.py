"""A Llama's forward pass over whole texts, without the engine and its pages.

What scripts learn from: hidden states of every token of `[batch, window]` ids at once. Each row is
a text of its own from position 0; what is padded at the end of a row changes nothing before it.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.weights import EMBEDDING, LM_HEAD
from shiftjax.models.layers import Rope, apply_rope, rms_norm, rope_tables
from shiftjax.weights.source import TensorSource

SWIFTKV_NORM = "model.norm_swiftkv.weight"
Params = Mapping[str, jax.Array]  # by the names of a Hugging Face checkpoint


def read_params(source: TensorSource, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """All tensors of a checkpoint, in one type."""
    return {name: jnp.asarray(source.read(name), dtype) for name in source.tensors}


def attention_of(layer: int) -> str:
    """The names of a layer's attention begin with this."""
    return f"model.layers.{layer}.self_attn"


def head_name(config: ModelConfig) -> str:
    """The name of the LM head, `[vocab, hidden]`, which may be the embedding."""
    return EMBEDDING if config.tie_word_embeddings else LM_HEAD


def hidden_states(params: Params, config: ModelConfig, ids: jax.Array) -> Iterator[jax.Array]:
    """Yield the input of every layer, and the output of the last, `[batch * window, hidden]`.

    `ids` [batch, window]. The last one still wants the final norm.
    """
    x, shared = params[EMBEDDING][ids.reshape(-1)], None
    for layer in range(config.num_layers):
        yield x
        if layer == config.num_kv_layers:
            shared = rms_norm(x, params[SWIFTKV_NORM], config.rms_norm_eps)
        x = _layer_output(params, config, layer, x, shared, ids.shape)
    yield x


def final_states(params: Params, config: ModelConfig, ids: jax.Array) -> jax.Array:
    """What the LM head multiplies, `[batch * window, hidden]`."""
    *_, last = hidden_states(params, config, ids)
    return rms_norm(last, params["model.norm.weight"], config.rms_norm_eps)


def _layer_output(
    params: Params,
    config: ModelConfig,
    layer: int,
    x: jax.Array,
    shared: jax.Array | None,
    shape: tuple[int, ...],
) -> jax.Array:
    """One decoder layer; `shared`: what a late layer's keys and values are made of."""
    at, rope, eps = attention_of(layer), _rope(shape, config), config.rms_norm_eps
    normed = rms_norm(x, params[f"model.layers.{layer}.input_layernorm.weight"], eps)
    suffix, source = ("", normed) if shared is None else ("_swiftkv", shared)
    q = apply_rope(_heads(normed, params[f"{at}.q_proj{suffix}.weight"], config), rope)
    k = apply_rope(_heads(source, params[f"{at}.k_proj{suffix}.weight"], config), rope)
    v = _heads(source, params[f"{at}.v_proj{suffix}.weight"], config)
    x = x + _attend(q, k, v, shape) @ params[f"{at}.o_proj.weight"].T
    mlp = f"model.layers.{layer}.mlp"
    normed = rms_norm(x, params[f"model.layers.{layer}.post_attention_layernorm.weight"], eps)
    gate, up = (normed @ params[f"{mlp}.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (jax.nn.silu(gate) * up) @ params[f"{mlp}.down_proj.weight"].T


def _heads(x: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
    """Project to `[tokens, heads, head_dim]`."""
    return (x @ weight.T).reshape(x.shape[0], -1, config.head_dim)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Causal attention inside of each text, `[batch * window, heads * head_dim]`."""
    q, k, v = (x.reshape(*shape, *x.shape[1:]) for x in (q, k, v))
    with jax.numpy_dtype_promotion("standard"):  # JAX itself mixes types there
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(shape[0] * shape[1], -1)


def _rope(shape: tuple[int, ...], config: ModelConfig) -> Rope:
    """Rotary tables of whole texts, one after the other."""
    batch, window = shape
    (rope,) = rope_tables(jnp.tile(jnp.arange(window, dtype=jnp.int32), batch), config)
    return rope
