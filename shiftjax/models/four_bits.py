"""Products with matrices of four bits, in XLA: widened tile by tile, never a whole matrix.

A tile is some output channels. Its codes become numbers of the activations' type: code * scale, or
(code - zero) * scale, made in float32 and rounded once. Sums are float32. Inputs with even numbers
come before those with odd ones, in both factors: so nothing is interleaved.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Real, UInt8

from shiftjax.parallel.four_bits import SYMMETRIC_ZERO

TILE_NUMBERS = 1 << 19  # of a tile, widened: what caches of CPUs hold
GPU_TILE_NUMBERS = 1 << 24  # the same: 32 MiB of bfloat16, of the 50 of an H100; each is launches
LEAST_TOKENS = 8  # of fewer XLA makes sums for CPUs that widen one number after the other


def is_packed(values: Array) -> bool:
    """Whether a matrix has four bits a number: no plain number and no e4m3 code is a uint8."""
    return values.dtype == jnp.uint8


def packed_product(
    x: Float[Array, "tokens in"],
    codes: UInt8[Array, "out half"],
    scales: Real[Array, "out groups"],
    zeros: UInt8[Array, "out groups"] | None = None,
) -> Float[Array, "tokens out"]:
    """Multiply by a matrix of four bits, float32."""

    def tile_of(start: Array, rows: int) -> Float[Array, "rows in"]:
        def cut(each: Array) -> Array:
            return lax.dynamic_slice_in_dim(each, start, rows)

        own_zeros = None if zeros is None else cut(zeros)
        return widened(cut(codes), cut(scales), own_zeros, dtype=x.dtype)

    return tiled_product(x, codes.shape[0], tile_of)


def packed_blocks(
    x: Float[Array, "tokens in"],
    codes: UInt8[Array, "blocks out half"],
    scales: Real[Array, "blocks groups out"],
    zeros: UInt8[Array, "blocks groups out"] | None = None,
) -> Float[Array, "tokens out"]:
    """Multiply by a row-parallel matrix of four bits, which is in blocks of inputs, float32."""
    x = x.reshape(x.shape[0], codes.shape[0], -1)
    parts = [
        packed_product(x[:, i], codes[i], scales[i].T, None if zeros is None else zeros[i].T)
        for i in range(codes.shape[0])
    ]
    return sum(parts[1:], parts[0])


def tiled_product(
    x: Float[Array, "tokens in"], num_outputs: int, tile_of: Callable[[Array, int], Array]
) -> Float[Array, "tokens out"]:
    """Multiply by the tiles of a matrix, one after the other, float32.

    `tile_of(start, rows)` gives these rows, `[rows, in]`, even inputs before odd ones.
    """

    def with_tiles(numbers: int) -> Callable[[Array], Array]:
        return lambda x: _by_tiles(x, num_outputs, tile_of, numbers)

    on_cpu, on_gpu = with_tiles(TILE_NUMBERS), with_tiles(GPU_TILE_NUMBERS)
    return lax.platform_dependent(x, cuda=on_gpu, default=on_cpu)


def _by_tiles(
    x: Float[Array, "tokens in"],
    num_outputs: int,
    tile_of: Callable[[Array, int], Array],
    tile_numbers: int,
) -> Float[Array, "tokens out"]:
    num_tokens, inputs = x.shape
    rows = min(num_outputs, max(1, tile_numbers // inputs))
    x = jnp.concatenate([x[:, ::2], x[:, 1::2]], axis=1)
    x = jnp.pad(x, ((0, max(0, LEAST_TOKENS - num_tokens)), (0, 0)))

    def multiply(start: Array) -> Float[Array, "tokens rows"]:
        tile = tile_of(start, rows)
        return jnp.einsum("ti,oi->to", x, tile, preferred_element_type=jnp.float32)

    if rows == num_outputs:
        return multiply(jnp.int32(0))[:num_tokens]

    def add(nth: Array, out: Float[Array, "tokens out"]) -> Float[Array, "tokens out"]:
        start = nth * rows  # of the last tile it is less: slices are moved back to the end
        return lax.dynamic_update_slice_in_dim(out, multiply(start), start, axis=1)

    out = jnp.zeros((x.shape[0], num_outputs), jnp.float32)
    return lax.fori_loop(0, -(-num_outputs // rows), add, out)[:num_tokens]


def widened(
    codes: UInt8[Array, "out half"],
    scales: Real[Array, "out groups"],
    zeros: UInt8[Array, "out groups"] | None = None,
    *,
    dtype: DTypeLike,
) -> Float[Array, "out in"]:
    """Return the numbers of codes: those of even inputs, then those of odd ones."""
    num, half = codes.shape
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=1)
    nibbles = nibbles.reshape(num, 2, scales.shape[1], half // scales.shape[1])
    if scales.dtype == jnp.uint8:
        numbers, units = e2m1(nibbles), e8m0(scales)
    else:
        numbers, units = nibbles.astype(jnp.int32), scales
        numbers -= SYMMETRIC_ZERO if zeros is None else zeros[:, None, :, None].astype(jnp.int32)
        numbers = numbers.astype(jnp.float32)
    numbers = numbers * units[:, None, :, None]
    return numbers.astype(dtype).reshape(num, 2 * half)


def e2m1(codes: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return what codes 0..15 say: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and these less than 0."""
    wide = codes.astype(jnp.int32)
    most = wide & 7
    # Exponent and mantissa lie beside each other as in float32; 1 alone has no implicit bit.
    bits = jnp.where(most > 1, (most << 22) + (126 << 23), most * (126 << 23))
    return lax.bitcast_convert_type(bits | ((wide >> 3) << 31), jnp.float32)


def e8m0(codes: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return 2^(code - 127); of 0 it is 0, which no number of float32 is apart from."""
    return lax.bitcast_convert_type(codes.astype(jnp.int32) << 23, jnp.float32)
