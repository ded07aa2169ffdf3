"""Feed-forward parts of decoder layers: gated MLPs, and experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.lora import A, B
from shiftjax.models.expert_lora import Adapted
from shiftjax.models.experts import ExpertLayer, ExpertWeights, expert_layer
from shiftjax.models.layers import Context
from shiftjax.models.part import Params, Part
from shiftjax.models.products import Activations, Codes, gate_with, project_gated
from shiftjax.models.stream import Addend


class MLP(Part):
    """The gated feed-forward part: down(silu(gate x) * up x), or with another activation."""

    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    gate_bias: nnx.Param  # with mlp_bias
    up_bias: nnx.Param
    down_bias: nnx.Param
    read = "gate", "up"

    def __call__(self, x: Activations, context: Context) -> Addend:
        """Return what is added to the stream."""
        bias = getattr(self, "down_bias", None)
        bias = None if bias is None else bias[...]
        return self._added(self._inner(x, context), "down", context, bias)

    def partial(self, x: Activations, context: Context) -> Float[Array, "*leaves tokens hidden"]:
        """Return what this device adds to it, without the last bias."""
        return self._in(self._inner(x, context), "down", context)

    def _inner(self, x: Activations, context: Context) -> Float[Array, "tokens width"] | Codes:
        """Return what `down` multiplies."""
        activation, has_bias = self.config.activation, hasattr(self, "gate_bias")
        if not has_bias:
            gate, up = self.columns(x, ("gate", "up"), context)
            return project_gated(x, (gate, up), self.row("down"), activation, context.products)
        gate, up = self.read_by(x, ("gate", "up"), context)
        return gate_with(activation, gate + self.gate_bias[...][None], up + self.up_bias[...][None])


class OwnExperts(Part):
    """The weights of the experts of one layer that this device stores."""

    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    gate_scale: nnx.Param  # of codes
    up_scale: nnx.Param
    down_scale: nnx.Param
    gate_bias: nnx.Param  # with experts.has_bias
    up_bias: nnx.Param
    down_bias: nnx.Param
    gate_zero: nnx.Param  # of four bits, with zero points
    up_zero: nnx.Param
    down_zero: nnx.Param

    @property
    def weights(self) -> ExpertWeights:
        """The stored matrices, scales and biases as arguments of the grouped product."""
        stored = (getattr(self, name, None) for name in ExpertWeights._fields)
        return ExpertWeights(*(None if one is None else one[...] for one in stored))

    def adapted(self, slots: Int[Array, " all_tokens"] | None) -> Adapted | None:
        """Return what adapters change of experts; None: nothing, or no token has one."""
        if slots is None or not hasattr(self, f"gate{A}"):
            return None
        names = (f"{name}{which}" for name in ("gate", "up", "down") for which in (A, B))
        return Adapted(slots, *(getattr(self, name)[...] for name in names))


class MoE(Part):
    """The feed-forward part of experts, of which every token uses few; see `models/experts.py`."""

    router: nnx.Param
    router_bias: nnx.Param  # with experts.has_bias
    router_correction: nnx.Param  # with experts.has_correction, float32
    experts: OwnExperts
    shared: MLP  # with experts.shared_intermediate_size
    shared_gate: nnx.Param  # with experts.has_shared_gate

    def __init__(self, config: ModelConfig, params: Params):
        parts = {"experts": OwnExperts, "shared": MLP}
        super().__init__(config, {name: params[name] for name in params if name not in parts})
        for name, part in parts.items():
            if name in params:
                setattr(self, name, part(config, params[name]))

    def __call__(self, x: Float[Array, "tokens hidden"], context: Context) -> Addend:
        """Return what is added to the stream."""
        return self._experts(x, self._layer(context), context, self._shared(x, context))

    def _experts(
        self,
        x: Float[Array, "tokens hidden"],
        layer: ExpertLayer,
        context: Context,
        shared: Float[Array, "tokens hidden"] | None = None,
    ) -> Addend:
        """Return what experts make of tokens; who counts is given what to count."""
        out, counted = expert_layer(x, layer, shared)
        if context.counted is not None:
            context.counted.append(counted)
        return out

    def _layer(self, context: Context) -> ExpertLayer:
        assert self.config.experts is not None
        num_tokens = context.metadata.query_start_loc[-1]
        own = self.config.experts, self.router[...], self.experts.weights
        step = num_tokens, context.parallel, context.experts, self.config.activation
        beside = self._of_router("router_bias"), self._of_router("router_correction")
        layer = ExpertLayer(*own, *step, *beside, tells=context.tells)
        return layer._replace(adapted=self.experts.adapted(context.all_slots))

    def _of_router(self, name: str) -> Float[Array, " experts"] | None:
        param = getattr(self, name, None)
        return None if param is None else param[...]

    def _shared(
        self, x: Float[Array, "tokens hidden"], context: Context
    ) -> Float[Array, "tokens hidden"] | None:
        """Return what this device adds to the output of the expert that every token uses.

        Where numerics are strict, what all do, in float32.
        """
        if not hasattr(self, "shared"):
            return None
        out = self.shared.partial(x, context)
        if context.parallel.numerics.is_strict:  # before the gate: it rounds
            out = context.parallel.sum(out, jnp.float32)
        if not hasattr(self, "shared_gate"):
            return out
        logit = jnp.einsum(
            "th,oh->to", x, self.shared_gate[...], preferred_element_type=jnp.float32
        )
        return out * jax.nn.sigmoid(logit).astype(out.dtype)
