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
from jax.typing import DTypeLike

from pallas_kernels.grouped_work import ExpertWeights, Routed
from shiftjax.arch.config import ModelConfig
from shiftjax.models.tiles import PLAIN, Gated, tile_loop
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout

logger = logging.getLogger(__name__)
TRACED_TOKENS = 8


class ExpertBackend(NamedTuple):
    """One implementation of the gated MLPs of a device's experts."""

    name: str
    # (x, weights, routed, gains, gated, pairs of an expert on average) -> [tokens, k, hidden]: own
    # pairs' gain * down(silu(gate x) * up x), other pairs are unspecified
    multiply: Callable[[jax.Array, ExpertWeights, Routed, jax.Array, Gated, float], jax.Array]
    reason: str = ""  # why this one was chosen


def _loop(
    x: jax.Array,
    weights: ExpertWeights,
    routed: Routed,
    gains: jax.Array,
    gated: Gated,
    mean_pairs: float,
) -> jax.Array:
    del mean_pairs  # tiles are small, whatever an expert gets
    return tile_loop(x, weights, routed, gains, gated)


XLA_EXPERTS = ExpertBackend("xla", _loop)


def pallas_experts(device: Device) -> ExpertBackend:
    """Return the kernels, with tiles as high as an expert has rows on average."""
    from pallas_kernels.grouped import config_for, grouped_mlp

    config = functools.partial(config_for, experts=1)
    if cores := getattr(device, "core_count", None):  # not every device says
        config = functools.partial(config, cores=cores)

    def multiply(
        x: jax.Array,
        weights: ExpertWeights,
        routed: Routed,
        gains: jax.Array,
        gated: Gated,
        mean_pairs: float,
    ) -> jax.Array:
        assert gated.activation == PLAIN.activation and gated.gate_bias is None
        return grouped_mlp(x, weights, routed, gains, config(math.ceil(mean_pairs)))

    return ExpertBackend("pallas", multiply)


def choose_experts(
    layout: Layout, device: Device, dtype: DTypeLike, weight_dtype: DTypeLike, attention: str
) -> ExpertBackend:
    """Return the kernels if `attention`, by name, are kernels and the sizes allow it; else loops.

    `weight_dtype` is that of the experts, codes perhaps. Warns of loops beside kernels.
    """
    if layout.model.experts is None or attention != "pallas":
        return XLA_EXPERTS._replace(reason=f"attention runs as {attention}")
    kernels = pallas_experts(device)
    reason = why_not_plain(layout.model) or _why_not_traced(kernels, layout, dtype, weight_dtype)
    if reason is None:
        return kernels
    logger.warning(
        "experts on %s run as XLA loops, several times slower than the kernels: %s",
        device.device_kind,
        reason,
    )
    return XLA_EXPERTS._replace(reason=reason)


def why_not_plain(model: ModelConfig) -> str | None:
    """Say what an expert of the model computes that the kernels do not."""
    assert model.experts is not None
    if model.activation != "silu":
        return f"the kernels have the activation silu, not {model.activation}"
    return "the kernels add no biases" if model.experts.has_bias else None


def _why_not_traced(
    kernels: ExpertBackend, layout: Layout, dtype: DTypeLike, weight_dtype: DTypeLike
) -> str | None:
    """Trace a small step; return what the kernels cannot do, in their own words."""
    experts, hidden = layout.model.experts, layout.model.hidden_size
    assert experts is not None
    num, width, k = layout.num_experts // layout.num_devices, experts.intermediate_size, 1
    shapes = (num, width, hidden), (num, width, hidden), (num, hidden, width)
    weights = [jax.ShapeDtypeStruct(shape, weight_dtype) for shape in shapes]
    if jnp.dtype(weight_dtype) != jnp.dtype(dtype):
        weights += [jax.ShapeDtypeStruct(shape[:2], jnp.float32) for shape in shapes]
    routed = Routed(
        jax.ShapeDtypeStruct((TRACED_TOKENS * k,), jnp.int32),
        jax.ShapeDtypeStruct((num,), jnp.int32),
    )
    x = jax.ShapeDtypeStruct((TRACED_TOKENS, hidden), dtype)
    gains = jax.ShapeDtypeStruct((TRACED_TOKENS, k), jnp.float32)

    def multiply(x: jax.Array, own: ExpertWeights, routed: Routed, gains: jax.Array) -> jax.Array:
        return kernels.multiply(x, own, routed, gains, PLAIN, 1.0)

    try:
        jax.eval_shape(multiply, x, ExpertWeights(*weights), routed, gains)
    except ValueError as error:
        return str(error)
    except Exception as error:  # of a compiler under development: the loops serve as well
        logger.exception("the kernels of experts cannot be traced")
        return f"the kernels cannot be traced ({type(error).__name__})"
    return None
