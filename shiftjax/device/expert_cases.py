"""What the grouped product of experts must get right before it serves; see `attention_cases`.

Held against XLA's loop on the same device, which `ptxas` has no part in. Experts are as large as
the deployment's, but few. Tokens that no expert of the device has are NaN, and one expert has none.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped import GroupedConfig, config_for, grouped_mlp
from pallas_kernels.grouped_codes import most_rows
from pallas_kernels.grouped_work import ExpertWeights, Routed, sort_pairs
from shiftjax.arch.formats import FORMATS
from shiftjax.device.mesh import on_each
from shiftjax.models.expert_backend import ExpertShape
from shiftjax.models.product_backend import GATES
from shiftjax.models.tiles import tile_loop
from shiftjax.parallel.blocks import BLOCK
from shiftjax.parallel.grid import Device

NUM_EXPERTS = 3  # at most
OTHERS = NUM_EXPERTS  # of another device
# Relative error of a pair in the norm. The loop rounds once more between its products; codes that
# are near a tie then differ by a step, 6% to 12% of themselves.
MOST_ERROR, MOST_ERROR_OF_CODES = 2e-2, 5e-2

Multiply = Callable[[jax.Array, ExpertWeights, Routed, jax.Array], jax.Array]


class ExpertStep(NamedTuple):
    """Tokens and their experts, in tiles of `rows`."""

    name: str
    rows: int
    chosen: np.ndarray  # [tokens, k]; OTHERS for those of other devices
    is_cut: bool = False  # whether contractions are, as for a single sequence

    @property
    def is_own(self) -> np.ndarray:
        """Which pairs are this device's."""
        return self.chosen != OTHERS

    @property
    def routed(self) -> Routed:
        """Pairs sorted by expert."""
        return sort_pairs(self.chosen, OTHERS)


def expert_steps(per_token: int) -> Iterator[ExpertStep]:
    """Yield decodes in the smallest tiles, cut and whole, and a chunk in the largest, some full."""
    rng = np.random.default_rng(0)
    for tokens, rows, is_cut in ((20, 16, True), (20, 16, False), (300, 128, False)):
        chosen = rng.choice([0, 2, OTHERS], (tokens, per_token))  # nothing for expert 1
        name = f"experts of {tokens} tokens{', cut' * is_cut}"
        yield ExpertStep(name, rows, chosen, is_cut)


def draw(shape: ExpertShape, is_used: jax.Array) -> tuple[jax.Array, ExpertWeights]:
    """Return tokens, NaN where not used, and weights; made where they are used: they are large."""
    dtype, weights = FORMATS[shape.dtype].dtype, FORMATS[shape.weights]
    sizes = [(NUM_EXPERTS, *size) for size in shape.matrices]
    key, *keys = jax.random.split(jax.random.key(0), 7)
    x = jax.random.uniform(key, (is_used.shape[0], shape.hidden), minval=-2.0, maxval=2.0)
    x = jnp.where(is_used[:, None], x, jnp.nan).astype(dtype)
    biases: list[jax.Array | None] = [None] * 3
    if shape.has_bias:
        biases = [
            jax.random.uniform(key, size[:2], minval=-2.0, maxval=2.0).astype(dtype)
            for key, size in zip(keys[3:], sizes, strict=True)
        ]
    exponents = [-round(math.log2(size[2]) / 2) for size in sizes]
    if GATES[shape.activation].limit:  # so that some are beyond it
        exponents[:2] = [2 + exponent for exponent in exponents[:2]]
    if weights.is_packed:
        parts = [
            _draw_packed(shape, key, size, exponent)
            for key, size, exponent in zip(keys[:3], sizes, exponents, strict=True)
        ]
        codes, scales, zeros = zip(*parts, strict=True)
        return x, ExpertWeights(*codes, *scales, *biases, *zeros)
    matrices = [
        jax.random.uniform(key, size, minval=-2.0, maxval=2.0)
        for key, size in zip(keys[:3], sizes, strict=True)
    ]
    units = [2.0**exponent for exponent in exponents]
    if not weights.has_scales:
        scaled = [m * unit for m, unit in zip(matrices, units, strict=True)]
        return x, ExpertWeights(*(m.astype(weights.dtype) for m in scaled), *[None] * 3, *biases)
    codes = [(m * 128).astype(weights.dtype) for m in matrices]
    scales = [
        _draw_scales(shape, key, size, unit / 128)
        for key, size, unit in zip(keys[3:], sizes, units, strict=True)
    ]
    return x, ExpertWeights(*codes, *scales, *biases)


