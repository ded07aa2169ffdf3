"""How quantised matrices lie in files, and what they are as numbers.

A row of `LAYOUTS` for every kind of `quant_config.Scheme`: the tensors of a matrix, their shapes,
and a function that expands a range of it to float32. Nothing but that range is read; peak host
memory is some four times its float32 numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from shiftjax.weights.quant_config import Kind, Scheme
from shiftjax.weights.safetensors_file import read_range
from shiftjax.weights.source import TensorInfo

# AutoAWQ packs 8 neighbouring outputs into a word; its k-th 4 bits, lowest first, are this one's.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])  # the highest of the 4 bits is the sign
_E8M0, _MX_BLOCK = np.dtype(ml_dtypes.float8_e8m0fnu), 32
_SCALE, _ZERO, _INPUT = "weight_scale", "weight_zero_point", "input_scale"
_BOUND = "input_scale_ub"  # of FBGEMM, which is not applied
_ORDERS = "g_idx", "weight_g_idx"

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class Part(NamedTuple):
    """One stored tensor of a quantised matrix: codes, scales or zero points."""

    name: str
    info: TensorInfo

    def read(self, *index: slice) -> np.ndarray:
        """Return the elements at `index`, a slice for each dimension, as they are stored."""
        return read_range(self.name, self.info, index)


@dataclass(frozen=True)
class Packed:
    """A quantised matrix of a checkpoint, `[out, in]`, or `[experts, in, out]` of mxfp4."""

    scheme: Scheme
    parts: Mapping[str, Part]  # by the suffixes of their names
    shape: Shape
    scales: np.ndarray | None = None  # float32 `[out]`, or of blocks; None: too many to keep

    @property
    def layout(self) -> "Layout":
        """The file layout of this matrix's quantisation scheme."""
        return LAYOUTS[self.scheme.kind]

    def read(self, index: Index) -> np.ndarray:
        """Return the range `index`, a slice for each dimension, as float32 numbers."""
        return np.ascontiguousarray(self.layout.expand(self, *index))


class Layout(NamedTuple):
    """How a kind of matrix lies in a file: the suffixes of its tensors, and their shapes."""

    codes: str
    scale: str
    others: tuple[str, ...]
    dtype: str  # of the codes, as NumPy calls it
    shape: Callable[[Scheme, Mapping[str, Part]], Shape]  # of the matrix
    shapes: Callable[[Scheme, Shape], dict[str, tuple[Shape, ...]]]  # those that parts may have
    expand: Callable[..., np.ndarray]  # of a Packed and a slice for each dimension: float32


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def spread(scale: np.ndarray, shape: Shape) -> np.ndarray:
    """Scales of a matrix or of its channels as those of channels, `[out]`."""
    return np.broadcast_to(scale.astype(np.float32).reshape(-1), shape[:1])


# ------------------------------------------------------------------- 8 bits, a number a byte


def _same_shape(scheme: Scheme, parts: Mapping[str, Part]) -> Shape:
    return parts["weight"].info.shape


def _of_channels(scheme: Scheme, shape: Shape) -> dict[str, tuple[Shape, ...]]:
    scale = (), (1,), shape[:1], (shape[0], 1)
    if scheme.group:
        scale = ((shape[0], _ceil(shape[1], scheme.group)),)
    return {_SCALE: scale, _ZERO: scale, _INPUT: ((), (1,))}


def _of_blocks(scheme: Scheme, shape: Shape) -> dict[str, tuple[Shape, ...]]:
    sizes = zip(shape, scheme.block, strict=True)
    return {_SCALE: (tuple(_ceil(*each) for each in sizes),)}


def _fp8(packed: Packed, rows: slice, columns: slice) -> np.ndarray:
    assert packed.scales is not None
    codes = packed.parts["weight"].read(rows, columns)
    return codes.astype(np.float32) * packed.scales[rows, None]


def _fp8_blocks(packed: Packed, rows: slice, columns: slice) -> np.ndarray:
    assert packed.scales is not None
    values = packed.parts["weight"].read(rows, columns).astype(np.float32)
    places = (
        np.arange(each.start, each.stop) // size
        for each, size in zip((rows, columns), packed.scheme.block, strict=True)
    )
    values *= packed.scales[np.ix_(*places)]
    return values


def _int8(packed: Packed, rows: slice, columns: slice) -> np.ndarray:
    values = packed.parts["weight"].read(rows, columns).astype(np.float32)
    groups = _groups(packed, columns)
    if _ZERO in packed.parts:
        values -= _of_range(packed, _ZERO, rows, groups)
    values *= _of_range(packed, _SCALE, rows, groups)
    return values


