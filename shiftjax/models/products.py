"""Products with a layer's matrices, which are plain numbers or codes in units of a scale.

Codes are e4m3, as are their inputs then; those of four bits are widened (`four_bits.py`).

Scales are of what is contracted: of a weight's output channel, of a token's activations, or of the
part of them that one device has where all devices split them (a block). So neither the other tokens
of a step nor its mode changes a code: scaled by what a device has in its mode, BASE and SHIFT would
round differently. Sums are float32, and scaled before blocks are added up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Real

from shiftjax.arch.config import Activation
from shiftjax.arch.traits import SWIGLU_LIMIT, SWIGLU_SLOPE
from shiftjax.models.four_bits import is_packed
from shiftjax.models.packed_backend import XLA_PACKED, PackedBackend

CODE = jnp.float8_e4m3fn
LARGEST_CODE = float(jnp.finfo(CODE).max)
LEAST_SCALED = 1e-20  # what is smaller than this in all of a row becomes zeros


class Matrix(NamedTuple):
    """A weight as a device has it in a step; see `parallel/stored.py`."""

    values: Array  # `[out, in]`; row-parallel ones `[in, out]`, or codes `[blocks, out, in]`
    scale: Array | None = None  # `[out]`; of four bits as they are stored; None: values are plain
    inputs: Float[Array, " 1"] | None = None  # what inputs are in units of; None: each row's own
    zero: Array | None = None  # of four bits: zero points, as scales; None: 8


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
    x: Float[Array, "tokens in"], matrix: Matrix, packed: PackedBackend = XLA_PACKED
) -> Float[Array, "tokens out"]:
    """Multiply by a column-parallel matrix, one of four bits with `packed`."""
    if matrix.scale is None:
        return jnp.einsum("ti,oi->to", x, matrix.values)
    if is_packed(matrix.values):
        return packed.out(x, matrix.values, matrix.scale, matrix.zero).astype(x.dtype)
    codes, scale = _activations(x, matrix)
    out = _product(codes, matrix.values) * scale[:, None]
    return (out * matrix.scale[None]).astype(x.dtype)


def project_in(
    x: Float[Array, "tokens in"], matrix: Matrix, packed: PackedBackend = XLA_PACKED
) -> Float[Array, "tokens out"]:
    """Multiply by a row-parallel matrix; the result wants an all-reduce."""
    if matrix.scale is None:
        return jnp.einsum("ti,io->to", x, matrix.values)
    blocks = matrix.values
    if is_packed(blocks):
        return packed.into(x, blocks, matrix.scale, matrix.zero).astype(x.dtype)
    codes, scale = _activations(x.reshape(x.shape[0], blocks.shape[0], -1), matrix)
    parts = [_product(codes[:, i], blocks[i]) * scale[:, i, None] for i in range(blocks.shape[0])]
    return (sum(parts[1:], parts[0]) * matrix.scale[None]).astype(x.dtype)


def _activations(
    x: Float[Array, "*rows width"], matrix: Matrix
) -> tuple[Float8e4m3fn[Array, "*rows width"], Float[Array, "*rows"]]:
    """Return codes of a matrix's inputs and their scales; what a fixed one cannot say saturates."""
    if matrix.inputs is None:
        return quantise(x)
    scale = matrix.inputs[0]
    codes = jnp.clip(x.astype(jnp.float32) / scale, -LARGEST_CODE, LARGEST_CODE).astype(CODE)
    return codes, jnp.broadcast_to(scale, x.shape[:-1])


def _product(
    x: Float8e4m3fn[Array, "tokens in"], codes: Float8e4m3fn[Array, "out in"]
) -> Float[Array, "tokens out"]:
    """Multiply codes, in float32; a CPU has no product of them, but bfloat16 holds them all."""

    def multiply(x: Array, codes: Array) -> Array:
        return jnp.einsum("ti,oi->to", x, codes, preferred_element_type=jnp.float32)

    def widened(x: Array, codes: Array) -> Array:
        return multiply(x.astype(jnp.bfloat16), codes.astype(jnp.bfloat16))

    return jax.lax.platform_dependent(x, codes, cpu=widened, default=multiply)


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
