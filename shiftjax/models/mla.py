"""Multi-head latent attention (MLA): DeepSeek-V2 and V3, Kimi K2, GLM-5.

The pool has one latent a token, as `arch/latent.py` says, and every head attends to it as to a key
whose first numbers are its value: what would make keys of latents is absorbed in queries, and what
would make values comes after the sum (arXiv 2405.04434, section 2.1.2). Both matrices are in
`kv_up`, of a device's own heads in every mode. Queries cross devices before that, and outputs after
it, when they are narrow.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shiftjax.arch.config import LayerKind, ModelConfig
from shiftjax.arch.latent import EPSILON
from shiftjax.models.attention import LayerPool, LayerTerms, PoolPlace
from shiftjax.models.layers import Context, apply_rope, rms_norm
from shiftjax.models.part import Params, Part
from shiftjax.models.products import Activations
from shiftjax.models.stream import Addend


class LatentAttention(Part):
    """Attention over the latents in the pool."""

    q_down: nnx.Param  # with latent.query_rank
    q_down_bias: nnx.Param  # with attention_bias
    q_norm: nnx.Param
    q: nnx.Param
    kv_down: nnx.Param
    kv_down_bias: nnx.Param
    kv_norm: nnx.Param
    kv_up: nnx.Param
    o: nnx.Param
    o_bias: nnx.Param  # with output_bias
    kv_scale: nnx.Param  # with a cache of codes

    def __init__(self, config: ModelConfig, params: Params, kind: LayerKind):
        super().__init__(config, params)
        self.kind = kind
        assert config.latent is not None
        self.latent = config.latent

    def __call__(
        self, x: Activations, pool: LayerPool, context: Context
    ) -> tuple[Addend, LayerPool]:
        """Return what the layer adds and the pool with this step's latents written."""
        _, metadata, backend, parallel, _, place, *_ = context
        nope, up = self.latent.nope_dim, self.kv_up[...]
        q, latents = parallel.scatter_latents(self._queries(x, context), self._latents(x, context))
        absorbed = jnp.einsum("thn,hnr->thr", q[..., :nope], up[:, :nope])
        q = jnp.concatenate([absorbed, q[..., nope:]], axis=-1)
        terms = self.terms(place)
        pool = backend.write(pool, latents, None, metadata.slot_mapping, terms)
        sums = backend.attend(q, pool, metadata, terms)
        out = jnp.einsum("thr,hvr->thv", sums, up[:, nope:])
        return self._output(parallel.gather_heads(out), context), pool

    def terms(self, place: PoolPlace | None) -> LayerTerms:
        """What attention must know of this layer, whose part of a pool is at `place`."""
        window = self.config.windows.index(self.kind.window)
        scales = getattr(self, "kv_scale", None)
        return LayerTerms(window, None if scales is None else scales[...].T, place=place)

    def _queries(self, x: Activations, context: Context) -> Float[Array, "tokens heads query_dim"]:
        """Return this device's tokens' queries, the ends of which are rotated."""
        narrow = x
        if self.latent.query_rank is not None:
            narrow = rms_norm(self._down(x, "q_down", context), self.q_norm[...], EPSILON)
        return self._turned(self.read_by(narrow, ("q",), context)[0], self.latent.nope_dim, context)

    def _latents(self, x: Activations, context: Context) -> Float[Array, "tokens 1 width"]:
        """Return what is cached of this device's tokens."""
        rank = self.latent.rank
        down = self._down(x, "kv_down", context)
        normed = rms_norm(down[:, :rank], self.kv_norm[...], EPSILON)
        latents = jnp.concatenate([normed, down[:, rank:]], axis=-1)[:, None]
        return self._turned(latents, rank, context)

    def _down(self, x: Activations, name: str, context: Context) -> Float[Array, "tokens narrow"]:
        """Multiply by a matrix that every device has whole."""
        (out,) = self.read_by(x, (name,), context)
        return out + getattr(self, f"{name}_bias")[...][None] if self.config.attention_bias else out

    def _turned(self, x: jax.Array, first: int, context: Context) -> jax.Array:
        """Turn the numbers of heads from `first` on by their positions."""
        config = self.config
        rope = context.ropes[config.ropes.index(config.rope_of(self.kind))]
        turned = apply_rope(x[..., first:], rope, interleaved=config.rope_interleaved)
        return jnp.concatenate([x[..., :first], turned], axis=-1)

    def _output(self, out: Float[Array, "tokens heads value_dim"], context: Context) -> Addend:
        """Project the heads of this device back."""
        bias = self.o_bias[...] if self.config.output_bias else None
        return self._added(out.reshape(out.shape[0], -1), "o", context, bias)