def _draw_scales(
    shape: ExpertShape, key: jax.Array, size: tuple[int, ...], unit: float
) -> jax.Array:
    """Return scales of codes, which differ from channel to channel, or from square to square."""
    experts, outputs, inputs = size
    sizes = (outputs,)
    if shape.squares:
        sizes = outputs // shape.squares, -(-inputs // BLOCK)
    return unit * jnp.exp2(jax.random.uniform(key, (experts, *sizes), minval=-1.0, maxval=1.0))


def _draw_packed(
    shape: ExpertShape, key: jax.Array, size: tuple[int, ...], exponent: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return codes of four bits, scales and zero points: numbers of about 2^exponent.

    Scales differ from group to group.
    """
    experts, outputs, inputs = size
    keys = jax.random.split(key, 3)
    codes = jax.random.bits(keys[0], (experts, outputs, inputs // 2), jnp.uint8)
    groups = experts, inputs // (shape.group or inputs), outputs
    if FORMATS[shape.weights].scale == np.uint8:
        scale = 127 + exponent - jax.random.randint(keys[1], groups, 1, 3)
        return codes, scale.astype(jnp.uint8), None
    scale = 2.0**exponent * jax.random.uniform(keys[1], groups, minval=0.1, maxval=0.4)
    zero = jax.random.randint(keys[2], groups, 4, 13).astype(jnp.uint8)
    return codes, scale, zero if shape.has_zeros else None


def outputs_of(
    multiply: Multiply, shape: ExpertShape, step: ExpertStep, devices: Sequence[Device]
) -> Callable[[], np.ndarray]:
    """Compile a step, the same on every device; what comes back runs it: [devices, own, hidden]."""

    def run(is_used: jax.Array, routed: Routed, gains: jax.Array) -> jax.Array:
        return multiply(*draw(shape, is_used), routed, gains)

    gains = np.linspace(0.5, 1, step.chosen.size, dtype=np.float32).reshape(step.chosen.shape)
    outputs = on_each(run, devices, step.is_own.any(axis=1), step.routed, gains)
    return lambda: outputs()[:, step.is_own]


def loop(shape: ExpertShape) -> Multiply:
    """Return XLA's loop, which the kernels are held against."""
    return functools.partial(tile_loop, activation=shape.activation)


def kernels(shape: ExpertShape, step: ExpertStep) -> Multiply:
    """Return the kernels with the step's tiles."""
    gate = GATES[shape.activation]

    def multiply(
        x: jax.Array, weights: ExpertWeights, routed: Routed, gains: jax.Array
    ) -> jax.Array:
        rows = min(step.rows, most_rows(weights))
        config = config_for(0.0, weights) if step.is_cut else GroupedConfig(rows)
        return grouped_mlp(x, weights, routed, gains, config, gate=gate)

    return multiply


def wrong_with_pairs(
    outputs: Sequence[np.ndarray], expected: np.ndarray, shape: ExpertShape
) -> str | None:
    """Say what is wrong with the own pairs of one device, a run each; `expected` are the loop's."""
    weights = FORMATS[shape.weights]
    are_codes = weights.has_scales and not weights.is_packed
    most = MOST_ERROR_OF_CODES if are_codes else MOST_ERROR
    return wrong_rows(outputs, expected, most, "a pair of a token and an expert")


def wrong_rows(
    outputs: Sequence[np.ndarray], expected: np.ndarray, most: float, what: str
) -> str | None:
    """Say what is wrong with rows that were computed some times; `most` error of one's norm."""
    if any(later.tobytes() != outputs[0].tobytes() for later in outputs[1:]):
        return "numbers change from run to run"
    got, right = (array.astype(np.float64) for array in (outputs[0], expected))
    error = np.linalg.norm(got - right, axis=1) / np.linalg.norm(right, axis=1)
    if not (error < most).all():  # NaN is not
        return f"{what} is off by {error.max():.2g} of its norm"
    return None
