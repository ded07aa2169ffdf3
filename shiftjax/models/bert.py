"""Encoders of the BERT family (arXiv 1810.04805) over rows that hold several whole texts each.

A row of `width` tokens is filled with texts, one after the other; `owners` says which text of its
row a token belongs to, and `slots` where it belongs to none:

    token_ids   a a a a b b c c c c c 0      owners   0 0 0 0 1 1 2 2 2 2 2 S
                                          positions   0 1 2 3 0 1 0 1 2 3 4 0      (slots S)

A token attends to those of its own text only, so that a text's embedding does not depend on what
it shares the row with, and nothing is padded to the longest text.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from shiftjax.arch.config import ModelConfig
from shiftjax.models.part import Params, Part

Hidden = Float[Array, "rows width hidden"]
PerToken = Int[Array, "rows width"]


def layer_norm(x: Hidden, weight: nnx.Param, bias: nnx.Param, eps: float) -> Hidden:
    """Layer norm (arXiv 1607.06450), in float32, returned in the type of `x`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    weight32, bias32 = (part[...].astype(jnp.float32)[None, None] for part in (weight, bias))
    return (centred * scale * weight32 + bias32).astype(x.dtype)


def project(
    x: Float[Array, "rows width in"], weight: nnx.Param, bias: nnx.Param
) -> Float[Array, "rows width out"]:
    """Multiply by a weight that is stored `[out, in]`, and add its bias."""
    return jnp.einsum("rti,oi->rto", x, weight[...]) + bias[...][None, None]


class EncoderLayer(Part):
    """Attention and MLP; each is added to what came in, and the sum normed (post-norm)."""

    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    o: nnx.Param
    up: nnx.Param
    down: nnx.Param
    q_bias: nnx.Param
    k_bias: nnx.Param
    v_bias: nnx.Param
    o_bias: nnx.Param
    up_bias: nnx.Param
    down_bias: nnx.Param
    attention_norm: nnx.Param
    attention_norm_bias: nnx.Param
    output_norm: nnx.Param
    output_norm_bias: nnx.Param

    def __call__(self, x: Hidden, sees: Bool[Array, "rows width width"]) -> Hidden:
        """Return the layer's output; `sees[r, t, u]`: token t attends to token u."""
        assert self.config.encoder is not None
        eps = self.config.encoder.layer_norm_eps
        out = project(self._attend(x, sees), self.o, self.o_bias)
        x = layer_norm(x + out, self.attention_norm, self.attention_norm_bias, eps)
        inner = jax.nn.gelu(project(x, self.up, self.up_bias), approximate=False)
        out = project(inner, self.down, self.down_bias)
        return layer_norm(x + out, self.output_norm, self.output_norm_bias, eps)

    def _attend(self, x: Hidden, sees: Bool[Array, "rows width width"]) -> Hidden:
        heads = (*x.shape[:2], self.config.num_heads, self.config.head_dim)
        weights = ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
        q, k, v = (project(x, *pair).reshape(heads) for pair in weights)
        scores = jnp.einsum("rtnd,rund->rntu", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(sees[:, None], scores * self.config.head_dim**-0.5, -jnp.inf)
        shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        return jnp.einsum("rntu,rund->rtnd", shares, v).reshape(x.shape)


class ScoringHead(Part):
    """What scores a text by its first token, in float32: a dense layer, tanh, and one more."""

    dense: nnx.Param
    out: nnx.Param
    dense_bias: nnx.Param
    out_bias: nnx.Param

    def __call__(
        self, first: Float[Array, "rows slots hidden"]
    ) -> Float[Array, "rows slots labels"]:
        """Return the numbers of all labels; `first` is the hidden state of each first token."""
        x = jnp.tanh(self._layer(first, self.dense, self.dense_bias))
        return self._layer(x, self.out, self.out_bias)

    def _layer(
        self, x: Float[Array, "rows slots in"], weight: nnx.Param, bias: nnx.Param
    ) -> Float[Array, "rows slots out"]:
        highest = jax.lax.Precision.HIGHEST
        wide = jnp.einsum("rsi,oi->rso", x, weight[...].astype(jnp.float32), precision=highest)
        return wide + bias[...].astype(jnp.float32)[None, None]


class Bert(nnx.Module):
    """An encoder; `nnx.split` it once and merge it inside the step."""

    def __init__(self, config: ModelConfig, params: Params):
        names = ("tokens", "positions", "token_types", "norm", "norm_bias")
        self.config = config
        self.tokens, self.positions, self.token_types, self.norm, self.norm_bias = (
            params[name] for name in names
        )
        layers = params["layers"]
        self.layers = nnx.List(
            [EncoderLayer(config, layers[str(index)]) for index in range(config.num_layers)]
        )
        self.head = ScoringHead(config, params["head"]) if "head" in params else None

    def __call__(
        self,
        token_ids: PerToken,
        positions: PerToken,
        owners: PerToken,
        types: PerToken | None = None,
    ) -> list[Hidden]:
        """Return the hidden states after the embedding and each layer.

        `positions` begin at 0 in every text. `types` tell the second text of a pair from the first;
        None: there are no pairs. Unused hidden states cost nothing in a compiled step.
        """
        assert self.config.encoder is not None
        eps, first = self.config.encoder.layer_norm_eps, self.config.encoder.position_offset
        x = self.tokens[...][token_ids] + self.positions[...][positions + first]
        of_types = self.token_types[...]
        x = x + (of_types[0][None, None] if types is None else of_types[types])
        hidden = [layer_norm(x, self.norm, self.norm_bias, eps)]
        sees = owners[:, :, None] == owners[:, None, :]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], sees))
        return hidden


def pool(
    hidden: Hidden, positions: PerToken, owners: PerToken, slots: int, kind: str
) -> Float[Array, "rows slots hidden"]:
    """Return an embedding of each text, float32: the mean over its tokens, its first or its last.

    `kind` is `mean`, `cls` or `last`; a slot without a text gives zeros.
    """
    place = jnp.arange(slots, dtype=owners.dtype)
    wanted = owners[:, :, None] == place[None, None]  # [rows, width, slots]
    counts = jnp.sum(wanted, axis=1, keepdims=True, dtype=jnp.int32)
    if kind != "mean":
        wanted &= positions[:, :, None] == (0 if kind == "cls" else counts - 1)
    shares = wanted.astype(jnp.float32)
    if kind == "mean":
        shares /= jnp.maximum(counts, 1).astype(jnp.float32)
    wide = hidden.astype(jnp.float32)
    return jnp.einsum("rts,rth->rsh", shares, wide, precision=jax.lax.Precision.HIGHEST)


def normalize(x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
    """Scale to length 1; zeros stay zeros."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
