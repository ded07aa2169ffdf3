"""Products with a layer's matrices, which are plain numbers or codes in units of scales.

Codes are e4m3, and so are their inputs then; those of four bits are widened (`four_bits.py`).

Activations have a scale for each token and block of inputs. What a block is follows from the model
alone (`parallel/blocks.py`): neither the other tokens of a step, nor its mode, nor the number of
devices changes a code. Weights have a scale for each output channel, or for each block of a
checkpoint that has such.

Kernels multiply codes where they can, and numbers of few rows (`product_backend.py`). What is here
is the XLA version: what CPUs run, and what kernels are compared with. A number is its code times
its scale, rounded to bfloat16, which changes it far less than the code does; where results are
float32, nothing is rounded. Sums are float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Real

from pallas_kernels.grouped_split import PART, Items, parts_of
from pallas_kernels.head_terms import Projected
from shiftjax.arch.config import Activation
from shiftjax.arch.traits import SWIGLU_LIMIT, SWIGLU_SLOPE
from shiftjax.models.four_bits import is_packed
from shiftjax.models.operands import Coded, LowRank, Operand, plus
from shiftjax.models.packed_backend import Product as PackedProduct
from shiftjax.models.product_backend import (
    XLA_CODES,
    XLA_PRODUCTS,
    Gated,
    ProductBackend,
    Products,
    in_plain_blocks,
)
from shiftjax.parallel.blocks import BLOCK

CODE = jnp.float8_e4m3fn
LARGEST_CODE = float(jnp.finfo(CODE).max)
LEAST_SCALED = 1e-20  # what is smaller than this in all of a block becomes zeros
CORES = 132  # multiprocessors: as many parts are worth it


class Matrix(NamedTuple):
    """A weight as a device has it in a step; see `parallel/stored.py`."""

    values: Array  # `[out, in]`; row-parallel ones `[in, out]`, or codes `[blocks, out, block]`
    # Of codes `[out]`, or of blocks `[out / rows, in / BLOCK]`, the last of inputs perhaps ragged;
    # row-parallel ones `[blocks, out / rows]`. Four bits: as they are stored. None: plain values.
    scale: Array | None = None
    inputs: Float[Array, " 1"] | None = None  # what inputs are in units of; None: each block's own
    zero: Array | None = None  # of four bits: zero points, as scales; None: 8
    added: LowRank | None = None  # to what it gives

    @property
    def operand(self) -> Operand:
        """What kernels take."""
        return Operand(self.values, self.scale, self.added)


class Codes(NamedTuple):
    """Activations as codes, in units of a scale for each token and block of inputs.

    Blocks are those of the matrices that they are for (`block_of`); the last may be ragged.
    """

    values: Float8e4m3fn[Array, "tokens in"]
    scale: Float[Array, "blocks tokens"]


Activations = Float[Array, "tokens in"] | Codes


def block_of(matrix: Matrix) -> int:
    """Return how many inputs of a matrix of codes share a scale of activations."""
    return matrix.values.shape[2] if matrix.values.ndim == 3 else BLOCK


def quantise(
    x: Float[Array, "*rows width"],
) -> tuple[Float8e4m3fn[Array, "*rows width"], Float[Array, "*rows"]]:
    """Return codes and the scale of every row, float32: codes * scale is nearly `x`.

    A row that is not finite gives a scale, and results, that are not finite.
    """
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), axis=-1)
    scale = jnp.maximum(most, LEAST_SCALED) * (1 / LARGEST_CODE)  # as XLA divides by a constant
    return (wide / scale[..., None]).astype(CODE), scale


def quantise_blocks(
    x: Float[Array, "tokens in"], block: int = BLOCK, fixed: Float[Array, " 1"] | None = None
) -> Codes:
    """Return codes of activations, each block of inputs in units of its largest number.

    With a `fixed` scale all are in units of that, and what it cannot say saturates.
    """
    num_tokens, width = x.shape
    num_blocks = -(-width // block)
    if fixed is not None:
        scaled = jnp.clip(x.astype(jnp.float32) / fixed[0], -LARGEST_CODE, LARGEST_CODE)
        return Codes(scaled.astype(CODE), jnp.broadcast_to(fixed[0], (num_blocks, num_tokens)))
    padded = jnp.pad(x, ((0, 0), (0, num_blocks * block - width)))
    codes, scale = quantise(padded.reshape(num_tokens, num_blocks, block))
    return Codes(codes.reshape(num_tokens, -1)[:, :width], scale.T)


def codes_for(x: Activations, matrix: Matrix) -> Codes:
    """Return activations as the codes that a matrix of codes multiplies."""
    return x if isinstance(x, Codes) else quantise_blocks(x, block_of(matrix), matrix.inputs)


def numbers(codes: Codes, block: int, dtype: DTypeLike) -> Float[Array, "tokens in"]:
    """Return what codes of activations say, rounded to a type."""
    width = codes.values.shape[1]
    scale = jnp.repeat(codes.scale.T, block, axis=1)[:, :width]
    return (codes.values.astype(jnp.float32) * scale).astype(dtype)


def relative_error(
    x: Float[Array, "*rows width"],
    codes: Float8e4m3fn[Array, "*rows width"],
    scale: Float[Array, "*rows"],
) -> Float[Array, ""]:
    """Return by how much codes differ from numbers, relative to each: the mean of those not 0.

    A number that has become 0 counts as 1, however small it is beside the others.
    """
    wide = jnp.abs(x.astype(jnp.float32))
    far = jnp.abs(wide - jnp.abs(codes.astype(jnp.float32)) * scale[..., None])
    errors = jnp.where(wide > 0, far / jnp.where(wide > 0, wide, 1), 0)
    return jnp.mean(errors) / jnp.maximum(jnp.mean((wide > 0).astype(jnp.float32)), LEAST_SCALED)


def in_blocks(codes: Real[Array, "out inputs"], num_blocks: int) -> Real[Array, "blocks out in"]:
    """Cut the inputs of a matrix in blocks."""
    return codes.reshape(codes.shape[0], num_blocks, -1).swapaxes(0, 1)


def project_out(
    x: Activations,
    matrix: Matrix,
    products: Products = XLA_PRODUCTS,
    dtype: DTypeLike | None = None,
) -> Float[Array, "tokens out"]:
    """Multiply by a column-parallel matrix, with the backends of `products`.

    The result is of `dtype`; None: of the type of x, or bfloat16 if that is codes.
    """
    out_type = result_type(x, dtype)
    if _are_codes(matrix):
        return _by_codes(x, matrix, products, out_type)
    if (plain := _if_plain(x, (matrix,))) is not None:
        out = _by_kernel(products.plain, (plain, None), (matrix,), out_type)
        if out is not None:
            return out[0]
    return _by_numbers(x, matrix, "ti,oi->to", products.packed.out, out_type)


def project_in(
    x: Activations,
    matrix: Matrix,
    products: Products = XLA_PRODUCTS,
    dtype: DTypeLike | None = None,
) -> Float[Array, "tokens out"]:
    """Multiply by a row-parallel matrix; the result, of `dtype`, wants an all-reduce."""
    out_type = result_type(x, dtype)
    if _are_codes(matrix):
        return _by_codes(x, matrix, products, out_type)
    plain = _if_plain(x, (matrix,))
    blocks = None if plain is None else in_plain_blocks(matrix.values)
    if plain is not None and blocks is not None:
        in_blocks = matrix._replace(values=blocks)
        out = _by_kernel(products.plain, (plain, None), (in_blocks,), out_type)
        if out is not None:
            return out[0]
    return _by_numbers(x, matrix, "ti,io->to", products.packed.into, out_type)


def _by_numbers(
    x: Activations, matrix: Matrix, plain: str, packed: PackedProduct, out_type: DTypeLike
) -> Float[Array, "tokens out"]:
    """Multiply by a matrix of plain numbers, or of four bits."""
    x = numbers(x, BLOCK, out_type) if isinstance(x, Codes) else x
    if matrix.scale is None:
        out = jnp.einsum(plain, x, matrix.values, preferred_element_type=out_type)
    else:
        out = packed(x, matrix.values, matrix.scale, matrix.zero).astype(out_type)
    return plus(out, matrix.added)


def _by_kernel(
    backend: ProductBackend, x: Coded, matrices: tuple[Matrix, ...], out_type: DTypeLike
) -> list[Float[Array, "tokens out"]] | None:
    """Multiply by matrices in one launch; None: XLA multiplies.

    What is added to products is part of it, or is added afterwards.
    """
    operands = tuple(matrix.operand for matrix in matrices)
    out, added = backend.multiply(x, operands, out_type), [None] * len(matrices)
    if out is None and any(operand.added is not None for operand in operands):
        bare = tuple(operand._replace(added=None) for operand in operands)
        out, added = backend.multiply(x, bare, out_type), [one.added for one in operands]
    if out is None:
        return None
    ends = np.cumsum([_outputs(matrix) for matrix in matrices])
    return list(map(plus, jnp.split(out, ends[:-1], axis=1), added))


def _outputs(matrix: Matrix) -> int:
    """Return the channels of a matrix that a kernel multiplies."""
    values = matrix.values
    return values.shape[-1 if values.ndim == 3 and matrix.scale is None else -2]


def _by_codes(
    x: Activations, matrix: Matrix, products: Products, out_type: DTypeLike
) -> Float[Array, "tokens out"]:
    """Multiply by a matrix of codes, column-parallel or in blocks of inputs."""
    codes, values, scale = codes_for(x, matrix), matrix.values, matrix.scale
    assert scale is not None
    if (out := _by_kernel(products.codes, codes, (matrix,), out_type)) is not None:
        return out[0]
    wide = _type_of_numbers(out_type)
    if scale.ndim == 1:
        weight = values.astype(wide)
    else:
        weight = (values.astype(jnp.float32) * _scale_of_each(values, scale)).astype(wide)
    x = numbers(codes, block_of(matrix), wide)
    if values.ndim == 3:
        is_few = x.shape[0] <= products.few_tokens
        out = _by_blocks(x.reshape(x.shape[0], values.shape[0], -1), weight, is_few=is_few)
    else:
        out = jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32)
    out = (out * scale[None] if scale.ndim == 1 else out).astype(out_type)
    return plus(out, matrix.added)


def _scale_of_each(values: Array, scale: Array) -> Array:
    """Return the scale of each code of a matrix that has scales of blocks."""
    if values.ndim == 3:
        return jnp.repeat(scale, values.shape[1] // scale.shape[1], axis=1)[..., None]
    outputs, inputs = values.shape
    scale = jnp.repeat(scale, outputs // scale.shape[0], axis=0)
    return jnp.repeat(scale, BLOCK, axis=1)[:, :inputs]


def _by_blocks(
    x: Float[Array, "tokens blocks block"],
    weight: Float[Array, "blocks out block"],
    *,
    is_few: bool,
) -> Float[Array, "tokens out"]:
    """Multiply by a matrix that lies in blocks of inputs, float32."""
    if is_few:
        parts = jnp.einsum("tbi,boi->bto", x, weight, preferred_element_type=jnp.float32)
        return parts.sum(axis=0)
    # Apart: a CPU widens and turns codes in one pass several times slower.
    weight = jax.lax.optimization_barrier(weight).swapaxes(0, 1).reshape(weight.shape[1], -1)
    x = x.reshape(x.shape[0], -1)
    return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32)


def result_type(x: Activations, dtype: DTypeLike | None = None) -> DTypeLike:
    """Return the type of what comes of activations; None: theirs, or bfloat16 of codes."""
    if dtype is not None:
        return dtype
    return jnp.bfloat16 if isinstance(x, Codes) else x.dtype


def _type_of_numbers(dtype: DTypeLike) -> DTypeLike:
    """Return what codes become before they are multiplied, for results of a type."""
    return jnp.float32 if jnp.dtype(dtype) == jnp.float32 else jnp.bfloat16


def project_joined(
    x: Activations,
    matrices: tuple[Matrix, ...],
    products: Products = XLA_PRODUCTS,
    dtype: DTypeLike | None = None,
) -> list[Float[Array, "tokens out"]]:
    """Multiply by column-parallel matrices: in one launch, where that can be."""
    out_type, out = result_type(x, dtype), None
    if len(matrices) > 1 and (plain := _if_plain(x, matrices)) is not None:
        out = _by_kernel(products.plain, (plain, None), matrices, out_type)
        products = products._replace(plain=XLA_CODES)  # which joins those that the kernel does not
    elif len(matrices) > 1 and _are_alike(x, matrices):
        x = codes_for(x, matrices[0])
        out = _by_kernel(products.codes, x, matrices, out_type)
    if out is not None:
        return out
    return [project_out(x, matrix, products, out_type) for matrix in matrices]


def project_parts(
    x: Activations, matrices: tuple[Matrix, ...], products: Products = XLA_PRODUCTS
) -> Projected:
    """Multiply by column-parallel matrices, and leave the sums of a split contraction open."""
    out_type, out = result_type(x), None
    own = tuple(matrix.operand for matrix in matrices)
    if (plain := _if_plain(x, matrices)) is not None:
        out = products.plain.parts((plain, None), own, out_type)
        if out is None and all(operand.added is None for operand in own):
            joined = jnp.concatenate([each.values for each in matrices])
            return Projected((_split_numbers(plain, joined, products.most_cut),))
    elif _are_alike(x, matrices):
        x = codes_for(x, matrices[0])
        out = products.codes.parts(x, own, out_type)
    if out is not None:
        return Projected((out,), turned=out.ndim == 3)
    return Projected(tuple(project_out(x, matrix, products, out_type) for matrix in matrices))


def _split_numbers(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"], most: int
) -> Array:
    """Multiply by a matrix, whose contraction is cut where the product has few tokens and items.

    Few are up to `most`.

    XLA cuts it, too, but adds the parts up at once, which is another launch before a kernel.
    """
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    items, parts = Items(-(-outputs // PART), PART, inputs // PART), 1
    if tokens <= most and inputs % PART == 0:
        parts = parts_of(items, float(items.columns), CORES)
    if parts == 1:
        return jnp.einsum("ti,oi->to", x, weight)
    x, weight = (each.reshape(each.shape[0], parts, -1) for each in (x, weight))
    return jnp.einsum("tpi,opi->pto", x, weight, preferred_element_type=jnp.float32)


def project_gated(
    x: Activations,
    gate_and_up: tuple[Matrix, Matrix],
    down: Matrix,
    activation: Activation,
    products: Products = XLA_PRODUCTS,
) -> Float[Array, "tokens width"] | Codes:
    """Return what `down` multiplies: activation(gate x) * up x, perhaps as codes already."""
    out_type, own = result_type(x), tuple(matrix.operand for matrix in gate_and_up)
    if (plain := _if_plain(x, gate_and_up)) is not None:
        out = products.plain.gated((plain, None), own, Gated(activation, False), out_type)
        if out is not None:
            return out
    elif _are_alike(x, gate_and_up):
        are_codes = _are_codes(down) and down.inputs is None and block_of(down) == BLOCK
        codes = codes_for(x, gate_and_up[0])
        out = products.codes.gated(codes, own, Gated(activation, are_codes), out_type)
        if out is not None:
            return Codes(*out) if are_codes else out
    return gate_with(activation, *project_joined(x, gate_and_up, products))


def _are_codes(matrix: Matrix) -> bool:
    return matrix.scale is not None and not is_packed(matrix.values)


def _if_plain(x: Activations, matrices: tuple[Matrix, ...]) -> jax.Array | None:
    """Return x, if numbers are multiplied by numbers."""
    if isinstance(x, Codes) or any(each.scale is not None for each in matrices):
        return None
    return x


def _are_alike(x: Activations, matrices: tuple[Matrix, ...]) -> bool:
    """Whether matrices multiply the same codes: none has a fixed scale of inputs of its own."""
    given = isinstance(x, Codes)
    return all(_are_codes(each) and (given or each.inputs is None) for each in matrices)


def gate_with(
    activation: Activation, gate: Float[Array, "tokens width"], up: Float[Array, "tokens width"]
) -> Float[Array, "tokens width"]:
    """Return what an MLP's last matrix multiplies: activation(gate) * up.

    `clamped_swiglu` limits both and adds 1 to `up` (gpt-oss).
    """
    if activation == "clamped_swiglu":
        gate = jnp.minimum(gate, SWIGLU_LIMIT)
        up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        return gate * jax.nn.sigmoid(SWIGLU_SLOPE * gate) * up
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    return jax.nn.silu(gate) * up