def _of_range(packed: Packed, suffix: str, rows: slice, groups: np.ndarray) -> np.ndarray:
    """Scales or zero points of a range, float32 `[rows, columns]` or `[rows, 1]`."""
    part = packed.parts[suffix]
    if packed.scheme.group is None:
        whole = part.read(*(slice(0, size) for size in part.info.shape))
        return spread(whole, packed.shape)[rows, None]
    return _picked(part, rows, groups)


def _groups(packed: Packed, columns: slice) -> np.ndarray:
    """The group that each input of a range belongs to: neighbours', or as the file says."""
    places = np.arange(columns.start, columns.stop)
    order = next((packed.parts[name] for name in _ORDERS if name in packed.parts), None)
    if order is not None:
        return order.read(columns).astype(np.int64)
    return places // packed.scheme.group if packed.scheme.group else np.zeros_like(places)


def _picked(part: Part, rows: slice, groups: np.ndarray) -> np.ndarray:
    """Columns `groups` of `[out, groups]`, read as the range that holds them."""
    if not groups.size:
        return part.read(rows, slice(0, 0)).astype(np.float32)
    first, last = int(groups.min()), int(groups.max()) + 1
    return part.read(rows, slice(first, last))[:, groups - first].astype(np.float32)


# ------------------------------------------------------------------- bits packed into words


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Numbers out of 32-bit words along the last dimension, the lowest bits first: uint8."""
    raw = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return numbers.reshape(*words.shape[:-1], words.shape[-1] * 32 // bits)


def words_of(each: slice, per: int) -> tuple[slice, slice]:
    """The words that hold a range, `per` in a word, and where the range is among what they hold."""
    first = each.start // per
    start = each.start - first * per
    words = slice(first, max(first, _ceil(each.stop, per)))
    return words, slice(start, start + each.stop - each.start)


def _words(packed: Packed, each: slice) -> tuple[slice, slice]:
    return words_of(each, 32 // packed.scheme.bits)


def _packed_shape(scheme: Scheme, parts: Mapping[str, Part]) -> Shape:
    """The shape is a tensor of its own; words may be filled up."""
    return tuple(int(size) for size in parts["weight_shape"].read(slice(0, 2)))


def _of_packed(scheme: Scheme, shape: Shape) -> dict[str, tuple[Shape, ...]]:
    per, groups = 32 // scheme.bits, _ceil(shape[1], scheme.group) if scheme.group else 1
    scale = ((shape[0], groups),) if scheme.group else ((), (1,), shape[:1], (shape[0], 1))
    return {
        "weight_packed": ((shape[0], _ceil(shape[1], per)),),
        _SCALE: scale,
        _ZERO: ((_ceil(shape[0], per), groups),),
        "weight_g_idx": (shape[1:],),
        "weight_shape": ((2,),),
    }


def _packed(packed: Packed, rows: slice, columns: slice) -> np.ndarray:
    """compressed-tensors' words along the inputs, of numbers that have half their range added."""
    bits, half = packed.scheme.bits, np.float32(1 << (packed.scheme.bits - 1))
    words, inside = _words(packed, columns)
    values = unpack(packed.parts["weight_packed"].read(rows, words), bits)[:, inside]
    values = values.astype(np.float32)
    groups = _groups(packed, columns)
    if _ZERO in packed.parts:  # packed along the outputs, half added, too
        every = slice(0, packed.parts[_ZERO].info.shape[1])
        values -= packed_zeros(packed, rows, every)[:, groups].astype(np.float32)
    else:
        values -= half
    values *= _of_range(packed, _SCALE, rows, groups)
    return values


def packed_zeros(packed: Packed, rows: slice, groups: slice) -> np.ndarray:
    """Return zero points `[out, groups]` of compressed-tensors."""
    words, inside = _words(packed, rows)
    zeros = packed.parts[_ZERO].read(words, groups)
    return unpack(zeros.T, packed.scheme.bits)[:, inside].T


def _inputs_first(scheme: Scheme, parts: Mapping[str, Part]) -> Shape:
    """Of AWQ, which packs outputs, and of GPTQ, which packs inputs."""
    inputs, outputs = parts["qweight"].info.shape
    per = 32 // scheme.bits
    return (outputs * per, inputs) if scheme.kind == "awq" else (outputs, inputs * per)


