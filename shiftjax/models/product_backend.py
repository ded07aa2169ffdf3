"""Which products matrices have that are no experts': a table, chosen at build time.

    xla       XLA multiplies (`products.py`): every platform and shape
    pallas    Mosaic kernels (`pallas_kernels/block_product.py`), where attention runs as kernels;
              matrices whose sizes they have not are left to XLA

The kernels multiply e4m3 codes as they are, and numbers of 16 bits where rows are few: of more,
XLA's products are as fast as the chip. One launch takes q, k and v, and one gate and up with what
follows; that one can give codes for the product after it.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.gates import GELU_TANH, SILU, Gate
from pallas_kernels.grouped_split import PLAIN_BLOCKS
from shiftjax.arch.config import Activation
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.traits import SWIGLU_LIMIT, SWIGLU_SLOPE
from shiftjax.models.gpu_software import left_to_xla, what_tracing_says
from shiftjax.models.operands import Coded, Groups, Operand, joined_inner
from shiftjax.models.packed_backend import XLA_PACKED, PackedBackend, choose_packed
from shiftjax.parallel.blocks import BLOCK
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import SCALE, can_be_codes, stored_weights

logger = logging.getLogger(__name__)
TRACED_TOKENS = 8
GATES: Mapping[Activation, Gate] = {
    "silu": SILU,
    "gelu_tanh": GELU_TANH,
    "clamped_swiglu": Gate(SWIGLU_SLOPE, SWIGLU_LIMIT),
}
# Tries the kernels with matrices of numbers; says what is wrong, for people. None: nothing.
TryPlain = Callable[["CodeShape"], str | None]


class Gated(NamedTuple):
    """What follows a product with gate and up."""

    activation: Activation
    are_codes: bool  # that come out, with a scale for each token and BLOCK channels


class ProductBackend(NamedTuple):
    """One implementation of products of codes, or of numbers."""

    name: str
    # (x, matrices, type) -> [tokens, channels] of all matrices; None: XLA multiplies.
    multiply: Callable[[Coded, tuple[Operand, ...], DTypeLike], jax.Array | None]
    # (x, gate and up, what follows, type) -> numbers, or codes and scales; None: XLA multiplies.
    gated: Callable[[Coded, tuple[Operand, ...], Gated, DTypeLike], Any]
    reason: str = ""  # why this one was chosen
    # (x, matrices, type) -> as `multiply`, or float32 [parts, channels, rows], to be added up by
    # who reads them; there may be more channels and rows. None: XLA multiplies.
    parts: Callable[[Coded, tuple[Operand, ...], DTypeLike], jax.Array | None] = lambda *_: None
    # (numbers, matrix, groups) -> what a token keeps of its product; None: XLA multiplies.
    grouped: Callable[[jax.Array, Operand, Groups], jax.Array | None] = lambda *_: None


XLA_CODES = ProductBackend("xla", lambda *_: None, lambda *_: None)


MOST_CUT = 64  # tokens: more fill the chip
FEW_TOKENS = 16  # with as many, a sum for each block is cheaper than turning widened codes


class Products(NamedTuple):
    """The products of a step, with matrices that are no experts'."""

    packed: PackedBackend = XLA_PACKED  # of four bits
    codes: ProductBackend = XLA_CODES  # of e4m3
    plain: ProductBackend = XLA_CODES  # of numbers of 16 bits
    few_tokens: int = FEW_TOKENS  # XLA sums blocks of codes one by one; 0: all at once
    most_cut: int = MOST_CUT  # XLA's contraction may be cut for a kernel behind it; 0: never

    def grouped(self, x: jax.Array, matrix: Operand, groups: Groups) -> jax.Array | None:
        """Return what tokens keep of a product, by a kernel; None: XLA multiplies.

        Beside codes it has been tried with them.
        """
        backend = self.codes if self.plain.name == "xla" else self.plain
        return backend.grouped(x, matrix, groups)


XLA_PRODUCTS = Products()


class CodeMatrix(NamedTuple):
    """A device's part of a matrix of codes, or of numbers."""

    outputs: int
    inputs: int
    block: int  # inputs of one, of a row-parallel matrix; 0: column-parallel
    scales: int  # of outputs, that blocks of them share; 0: of channels

    def __str__(self) -> str:
        return f"{self.outputs} x {self.inputs}{' in blocks' if self.block else ''}"


