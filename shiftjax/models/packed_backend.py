"""Which product matrices of four bits have that are no experts': a table, chosen at build time.

    xla       a loop over tiles that are widened: every platform, shape and format
    pallas    Mosaic kernels (`pallas_kernels/dense.py`), where attention runs as kernels; matrices
              whose sizes they have not are left to the loop

Scales of column-parallel matrices are stored by outputs, as views are by rows. The kernels want
those of neighbouring outputs beside each other, so that a step turns them: with groups of 128 that
moves 1/8 more bytes than the matrix has.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Real, UInt8

from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.models.four_bits import packed_blocks, packed_product
from shiftjax.models.gpu_software import left_to_xla, what_tracing_says
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import SCALE, codes_in, stored_weights

TRACED_TOKENS = 8
# (x, codes, scales, zeros) -> [tokens, out], float32 or of the type of x
Product = Callable[[jax.Array, jax.Array, Any, Any], jax.Array]


class PackedBackend(NamedTuple):
    """One implementation of products with matrices of four bits."""

    name: str
    out: Product  # column-parallel: codes `[out, half]`, scales `[out, groups]`
    into: Product  # row-parallel: codes `[blocks, out, half]`, scales `[blocks, groups, out]`
    reason: str = ""  # why this one was chosen


XLA_PACKED = PackedBackend("xla", packed_product, packed_blocks)


class PackedMatrix(NamedTuple):
    """A device's part of a matrix."""

    blocks: int
    outputs: int
    inputs: int  # of a block
    groups: int  # of a block

    def __str__(self) -> str:
        blocks = f"{self.blocks} blocks of " if self.blocks > 1 else ""
        return f"{blocks}{self.outputs} x {self.inputs}"


class PackedShape(NamedTuple):
    """The matrices of a device, in all modes, as kernels see them."""

    matrices: tuple[PackedMatrix, ...]
    dtype: str  # of activations; a name of `arch.formats`
    weights: str
    has_zeros: bool

    def arrays(self, matrix: PackedMatrix) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Codes, scales and zero points, if there are any, as the kernels take them."""
        blocks, outputs, inputs, groups = matrix
        of_groups = blocks, groups, outputs
        codes = jax.ShapeDtypeStruct((blocks, outputs, inputs // 2), jnp.uint8)
        scales = jax.ShapeDtypeStruct(of_groups, FORMATS[self.weights].scale)
        zeros = (jax.ShapeDtypeStruct(of_groups, jnp.uint8),) * self.has_zeros
        return codes, scales, *zeros


def packed_shape(layout: Layout, formats: Formats) -> PackedShape | None:
    """Return the matrices of a layout; None: none that is no expert's has four bits."""
    codes = codes_in(layout.model, formats)
    if codes is None or not FORMATS[formats.dense].is_packed:
        return None
    stored = {weight.name: weight for weight in stored_weights(layout, formats)}
    found = set()
    for weight in stored.values():
        axis = weight.axes[0]
        if weight.kind != "codes" or axis == "experts":
            continue
        groups = stored[f"{weight.name}{SCALE}"].shape
        for mode in layout.modes:
            used = layout.used_in(weight, mode)
            rows = weight.shape[0] if axis is None else layout.shard_rows(axis, used)
            if axis == "blocks":
                _, outputs, half = weight.shape
                found.add(PackedMatrix(rows, outputs, 2 * half, groups[1]))
            else:
                *outputs, half = rows, *weight.shape[1:]
                found.add(PackedMatrix(1, math.prod(outputs), 2 * half, groups[-1]))
    return PackedShape(tuple(sorted(found)), formats.activations, formats.dense, codes.has_zeros)


def pallas_packed(device: Device) -> PackedBackend:
    """Return the kernels."""
    from pallas_kernels.dense import DenseWeights, dense_config, dense_product, wrong_dense

    config = dense_config
    if cores := getattr(device, "core_count", None):  # not every device says
        config = functools.partial(config, cores=cores)

    def into(
        x: Float[Array, "tokens in"],
        codes: UInt8[Array, "blocks out half"],
        scales: Real[Array, "blocks groups out"],
        zeros: UInt8[Array, "blocks groups out"] | None,
    ) -> Float[Array, "tokens out"]:
        weights = DenseWeights(codes, scales, zeros)
        if wrong_dense(x, weights):
            return packed_blocks(x, *weights)
        return dense_product(x, weights, config(x.shape[0], weights))

    def out(
        x: Float[Array, "tokens in"],
        codes: UInt8[Array, "out half"],
        scales: Real[Array, "out groups"],
        zeros: UInt8[Array, "out groups"] | None,
    ) -> Float[Array, "tokens out"]:
        # Not before the layer: XLA would turn those of all layers first, and keep them.
        x, *own = jax.lax.optimization_barrier((x, scales, zeros))
        turned = (None if one is None else one.T[None] for one in own)
        weights = DenseWeights(codes[None], *turned)
        if wrong_dense(x, weights):
            return packed_product(x, codes, scales, zeros)
        return dense_product(x, weights, config(x.shape[0], weights))

    return PackedBackend("pallas", out, into)


def choose_packed(
    layout: Layout, formats: Formats, device: Device, attention: str
) -> PackedBackend:
    """Return the kernels if `attention`, by name, are kernels and some matrix allows it.

    Warns of loops beside kernels, with the matrices that have them and why.
    """
    shape = packed_shape(layout, formats)
    if shape is None or not shape.matrices:
        return XLA_PACKED._replace(reason="no matrix has four bits")
    if "pallas" not in attention:
        return XLA_PACKED._replace(reason=f"attention runs as {attention}")
    what = f"four bits on {device.device_kind} are widened by XLA"
    why_not = functools.partial(why_not_packed, shape)
    reason, are_all = left_to_xla(shape.matrices, why_not, what)
    return (XLA_PACKED if are_all else pallas_packed(device))._replace(reason=reason)


def why_not_packed(shape: PackedShape, matrix: PackedMatrix) -> str | None:
    """Trace a small step; return what the kernels cannot do, in their own words."""
    from pallas_kernels.dense import DenseWeights, dense_product

    inputs = matrix.blocks * matrix.inputs
    x = jax.ShapeDtypeStruct((TRACED_TOKENS, inputs), FORMATS[shape.dtype].dtype)
    weights = DenseWeights(*shape.arrays(matrix))
    return what_tracing_says(lambda: jax.eval_shape(dense_product, x, weights))