def _of_inputs_first(scheme: Scheme, shape: Shape) -> dict[str, tuple[Shape, ...]]:
    groups = _ceil(shape[1], scheme.group) if scheme.group else 1
    zeros = groups, _ceil(shape[0], 32 // scheme.bits)
    return {"scales": ((groups, shape[0]),), "qzeros": (zeros,), "g_idx": (shape[1:],)}


def _gptq(packed: Packed, rows: slice, columns: slice) -> np.ndarray:
    """`scale * (code - zero)`, all with inputs first; words along the inputs."""
    words, inside = _words(packed, columns)
    stored = packed.parts["qweight"].read(words, rows).T
    values = unpack(stored, packed.scheme.bits)[:, inside]
    every = slice(0, packed.parts["qzeros"].info.shape[0])
    zeros = gptq_zeros(packed, rows, every)
    return _affine(packed, values, zeros, rows, _groups(packed, columns))


def gptq_zeros(packed: Packed, rows: slice, groups: slice) -> np.ndarray:
    """Return zero points `[out, groups]` of GPTQ, as they are taken from codes."""
    words, inside = _words(packed, rows)
    zeros = unpack(packed.parts["qzeros"].read(groups, words), packed.scheme.bits)[:, inside].T
    return zeros + np.int32(packed.scheme.zero_offset)


def _affine(
    packed: Packed, values: np.ndarray, zeros: np.ndarray, rows: slice, groups: np.ndarray
) -> np.ndarray:
    scales = packed.parts["scales"].read(slice(0, packed.parts["scales"].info.shape[0]), rows).T
    numbers = values.astype(np.float32) - zeros[:, groups].astype(np.float32)
    return numbers * scales[:, groups].astype(np.float32)


def _awq(packed: Packed, rows: slice, columns: slice) -> np.ndarray:
    """Return a range of an AWQ matrix as float32."""
    every = slice(0, packed.parts["qzeros"].info.shape[0])
    zeros = awq_numbers(packed, "qzeros", every, rows)
    values = awq_numbers(packed, "qweight", columns, rows)
    return _affine(packed, values, zeros, rows, _groups(packed, columns))


def awq_numbers(packed: Packed, name: str, inputs: slice, rows: slice) -> np.ndarray:
    """Return codes or zero points of AWQ, `[out, inputs]`: words have 8 outputs, interleaved."""
    words, inside = _words(packed, rows)
    stored = unpack(packed.parts[name].read(inputs, words), packed.scheme.bits)
    eights = stored.reshape(stored.shape[0], stored.shape[1] // 8, 8)[..., np.argsort(_AWQ_ORDER)]
    return eights.reshape(stored.shape)[:, inside].T


# ------------------------------------------------------------------- powers of two for 32 numbers


def _mxfp4_shape(scheme: Scheme, parts: Mapping[str, Part]) -> Shape:
    """As GPT-OSS has them unquantised: `[experts, in, out]`, stored with the inputs last."""
    experts, outputs, blocks, half = parts["blocks"].info.shape
    return experts, blocks * half * 2, outputs


def _of_mxfp4(scheme: Scheme, shape: Shape) -> dict[str, tuple[Shape, ...]]:
    experts, inputs, outputs = shape
    return {"scales": ((experts, outputs, inputs // _MX_BLOCK),)}


def _mxfp4(packed: Packed, experts: slice, inputs: slice, outputs: slice) -> np.ndarray:
    """Two e2m1 in a byte, the lower bits first, in units of a power of two for each 32."""
    first, last = inputs.start // _MX_BLOCK, _ceil(inputs.stop, _MX_BLOCK)
    blocks = slice(first, max(first, last))
    raw = packed.parts["blocks"].read(experts, outputs, blocks)
    powers = packed.parts["scales"].read(experts, outputs, blocks).view(_E8M0).astype(np.float32)
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:3], _MX_BLOCK)
    with np.errstate(over="ignore"):  # infinite, as one that is none is NaN: the loader refuses it
        values = E2M1[codes] * powers[..., None]
    values = values.reshape(*raw.shape[:2], raw.shape[2] * _MX_BLOCK)
    start = inputs.start - first * _MX_BLOCK
    return values[..., start : start + inputs.stop - inputs.start].swapaxes(1, 2)


LAYOUTS: Mapping[Kind, Layout] = {
    "fp8": Layout(
        "weight", _SCALE, (_INPUT, _BOUND), "float8_e4m3fn", _same_shape, _of_channels, _fp8
    ),
    "fp8_blocks": Layout(
        "weight", _SCALE, (), "float8_e4m3fn", _same_shape, _of_blocks, _fp8_blocks
    ),
    "int8": Layout("weight", _SCALE, (_ZERO, _INPUT), "int8", _same_shape, _of_channels, _int8),
    "packed": Layout(
        "weight_packed",
        _SCALE,
        ("weight_shape", _ZERO, "weight_g_idx"),
        "int32",
        _packed_shape,
        _of_packed,
        _packed,
    ),
    "gptq": Layout(
        "qweight", "scales", ("qzeros", "g_idx"), "int32", _inputs_first, _of_inputs_first, _gptq
    ),
    "awq": Layout("qweight", "scales", ("qzeros",), "int32", _inputs_first, _of_inputs_first, _awq),
    "mxfp4": Layout("blocks", "scales", (), "uint8", _mxfp4_shape, _of_mxfp4, _mxfp4),
}
"""The kinds of `quant_config.Scheme`."""
