"""What the kernel of the residual stream must get right before it serves; see `attention_cases`.

Held against the model's own operations on the same device. Codes are compared as the numbers that
they say, in blocks that differ in size: a scale of another block is off by a factor.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shiftjax.arch.formats import FORMATS
from shiftjax.device.expert_cases import wrong_rows
from shiftjax.device.mesh import on_each
from shiftjax.models.layers import rms_norm
from shiftjax.models.norm_backend import NormBackend, NormShape, pallas_norms
from shiftjax.models.products import BLOCK, Activations, Codes, numbers, quantise_blocks
from shiftjax.models.stream import Addend, Stream
from shiftjax.parallel.grid import Device

ROWS = 70
MOST_ERROR = 1e-2  # of a row, relative to its norm
MOST_OF_CODES = 5e-2  # codes keep 4 bits: 2^-5 of a number


class NormStep(NamedTuple):
    """Rows, and whether they become codes."""

    codes: bool

    @property
    def name(self) -> str:
        """For people."""
        return "codes of norms" if self.codes else "norms"


def norm_steps(shape: NormShape) -> Iterator[NormStep]:
    """Yield norms as numbers, and as codes where products read such."""
    yield from (NormStep(codes) for codes in (False, True)[: 1 + shape.codes])


def draw(shape: NormShape) -> tuple[Stream, jax.Array]:
    """Return a stream with what is added to it, and a weight, made where they are used."""
    keys, dtype = jax.random.split(jax.random.key(0), 5), FORMATS[shape.dtype].dtype
    size = ROWS, shape.width
    blocks = jnp.exp2(jax.random.uniform(keys[0], (-(-shape.width // BLOCK),), minval=-2, maxval=3))
    units = jnp.repeat(blocks, BLOCK)[: shape.width]
    x, added = (jax.random.normal(key, size) * units[None] for key in keys[1:3])
    weight, bias = (jax.random.normal(key, size[1:]) / 4 for key in keys[3:])
    weight = weight if shape.offset else 1 + weight
    addend = Addend(added.astype(dtype), bias.astype(dtype))
    return Stream(x.astype(dtype), addend), weight.astype(dtype)


def outputs_of(
    add_norm: Callable[[Stream, jax.Array], tuple[jax.Array, Activations]],
    shape: NormShape,
    devices: Sequence[Device],
) -> Callable[[], np.ndarray]:
    """Compile norms, the same on every device; what comes back runs them.

    It returns [devices, 2 * rows, hidden] float32: the new streams, then their norms.
    """

    def run() -> jax.Array:
        total, normed = add_norm(*draw(shape))
        if isinstance(normed, Codes):
            normed = numbers(normed, BLOCK, jnp.float32)
        return jnp.concatenate([each.astype(jnp.float32) for each in (total, normed)])

    return on_each(run, devices)


def kernels(
    step: NormStep, shape: NormShape, backend: NormBackend | None = None
) -> Callable[[Stream, jax.Array], tuple[jax.Array, Activations]]:
    """Return what adds and norms with the kernel; `backend` is for tests alone."""
    add_norm = (backend or pallas_norms(shape)).add_norm
    assert add_norm is not None
    return lambda stream, weight: add_norm(stream, weight, lambda x, _: x, step.codes)


def operations(
    step: NormStep, shape: NormShape
) -> Callable[[Stream, jax.Array], tuple[jax.Array, Activations]]:
    """Return the model's own operations, which the kernel is held against."""

    def add_norm(stream: Stream, weight: jax.Array) -> tuple[jax.Array, Activations]:
        x = stream.whole(lambda x, _: x, shape.scale)
        weight = 1.0 + weight.astype(jnp.float32) if shape.offset else weight
        normed = rms_norm(x, weight, shape.eps, in_float32=shape.in_float32)
        return x, quantise_blocks(normed) if step.codes else normed

    return add_norm


def wrong_with_norms(
    outputs: Sequence[np.ndarray], expected: np.ndarray, step: NormStep
) -> str | None:
    """Say what is wrong with the outputs of one device, a run each."""
    streams = [out[:ROWS] for out in outputs], expected[:ROWS]
    norms = [out[ROWS:] for out in outputs], expected[ROWS:]
    most = MOST_OF_CODES if step.codes else MOST_ERROR
    return wrong_rows(*streams, MOST_ERROR, "a row of the stream") or wrong_rows(
        *norms, most, "a row's norm"
    )
