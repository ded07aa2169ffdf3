"""Random weights that depend on a tensor's name and the element alone, made on the device.

Integers, so that `scripts/peers/hf_gpu.py` makes the same ones with PyTorch: element i of a tensor
of the checkpoint (row-major, `[out, in]`) is a hash of 32 bits,

    h = i * 0x9E3779B1 + crc32(name);  h ^= h >> 15;  h *= 0x85EBCA77;  h ^= h >> 13

whose highest byte b becomes (b - 127.5) * 2**k: exact in bfloat16, with a variance of about
1 / columns, so that activations keep their scale. Norms are 1.

Of a matrix of codes, b - 127.5 becomes a code and 2**k the scale of every channel, with i counting
the elements as they are stored; nothing wider than a code is ever in memory. Scales of keys and
values are 1.
"""

import math
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shiftjax.arch.weights import Weight
from shiftjax.device.joined import Joiner
from shiftjax.device.mesh import named, weight_spec
from shiftjax.device.step import StepDef
from shiftjax.models.products import CODE
from shiftjax.parallel.grid import STORED_AXES
from shiftjax.parallel.stored import SCALE, dtype_of

BYTE_DEVIATION = 73.9  # of b - 127.5


def prompt(index: int, length: int) -> list[int]:
    """Return the token ids of a request."""
    return [(7 * index + 3 * i) % 1000 for i in range(length)]


def exponent(columns: int) -> int:
    """Return k for a matrix of so many columns."""
    return round(math.log2(columns**-0.5 / BYTE_DEVIATION))


def hashed_weights(step: StepDef) -> tuple[jax.Array | None, ...]:
    """Return the arrays of all weights as they are stored; beside them is about one weight."""
    model, joiner = step.model, Joiner(step.weights.arrays)
    by_name = {weight.name: weight for weight in model.declared}
    for weight in model.declared:
        dtype = dtype_of(weight, model.formats)
        sharding = named(step.mesh, weight_spec(weight, STORED_AXES))
        if weight.kind == "scale":
            codes = by_name[weight.name.removesuffix(SCALE)]
            columns = codes.num_elements // weight.num_elements
            scale = jnp.full(weight.shape, 2.0 ** exponent(columns), dtype, device=sharding)
            joiner.put(weight.name, scale)
        else:
            joiner.put(weight.name, make_weight(weight, dtype, sharding))
    return joiner.arrays()


def make_weight(weight: Weight, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return one weight as the engine stores it; heads that are padded or repeated are random."""
    if len(weight.shape) == 1 or weight.kind == "kv_scale":
        return jnp.ones(weight.shape, dtype, device=sharding)
    make = partial(_fill, weight.shape, dtype, weight.transposed and weight.kind != "codes")
    start = np.uint32(zlib.crc32(weight.source.encode()))
    return jax.jit(make, out_shardings=sharding)(start)


def _fill(shape: tuple[int, ...], dtype: np.dtype, transposed: bool, start: jax.Array) -> jax.Array:
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    row, column = (lax.broadcasted_iota(jnp.uint32, (rows, columns), axis) for axis in (0, 1))
    # A transposed weight is stored [in, out], where the checkpoint has [out, in].
    index = column * rows + row if transposed else row * columns + column
    h = index * jnp.uint32(0x9E3779B1) + start
    h = (h ^ (h >> 15)) * jnp.uint32(0x85EBCA77)
    value = ((h ^ (h >> 13)) >> 24).astype(jnp.float32) - 127.5
    if dtype != CODE:
        value *= 2.0 ** exponent(rows if transposed else columns)
    return value.astype(dtype).reshape(shape)
