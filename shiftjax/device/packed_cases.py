"""What products with matrices of four bits must get right before they serve; see `expert_cases`.

Held against XLA's loop on the same device, with matrices as large as the deployment's. Those that
modes split differently have as many inputs: the least and the largest of them stand for all.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dense import DenseWeights, dense_product
from shiftjax.arch.formats import FORMATS
from shiftjax.device.expert_cases import wrong_rows
from shiftjax.device.mesh import on_each
from shiftjax.models.four_bits import packed_blocks
from shiftjax.models.packed_backend import PackedMatrix, PackedShape, why_not_packed
from shiftjax.parallel.grid import Device

TOKENS = 20, 300  # tiles of 32 rows, with few of them cut; and of 128
MOST_ERROR = 2e-2  # of a token, relative to its norm: a group's scale that is wrong is more

Multiply = Callable[[jax.Array, DenseWeights], jax.Array]


class PackedStep(NamedTuple):
    """A product of some tokens."""

    matrix: PackedMatrix
    tokens: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.tokens} tokens with a matrix of {self.matrix}"


def packed_steps(shape: PackedShape) -> Iterator[PackedStep]:
    """Yield steps in small tiles and in large ones, of matrices that kernels multiply."""
    alike: dict[int, list[PackedMatrix]] = {}
    for matrix in shape.matrices:
        if why_not_packed(shape, matrix) is None:
            alike.setdefault(matrix.inputs, []).append(matrix)
    for matrices in alike.values():
        for matrix in dict.fromkeys((min(matrices), max(matrices))):
            yield from (PackedStep(matrix, tokens) for tokens in TOKENS)


def draw(shape: PackedShape, step: PackedStep) -> tuple[jax.Array, DenseWeights]:
    """Return tokens and a matrix, made where they are used; scales differ by group and output."""
    keys = jax.random.split(jax.random.key(0), 4)
    codes, scales, *zeros = shape.arrays(step.matrix)
    inputs = step.matrix.blocks * step.matrix.inputs
    x = jax.random.uniform(keys[0], (step.tokens, inputs), minval=-2.0, maxval=2.0)
    drawn: list[Any] = [jax.random.bits(keys[1], codes.shape, jnp.uint8)]
    if scales.dtype == np.uint8:
        drawn.append(jax.random.randint(keys[2], scales.shape, 118, 122).astype(jnp.uint8))
    else:
        drawn.append(jax.random.uniform(keys[2], scales.shape, minval=0.1, maxval=0.4))
    drawn += [jax.random.randint(keys[3], each.shape, 4, 13).astype(jnp.uint8) for each in zeros]
    return x.astype(FORMATS[shape.dtype].dtype), DenseWeights(*drawn)


def outputs_of(
    multiply: Multiply, shape: PackedShape, step: PackedStep, devices: Sequence[Device]
) -> Callable[[], np.ndarray]:
    """Compile a step, the same on every device; what comes back runs it: [devices, tokens, out]."""

    return on_each(lambda: multiply(*draw(shape, step)).astype(jnp.float32), devices)


def kernels(x: jax.Array, weights: DenseWeights) -> jax.Array:
    """Multiply with the kernels."""
    return dense_product(x, weights)


def loop(x: jax.Array, weights: DenseWeights) -> jax.Array:
    """Multiply with XLA's loop, which the kernels are held against."""
    return packed_blocks(x, *weights)


def wrong_with_tokens(outputs: Sequence[np.ndarray], expected: np.ndarray) -> str | None:
    """Say what is wrong with the outputs of one device, a run each; `expected` are the loop's."""
    return wrong_rows(outputs, expected, MOST_ERROR, "a token's product")
