"""What layers of Gemma 4 have beside those of other decoders.

Every layer may be given an input of its own for each token: a row of a table, and a projection of
the token's embedding. Experts may stand beside an MLP, and read what it does not: the residual.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shiftjax.arch.config import ModelConfig
from shiftjax.models.layers import Context, looked_up, norm, unit_norm
from shiftjax.models.mlp import MLP, MoE
from shiftjax.models.part import Params, Part
from shiftjax.models.products import gate_with
from shiftjax.models.stream import Addend, scaled


class LayerInputs(Part):
    """The inputs of all layers: by tokens' ids and by their embeddings."""

    embed: nnx.Param  # [vocab, layers * width]
    projection: nnx.Param
    norm: nnx.Param

    def __call__(
        self, embedded: Float[Array, "tokens hidden"], context: Context
    ) -> list[Float[Array, "tokens width"]]:
        """Return those of this device's tokens, one for each layer."""
        config, width = self.config, self.config.layer_input_width
        assert context.token_ids is not None
        found = looked_up(self.embed[...], context.token_ids, context.parallel)
        found = found * jnp.asarray(width**0.5, found.dtype)
        seen = scaled(self._out(embedded, "projection"), config.hidden_size**-0.5)
        shape = embedded.shape[0], config.num_layers, width
        seen = norm(seen.reshape(shape), self.norm[...], config)
        both = scaled(seen + found.reshape(shape), 2**-0.5)
        return [both[:, layer] for layer in range(config.num_layers)]


class LayerInput(Part):
    """What a layer makes of its own input, behind its MLP."""

    gate: nnx.Param
    out: nnx.Param
    norm: nnx.Param

    def __call__(
        self, x: Float[Array, "tokens hidden"], given: Float[Array, "tokens width"]
    ) -> Float[Array, "tokens hidden"]:
        """Return what is added to the residual. Every device has these matrices whole."""
        inner = gate_with(self.config.activation, self._out(x, "gate"), given)
        return norm(self._out(inner, "out"), self.norm[...], self.config)


class ExpertsBesideMLP(MoE):
    """Experts that read the residual, and an MLP that reads what its norm makes of it."""

    dense: MLP
    dense_norm: nnx.Param  # of what each gives
    experts_norm: nnx.Param
    entry_norm: nnx.Param  # of what experts read
    router_scale: nnx.Param  # of what the router reads
    expert_scale: nnx.Param  # of each expert's weight, float32

    def __init__(self, config: ModelConfig, params: Params):
        super().__init__(config, {name: params[name] for name in params if name != "dense"})
        self.dense = MLP(config, params["dense"])

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        context: Context,
        residual: Float[Array, "tokens hidden"] | None = None,
    ) -> Addend:
        """Return what both add to the stream; `x` is what a norm has made of the residual."""
        assert residual is not None
        config, scale = self.config, self.config.hidden_size**-0.5

        def enter(given: jax.Array) -> tuple[jax.Array, jax.Array]:
            routed = unit_norm(given, config.rms_norm_eps) * self.router_scale[...][None]
            return norm(given, self.entry_norm[...], config), scaled(routed, scale)

        layer = self._layer(context)._replace(enter=enter, scales=self.expert_scale[...])
        reduce = context.parallel.sum
        dense = norm(self.dense(x, context).whole(reduce), self.dense_norm[...], config)
        routed = self._experts(residual, layer, context).whole(reduce)
        return Addend(dense + norm(routed, self.experts_norm[...], config))
