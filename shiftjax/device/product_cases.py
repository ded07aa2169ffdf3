"""What products of codes and of numbers must get right before they serve; see `attention_cases`.

Held against XLA's version on the same device, with matrices as large as the deployment's. Those
with as many inputs are cut alike: the least and the largest of them stand for all.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shiftjax.arch.formats import FORMATS
from shiftjax.device.expert_cases import wrong_rows
from shiftjax.device.mesh import on_each
from shiftjax.models.operands import Groups, LowRank, kept
from shiftjax.models.product_backend import (
    XLA_PRODUCTS,
    CodeMatrix,
    CodeShape,
    Gated,
    ProductBackend,
    plain_block,
    why_not_codes,
)
from shiftjax.models.products import (
    BLOCK,
    Activations,
    Codes,
    Matrix,
    gate_with,
    numbers,
    project_in,
    project_joined,
    project_out,
)
from shiftjax.parallel.grid import Device

TOKENS = 20, 300  # tiles of few rows, cut where there are few of them; and of 128
PLAIN_TOKENS = 12, 64  # of numbers few rows alone: the smallest tile and the largest
PARTS = "joined matrices, in parts"  # that are added up later
GROUPS = "groups of channels"  # of which a token keeps its own
MOST_ERROR = 1e-2  # of a token, relative to its norm: a scale of another block is more
MOST_OF_CODES = 5e-2  # codes keep 4 bits: 2^-5 of a number

Multiply = Callable[[Activations, tuple[Matrix, ...]], jax.Array]


class CodeStep(NamedTuple):
    """A product of some tokens: with a matrix, with two of its size, or with gate and up."""

    matrix: CodeMatrix
    tokens: int
    kind: str = "a matrix"  # or "joined matrices", PARTS, "gate and up", or GROUPS
    is_plain: bool = False  # numbers
    is_added_to: bool = False  # by factors of adapters

    @property
    def name(self) -> str:
        """For people."""
        what = "numbers" if self.is_plain else "codes"
        more = " and adapters" if self.is_added_to else ""
        return f"{what} of {self.tokens} tokens with {self.kind} of {self.matrix}{more}"

    @property
    def is_gated(self) -> bool:
        """Whether what comes out is activated."""
        return self.kind == "gate and up"

    @property
    def are_codes(self) -> bool:
        """Whether codes come out."""
        return self.is_gated and not self.is_plain and self.matrix.outputs % BLOCK == 0


def code_steps(shape: CodeShape) -> Iterator[CodeStep]:
    """Yield steps of few rows and of many, of matrices that kernels multiply.

    What adapters add is tried in the largest tile of few rows alone.
    """
    alike: dict[tuple[int, int], list[CodeMatrix]] = {}
    for matrix in shape.matrices:
        if why_not_codes(shape, matrix) is None:
            alike.setdefault((matrix.inputs, matrix.block), []).append(matrix)
    for matrices in alike.values():
        for matrix in dict.fromkeys((min(matrices), max(matrices))):
            kinds = ["a matrix"]
            if not matrix.block:
                joined = ["joined matrices", PARTS] if matrix.outputs % BLOCK == 0 else []
                kinds += [*joined, "gate and up"]
            some = PLAIN_TOKENS if shape.is_plain else TOKENS
            steps = [CodeStep(matrix, tokens, kind) for kind in kinds for tokens in some]
            if shape.slots and matrix == max(matrices):
                few = [CodeStep(matrix, PLAIN_TOKENS[-1], kind) for kind in kinds[-3:]]
                steps += [step._replace(is_added_to=True) for step in few]
            yield from (step._replace(is_plain=shape.is_plain) for step in steps)
        if shape.slots:
            yield CodeStep(max(matrices), PLAIN_TOKENS[-1], GROUPS, is_plain=True)


def draw(shape: CodeShape, step: CodeStep) -> tuple[Activations, tuple[Matrix, ...]]:
    """Return tokens and matrices, made where they are used; scales differ from block to block."""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    x, (values, scale) = shape.arrays(step.matrix, step.tokens)
    unit, count = step.matrix.inputs**-0.5, 1 if step.kind in ("a matrix", GROUPS) else 2

    def plain(like: jax.ShapeDtypeStruct, size: float) -> jax.Array:
        return size * jax.random.normal(next(keys), like.shape, like.dtype)

    def added_to(matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
        if not step.is_added_to:
            return matrices
        width, is_row = shape.slots * shape.rank, bool(step.matrix.block)
        make = functools.partial(jax.ShapeDtypeStruct, dtype=FORMATS[shape.dtype].dtype)
        inner = plain(make((step.tokens, count * width)), 1.0)
        size = (width, step.matrix.outputs)[:: 1 if is_row else -1]
        factors = (plain(make(size), width**-0.5) for _ in range(count))
        own = (LowRank(inner, n * width, factor, is_row) for n, factor in enumerate(factors))
        return tuple(m._replace(added=one) for m, one in zip(matrices, own, strict=True))

    if step.kind == GROUPS:
        tokens, factor = _groups_like(shape, step)
        return plain(tokens, 1.0), (Matrix(plain(factor, unit)),)
    if step.is_plain:
        numbers = (plain(values, unit) for _ in range(count))
        return plain(x[0], 1.0), added_to(tuple(map(Matrix, numbers)))

    def codes(size: tuple[int, ...]) -> jax.Array:
        drawn = jax.random.uniform(next(keys), size, minval=-2.0, maxval=2.0)
        return drawn.astype(FORMATS["fp8"].dtype)

    def scales(size: tuple[int, ...], unit: float) -> jax.Array:
        return unit * jnp.exp2(jax.random.uniform(next(keys), size, minval=-2.0, maxval=2.0))

    tokens = Codes(codes(x[0].shape), scales(x[1].shape, 1.0))
    matrices = (Matrix(codes(values.shape), scales(scale.shape, unit)) for _ in range(count))
    return tokens, added_to(tuple(matrices))


def _groups_like(
    shape: CodeShape, step: CodeStep
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Describe tokens, and factors of all slots that read what a matrix reads."""
    width, inputs = shape.slots * shape.rank, step.matrix.inputs
    block = plain_block(inputs) if step.matrix.block else None
    size = (width, inputs) if block is None else (inputs // block, block, width)
    make = functools.partial(jax.ShapeDtypeStruct, dtype=FORMATS[shape.dtype].dtype)
    return make((step.tokens, inputs)), make(size)


def _groups_of(shape: CodeShape, step: CodeStep) -> Groups:
    """Return the groups of tokens, each in turn."""
    return Groups(shape.slots, shape.rank, jnp.arange(step.tokens) % shape.slots)


def outputs_of(
    multiply: Multiply, shape: CodeShape, step: CodeStep, devices: Sequence[Device]
) -> Callable[[], np.ndarray]:
    """Compile a step, the same on every device; what comes back runs it: [devices, tokens, out]."""

    return on_each(lambda: multiply(*draw(shape, step)).astype(jnp.float32), devices)


def kernels(shape: CodeShape, step: CodeStep, backend: ProductBackend) -> Multiply:
    """Return what multiplies with kernels; raises ValueError where they leave it to XLA."""
    dtype = FORMATS[shape.dtype].dtype

    def multiply(x: Activations, matrices: tuple[Matrix, ...]) -> jax.Array:
        coded = x if isinstance(x, Codes) else (x, None)
        own = tuple(matrix.operand for matrix in matrices)
        if step.kind == GROUPS:
            out = backend.grouped(coded[0], own[0], _groups_of(shape, step))
        elif step.is_gated:
            out = backend.gated(coded, own, Gated(shape.activation, step.are_codes), dtype)
        elif step.kind == PARTS:
            out = backend.parts(coded, own, dtype)
            if out is not None and out.ndim == 3:
                channels = sum(matrix.values.shape[0] for matrix in matrices)
                out = out.sum(axis=0)[:channels, : step.tokens].T.astype(dtype)
        else:
            out = backend.multiply(coded, own, dtype)
        if out is None:
            raise ValueError(f"there is no kernel for {step.name}")
        return numbers(Codes(*out), BLOCK, jnp.float32) if step.are_codes else out

    return multiply


def operations(shape: CodeShape, step: CodeStep) -> Multiply:
    """Return what XLA multiplies, which the kernels are held against."""
    dtype = FORMATS[shape.dtype].dtype

    def multiply(x: Activations, matrices: tuple[Matrix, ...]) -> jax.Array:
        if step.kind == GROUPS:
            values = matrices[0].values
            values = values.reshape(-1, values.shape[-1]).T if values.ndim == 3 else values
            out = project_out(x, Matrix(values), dtype=dtype)
            return kept(out, _groups_of(shape, step))
        if step.matrix.block:
            values = matrices[0].values
            if step.is_plain:
                values = values.reshape(-1, values.shape[-1])
            return project_in(x, matrices[0]._replace(values=values), dtype=dtype)
        if step.is_gated:  # in float32: the kernel rounds neither gate nor up
            outs = project_joined(x, matrices, XLA_PRODUCTS, jnp.float32)
            return gate_with(shape.activation, *outs)
        return jnp.concatenate(project_joined(x, matrices, XLA_PRODUCTS, dtype), axis=1)

    return multiply


def wrong_with_products(
    outputs: Sequence[np.ndarray], expected: np.ndarray, step: CodeStep
) -> str | None:
    """Say what is wrong with the outputs of one device, a run each; `expected` are XLA's."""
    most = MOST_OF_CODES if step.are_codes else MOST_ERROR
    return wrong_rows(outputs, expected, most, "a token's product")
