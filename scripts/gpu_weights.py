"""Random weights that depend on a tensor's name and the element alone, made on the device.

Integers, so that `scripts/peers/hf_gpu.py` makes the same ones with PyTorch: element i of a tensor
of the checkpoint (row-major, `[out, in]`) is a hash of 32 bits,

    h = i * 0x9E3779B1 + crc32(name);  h ^= h >> 15;  h *= 0x85EBCA77;  h ^= h >> 13

whose highest byte b becomes (b - 127.5) * 2**k: exact in bfloat16, with a variance of about
1 / columns, so that activations keep their scale. Norms are 1.
"""

import math
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shiftjax.arch.weights import Weight
from shiftjax.device.mesh import named, weight_spec
from shiftjax.device.step import StepDef
from shiftjax.parallel.grid import STORED_AXES

BYTE_DEVIATION = 73.9  # of b - 127.5


def prompt(index: int, length: int) -> list[int]:
    """Return the token ids of a request."""
    return [(7 * index + 3 * i) % 1000 for i in range(length)]


def exponent(columns: int) -> int:
    """Return k for a matrix of so many columns."""
    return round(math.log2(columns**-0.5 / BYTE_DEVIATION))


def hashed_weights(step: StepDef) -> tuple[jax.Array, ...]:
    """Return every weight as it is stored; the memory beside them is about one of them."""
    specs = [weight_spec(weight, STORED_AXES) for weight in step.model.declared]
    return tuple(
        make_weight(weight, step.model.dtype, named(step.mesh, spec))
        for weight, spec in zip(step.model.declared, specs, strict=True)
    )


def make_weight(weight: Weight, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return one weight as the engine stores it; heads that are padded or repeated are random."""
    make = partial(_fill, weight.shape, dtype, weight.transposed)
    start = np.uint32(zlib.crc32(weight.source.encode()))
    return jax.jit(make, out_shardings=sharding)(start)


def _fill(shape: tuple[int, ...], dtype: np.dtype, transposed: bool, start: jax.Array) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    row, column = (lax.broadcasted_iota(jnp.uint32, (rows, columns), axis) for axis in (0, 1))
    # A transposed weight is stored [in, out], where the checkpoint has [out, in].
    index = column * rows + row if transposed else row * columns + column
    h = index * jnp.uint32(0x9E3779B1) + start
    h = (h ^ (h >> 15)) * jnp.uint32(0x85EBCA77)
    byte = ((h ^ (h >> 13)) >> 24).astype(jnp.float32)
    scale = 2.0 ** exponent(rows if transposed else columns)
    return ((byte - 127.5) * scale).astype(dtype).reshape(shape)
