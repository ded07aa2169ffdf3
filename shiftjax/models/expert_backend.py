"""Which grouped product layers of experts use: a table, chosen once at build time, as attention is.

    xla       a loop over tiles: every platform, shape and format
    pallas    Mosaic kernels (`pallas_kernels/grouped.py`): where attention runs as kernels, and the
              sizes of the experts are those that they have

What keeps a machine from running attention's kernels keeps it from running these.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_work import ExpertWeights, Routed
from shiftjax.arch.config import Activation, ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.models.gpu_software import what_tracing_says
from shiftjax.models.product_backend import GATES
from shiftjax.models.tiles import tile_loop
from shiftjax.parallel.blocks import BLOCK
from shiftjax.parallel.grid import Device
from shiftjax.parallel.stored import codes_in

logger = logging.getLogger(__name__)
TRACED_TOKENS = 8


class ExpertBackend(NamedTuple):
    """One implementation of the gated MLPs of a device's experts."""

    name: str
    # (x, weights, routed, gains, activation, pairs of an expert on average) -> [tokens, k, hidden]:
    # own pairs' gain * down(silu(gate x) * up x), other pairs are unspecified
    multiply: Callable[[jax.Array, ExpertWeights, Routed, jax.Array, Activation, float], jax.Array]
    reason: str = ""  # why this one was chosen


XLA_EXPERTS = ExpertBackend(  # tiles are small, whatever an expert gets
    "xla", lambda *step_and_pairs: tile_loop(*step_and_pairs[:-1])
)


def pallas_experts(device: Device) -> ExpertBackend:
    """Return the kernels, with settings for the rows that an expert has on average."""
    from pallas_kernels.grouped import config_for, grouped_mlp

    config = config_for
    if cores := getattr(device, "core_count", None):  # not every device says
        config = functools.partial(config_for, cores=cores)

    def multiply(
        x: jax.Array,
        weights: ExpertWeights,
        routed: Routed,
        gains: jax.Array,
        activation: Activation,
        mean_pairs: float,
    ) -> jax.Array:
        if len({matrix.dtype for matrix in weights[:3]}) > 1:  # as a checkpoint may have them
            return tile_loop(x, weights, routed, gains, activation)
        sizes = config(mean_pairs, weights)
        return grouped_mlp(x, weights, routed, gains, sizes, gate=GATES[activation])

    return ExpertBackend("pallas", multiply)


class ExpertShape(NamedTuple):
    """The experts of a layer, as kernels see them."""

    hidden: int
    width: int
    per_token: int
    dtype: str  # of activations; a name of `arch.formats`
    weights: str  # of the experts
    activation: Activation = "silu"
    has_bias: bool = False
    group: int = 0  # of weights of four bits: inputs that share a scale
    has_zeros: bool = False  # and zero points
    squares: int = 0  # of codes: outputs that share a scale with a block of inputs; 0: channels

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of gate, up and down."""
        inner = self.width, self.hidden
        return inner, inner, (self.hidden, self.width)


def expert_shape(model: ModelConfig, formats: Formats) -> ExpertShape | None:
    """Return that of a model; None: it has no experts."""
    experts = model.experts
    if experts is None:
        return None
    sizes = model.hidden_size, experts.intermediate_size, experts.per_token
    beside = model.activation, experts.has_bias
    shape = ExpertShape(*sizes, formats.activations, formats.weights, *beside)
    codes = codes_in(model, formats)
    if codes is None:
        return shape
    if FORMATS[formats.weights].is_packed:
        return shape._replace(group=codes.group, has_zeros=codes.has_zeros)
    return shape._replace(squares=codes.rows_of_scale)


def choose_experts(
    model: ModelConfig, formats: Formats, device: Device, attention: str
) -> ExpertBackend:
    """Return the kernels if `attention`, by name, are kernels and the sizes allow it; else loops.

    Warns of loops beside kernels.
    """
    shape = expert_shape(model, formats)
    if shape is None or "pallas" not in attention:
        return XLA_EXPERTS._replace(reason=f"attention runs as {attention}")
    reason = why_not_traced(shape)
    if reason is None:
        return pallas_experts(device)
    logger.warning(
        "experts on %s run as XLA loops, several times slower than the kernels: %s",
        device.device_kind,
        reason,
    )
    return XLA_EXPERTS._replace(reason=reason)


def why_not_traced(shape: ExpertShape) -> str | None:
    """Trace a small step; return what the kernels cannot do, in their own words."""
    from pallas_kernels.grouped import grouped_mlp

    pairs = TRACED_TOKENS, shape.per_token
    routed = Routed(
        jax.ShapeDtypeStruct((math.prod(pairs),), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    x = jax.ShapeDtypeStruct((TRACED_TOKENS, shape.hidden), FORMATS[shape.dtype].dtype)
    gains = jax.ShapeDtypeStruct(pairs, jnp.float32)
    return what_tracing_says(
        lambda: jax.eval_shape(grouped_mlp, x, _abstract_weights(shape), routed, gains)
    )


def _abstract_weights(shape: ExpertShape) -> ExpertWeights:
    """Return an expert's arrays as shapes."""
    weights, scales, zeros = FORMATS[shape.weights], [None] * 3, [None] * 3
    outputs, sizes = [size[:1] for size in shape.matrices], shape.matrices
    if weights.is_packed:
        groups = [(n // (shape.group or n), out) for out, n in shape.matrices]
        scales = [jax.ShapeDtypeStruct((1, *one), weights.scale) for one in groups]
        zeros = [jax.ShapeDtypeStruct((1, *one), jnp.uint8) for one in groups]
        sizes = [(out, n // 2) for out, n in shape.matrices]
    elif weights.has_scales:
        sizes_of_scales = outputs
        if shape.squares:
            sizes_of_scales = [(n // shape.squares, -(-m // BLOCK)) for n, m in shape.matrices]
        scales = [jax.ShapeDtypeStruct((1, *each), jnp.float32) for each in sizes_of_scales]
    matrices = [jax.ShapeDtypeStruct((1, *size), weights.dtype) for size in sizes]
    dtype = FORMATS[shape.dtype].dtype
    biases = [jax.ShapeDtypeStruct((1, *out), dtype) for out in outputs]
    return ExpertWeights(
        *matrices,
        *scales,
        *(biases if shape.has_bias else [None] * 3),
        *(zeros if shape.has_zeros else [None] * 3),
    )