class CodeShape(NamedTuple):
    """The matrices of codes, or of numbers, of a device, in all modes, as kernels see them."""

    matrices: tuple[CodeMatrix, ...]
    dtype: str  # of activations; a name of `arch.formats`
    activation: Activation = "silu"
    is_plain: bool = False  # numbers
    slots: int = 0  # of adapters, which add to products
    rank: int = 0  # of each

    def arrays(self, matrix: CodeMatrix, tokens: int) -> tuple[Any, Any]:
        """Codes and scales of activations, and of the matrix, as shapes; numbers have no scales."""
        outputs, inputs, block, scales = matrix
        if self.is_plain:
            make = functools.partial(jax.ShapeDtypeStruct, dtype=FORMATS[self.dtype].dtype)
            size = (inputs // block, block, outputs) if block else (outputs, inputs)
            return (make((tokens, inputs)), None), (make(size), None)
        blocks = -(-inputs // (block or BLOCK))
        size = (blocks, outputs, block) if block else (outputs, inputs)
        of_blocks = (blocks, scales) if block else (scales, blocks)
        code, make = FORMATS["fp8"].dtype, jax.ShapeDtypeStruct
        x = make((tokens, inputs), code), make((blocks, tokens), jnp.float32)
        return x, (make(size, code), make(of_blocks if scales else (outputs,), jnp.float32))


def code_shape(layout: Layout, formats: Formats) -> CodeShape | None:
    """Return the matrices of codes of a layout; None: none that is no expert's has such."""
    if not formats.has_codes_of_inputs or FORMATS[formats.weights].of_experts:
        return None
    stored, found = {weight.name: weight for weight in stored_weights(layout, formats)}, set()
    for weight in stored.values():
        axis = weight.axes[0]
        if weight.kind != "codes" or axis == "experts":
            continue
        scale = stored[f"{weight.name}{SCALE}"]
        for mode in layout.modes:
            used = layout.used_in(weight, mode)
            rows = weight.shape[0] if axis is None else layout.shard_rows(axis, used)
            own = rows, *weight.shape[1:]
            if weight.transposed:
                *blocks, outputs, block = own
                scales = scale.shape[-1] if len(scale.shape) > 1 else 0
                found.add(CodeMatrix(outputs, math.prod(blocks) * block, block, scales))
            else:
                of_blocks = len(scale.shape) == len(own)
                share = math.prod(weight.shape[:-1]) // math.prod(scale.shape[:-1])
                outputs = math.prod(own[:-1])
                found.add(CodeMatrix(outputs, own[-1], 0, outputs // share if of_blocks else 0))
    own = tuple(sorted(found)), formats.activations, layout.model.activation
    return CodeShape(*own)._replace(**_slots_of(layout))


def plain_shape(layout: Layout, formats: Formats) -> CodeShape | None:
    """Return the matrices of 16-bit numbers of a layout; None: its numbers are others."""
    if FORMATS[formats.activations].dtype.itemsize != 2:
        return None
    found = set()
    for weight in stored_weights(layout, formats):
        axis = weight.axes[0]
        if weight.kind != "matrix" or axis == "experts" or not can_be_codes(weight):
            continue
        for mode in layout.modes:
            used = layout.used_in(weight, mode)
            rows = weight.shape[0] if axis is None else layout.shard_rows(axis, used)
            *before, last = rows, *weight.shape[1:]
            first = math.prod(before)
            block = plain_block(first) if weight.transposed else 0
            sizes = (last, first) if weight.transposed else (first, last)
            if block is not None:
                found.add(CodeMatrix(*sizes, block, 0))
    own = tuple(sorted(found)), formats.activations, layout.model.activation
    return CodeShape(*own, is_plain=True)._replace(**_slots_of(layout))


def _slots_of(layout: Layout) -> dict[str, int]:
    slots = layout.model.lora
    return {} if slots is None else {"slots": slots.num, "rank": slots.rank}


def plain_block(inputs: int) -> int | None:
    """Return the inputs of a block of a row-parallel matrix of numbers; None: there is no block."""
    return next((block for block in PLAIN_BLOCKS if inputs % block == 0), None)


def in_plain_blocks(values: jax.Array) -> jax.Array | None:
    """See a matrix `[in, out]` as `[blocks, block, out]`; None: there is no block."""
    block = plain_block(values.shape[0])
    return None if block is None else values.reshape(-1, block, values.shape[1])


def fixed_products(products: Products, device: Device) -> Products:
    """Return products that give a row the same bits whatever the other rows, and in every mode.

    The kernels of codes have one tile and one split for all sizes. XLA multiplies numbers, with the
    options of strict steps (`device/strict.py`).
    """
    codes = products.codes
    if codes.name == "pallas":
        codes = pallas_codes(device, is_fixed=True)._replace(reason=codes.reason)
    plain = products.plain
    if plain.name == "pallas":
        plain = XLA_CODES._replace(reason="numerics are strict")
    return products._replace(codes=codes, plain=plain, few_tokens=0, most_cut=0)


def pallas_codes(
    device: Device, *, is_fixed: bool = False, interpret: Any = False
) -> ProductBackend:
    """Return the kernels, with tiles and splits by size or fixed. `interpret` is for tests."""
    from pallas_kernels.block_problem import (
        BlockCodes,
        BlockMatrix,
        Result,
        block_config,
        fixed_config,
    )
    from pallas_kernels.block_problem import Groups as GroupsOfChannels
    from pallas_kernels.block_product import Beside, block_product, wrong_block

    config = fixed_config if is_fixed else block_config
    if cores := getattr(device, "core_count", None):  # not every device says
        config = functools.partial(config, cores=cores)

    def run(
        x: Coded,
        matrices: tuple[Operand, ...],
        result: Result,
        *,
        in_parts: bool = False,
        group: jax.Array | None = None,
    ) -> Any:
        codes, of_kernel = BlockCodes(*x), tuple(map(matrix_of, matrices))
        beside = Beside(joined_inner(matrices), group)
        if wrong_block(codes, of_kernel, result, beside=beside):
            return None
        own = config(codes, of_kernel, result)
        return block_product(codes, of_kernel, result, own.in_parts() if in_parts else own, beside)

    def parts(x: Coded, matrices: tuple[Operand, ...], dtype: DTypeLike) -> jax.Array | None:
        return run(x, matrices, Result(dtype, interpret=interpret), in_parts=True)

    def matrix_of(matrix: Operand) -> BlockMatrix:
        values, scale, added = matrix
        own: dict[str, Any] = {} if added is None else {"factor": added.factor}
        if scale is not None:
            own["scale" if scale.ndim == 1 else "blocks"] = scale
        return BlockMatrix(values, **own)

    def multiply(x: Coded, matrices: tuple[Operand, ...], dtype: DTypeLike) -> jax.Array | None:
        return run(x, matrices, Result(dtype, interpret=interpret))

    def gated(x: Coded, matrices: tuple[Operand, ...], after: Gated, dtype: DTypeLike) -> Any:
        result = Result(dtype, GATES[after.activation], after.are_codes, interpret)
        return run(x, matrices, result)

    def grouped(x: jax.Array, matrix: Operand, groups: Groups) -> jax.Array | None:
        num, channels, own = groups
        of_kernel = GroupsOfChannels(num, channels)
        result = Result(x.dtype, interpret=interpret, groups=of_kernel)
        return run((x, None), (matrix,), result, group=own)

    return ProductBackend("pallas", multiply, gated, parts=parts, grouped=grouped)


def choose_products(
    layout: Layout,
    formats: Formats,
    device: Device,
    attention: str,
    try_plain: TryPlain | None = None,
) -> Products:
    """Return the backends of all products, where attention runs as `attention`."""
    how = layout, formats, device, attention
    return Products(choose_packed(*how), choose_codes(*how), choose_plain(*how, try_plain))


def choose_plain(
    layout: Layout,
    formats: Formats,
    device: Device,
    attention: str,
    check: TryPlain | None = None,
) -> ProductBackend:
    """Return the kernels if `attention` are kernels, some matrix allows it and `check` passes.

    They are tried by themselves: if they fail, XLA multiplies, and attention stays as it is.
    """
    shape = plain_shape(layout, formats)
    if shape is None or not shape.matrices:
        return XLA_CODES._replace(reason="no matrix has numbers of 16 bits")
    if "pallas" not in attention:
        return XLA_CODES._replace(reason=f"attention runs as {attention}")
    reasons = [why_not_codes(shape, matrix) for matrix in shape.matrices]
    reason = next(filter(None, reasons), "")
    if all(reasons) or (check is not None and (reason := check(shape) or "")):
        logger.warning("XLA multiplies numbers of few rows, too: %s", reason)
        return XLA_CODES._replace(reason=reason)
    return pallas_codes(device)._replace(reason=reason)


def choose_codes(
    layout: Layout, formats: Formats, device: Device, attention: str
) -> ProductBackend:
    """Return the kernels if `attention`, by name, are kernels and some matrix allows it.

    Warns of matrices that XLA multiplies beside kernels, and says why.
    """
    shape = code_shape(layout, formats)
    if shape is None or not shape.matrices:
        return XLA_CODES._replace(reason="no matrix has codes")
    if "pallas" not in attention:
        return XLA_CODES._replace(reason=f"attention runs as {attention}")
    what = f"codes on {device.device_kind} are widened and multiplied by XLA"
    why_not = functools.partial(why_not_codes, shape)
    reason, are_all = left_to_xla(shape.matrices, why_not, what)
    return (XLA_CODES if are_all else pallas_codes(device))._replace(reason=reason)


def why_not_codes(shape: CodeShape, matrix: CodeMatrix) -> str | None:
    """Trace a small step; return what the kernels cannot do, in their own words."""
    from pallas_kernels.block_problem import BlockCodes, BlockMatrix, Result
    from pallas_kernels.block_product import block_product

    x, (values, scale) = shape.arrays(matrix, TRACED_TOKENS)
    scales = {} if shape.is_plain else {"blocks" if matrix.scales else "scale": scale}
    own = BlockMatrix(values, **scales)
    result = Result(FORMATS[shape.dtype].dtype)

    def trace(x: BlockCodes, own: BlockMatrix) -> Any:
        return block_product(x, (own,), result)

    return what_tracing_says(lambda: jax.eval_shape(trace, BlockCodes(*x), own))
