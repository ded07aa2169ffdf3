"""How fast the experts of one device are, and whether they are right, as `measure` asks it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.grouped import GroupedConfig, config_for, grouped_mlp
from pallas_kernels.grouped_work import ExpertWeights, Routed, sort_pairs
from pallas_kernels.measure import (
    FOUR_BIT_GROUPS,
    Calls,
    Effort,
    ExpertsShape,
    chain_seconds,
)
from pallas_kernels.mosaic import FP8


def make_weights(shape: ExpertsShape) -> ExpertWeights:
    """Return random weights that keep the size of what they multiply; on the default device."""

    @jax.jit
    def make(seed: jax.Array) -> ExpertWeights:
        keys, (inner, outer) = jax.random.split(seed, 3), (shape.width, shape.hidden)
        sizes = [(shape.own, inner, outer)] * 2 + [(shape.own, outer, inner)]
        if shape.dtype in FOUR_BIT_GROUPS:
            parts = [_draw_codes(shape, *one) for one in zip(keys, sizes, strict=True)]
            return ExpertWeights(*[codes for codes, _ in parts], *[scale for _, scale in parts])
        matrices = [
            (jax.random.normal(key, size, jnp.bfloat16) * jnp.bfloat16(size[2] ** -0.5))
            for key, size in zip(keys, sizes, strict=True)
        ]
        if jnp.dtype(shape.dtype) != FP8:
            return ExpertWeights(*matrices)
        scales = [jnp.full(size[:2], 2.0**-7, jnp.float32) for size in sizes]
        return ExpertWeights(*[(m * jnp.bfloat16(128)).astype(FP8) for m in matrices], *scales)

    return make(jax.random.key(1))


def _draw_codes(
    shape: ExpertsShape, key: jax.Array, size: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return random codes of four bits, and scales of which no two neighbours need be the same."""
    (experts, outputs, inputs), (group, dtype) = size, FOUR_BIT_GROUPS[shape.dtype]
    of_codes, of_scales = jax.random.split(key)
    codes = jax.random.bits(of_codes, (experts, outputs, inputs // 2), jnp.uint8)
    less = jax.random.randint(of_scales, (experts, inputs // group, outputs), 1, 3)
    exponent = -round(math.log2(inputs) / 2) - less
    if dtype == "uint8":
        return codes, (127 + exponent).astype(jnp.uint8)
    return codes, jnp.exp2(exponent.astype(jnp.float32)) * 0.7


def experts_calls(shape: ExpertsShape, config: GroupedConfig | None, effort: Effort) -> Calls:
    """Return calls of a layer's experts, each of which adds their sum to x."""
    chosen = shape.chosen()
    routed = sort_pairs(np.where(chosen < 0, shape.own, chosen), shape.own)
    weights = make_weights(shape)
    config = config or config_for(chosen.size / shape.experts, weights)

    def call(x, weights, routed, gains, is_own):
        return x + added(x, weights, routed, gains, is_own, config, effort).astype(x.dtype)

    x = jax.random.normal(jax.random.key(2), (shape.tokens, shape.hidden), jnp.bfloat16)
    gains = np.full(chosen.shape, 1 / shape.k, np.float32)
    return Calls(call, x, [(weights, routed, gains, chosen >= 0)])


def added(
    x: jax.Array,
    weights: ExpertWeights,
    routed: Routed,
    gains: jax.Array,
    is_own: jax.Array,
    config: GroupedConfig,
    effort: Effort,
) -> jax.Array:
    """Return the sum over a token's experts, [tokens, hidden] float32."""
    parts = grouped_mlp(x, weights, routed, gains, config, effort.interpret)
    return jnp.where(is_own[..., None], parts.astype(jnp.float32), 0).sum(axis=1)


def experts_seconds(shape: ExpertsShape, config: GroupedConfig | None, effort: Effort) -> float:
    """Time the experts of a layer. Weights are several times what the chip caches: one turn."""
    return chain_seconds(experts_calls(shape, config, effort), effort)


def experts_error(shape: ExpertsShape, config: GroupedConfig | None, effort: Effort) -> float:
    """Return the relative error of the sum over experts in the norm, against float64."""
    calls = experts_calls(shape, config, effort)
    (turn,) = calls.turns
    weights, _, gains, _ = turn
    config = config or config_for(shape.chosen().size / shape.experts, weights)

    def sums(x, weights, routed, gains, is_own):
        return added(x, weights, routed, gains, is_own, config, effort)

    out = jax.jit(sums)(calls.first, *turn)
    expected = reference.experts(np.asarray(calls.first), weights, shape.chosen(), gains).sum(
        axis=1
    )
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def trace_experts(shape: ExpertsShape) -> Any:
    """Trace what `experts_seconds` would time, computing nothing; raises what that would."""

    def one() -> Any:
        call, first, turns = experts_calls(shape, None, Effort())
        return call(first, *jax.tree.map(jnp.asarray, turns[0]))

    return jax.eval_shape(one)
