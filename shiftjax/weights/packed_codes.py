"""The four bits of checkpoints as devices have them: codes, scales and zero points of a range.

A row of `READERS` for every kind of `quant_config.Scheme` that has them. Matrices are `[out, in]`,
codes `[out, in / 2]` with input 2i in the lower bits of byte i, and scales and zero points
`[out, groups]`; of mxfp4's stacks all are `[experts, .., out]`. Nothing becomes wide, and peak host
memory is some four times the range.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from shiftjax.parallel.four_bits import SYMMETRIC_ZERO
from shiftjax.weights.packed import Packed, awq_numbers, gptq_zeros, packed_zeros, words_of
from shiftjax.weights.source import OF_CODES, OF_SCALE, OF_ZEROS, CheckpointError

Index = tuple[slice, ...]
LARGEST_E8M0 = 252  # 2^125: six times as much is the largest that float32 has


class Reader(NamedTuple):
    """How a range of a matrix is read: its codes, their scales, and zero points."""

    codes: Callable[..., np.ndarray]
    scales: Callable[..., np.ndarray]
    zeros: Callable[..., np.ndarray] | None = None


def read_part(packed: Packed, suffix: str, index: Index) -> np.ndarray:
    """Return a range of what a matrix's name has with OF_CODES, OF_SCALE or OF_ZEROS behind it.

    It need not be contiguous: of stacks each expert is turned back by whoever wants it.
    Raises CheckpointError for what devices cannot have: groups of inputs that are no neighbours,
    zero points in what calls itself symmetric, powers of two that are none.
    """
    reader = READERS[packed.scheme.kind]
    read = {OF_CODES: reader.codes, OF_SCALE: reader.scales, OF_ZEROS: reader.zeros}[suffix]
    assert read is not None
    return read(packed, *index)


def pair(numbers: np.ndarray) -> np.ndarray:
    """Put two neighbours of the last dimension in a byte, the first in the lower bits."""
    return numbers[..., ::2] | numbers[..., 1::2] << np.uint8(4)


def _bytes(words: np.ndarray, inside: slice) -> np.ndarray:
    """Some bytes of 32-bit words along the last dimension."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)[:, inside]


def _check_order(packed: Packed) -> None:
    """Raise CheckpointError where the inputs of a group are no neighbours."""
    for name in ("g_idx", "weight_g_idx"):
        if name not in packed.parts:
            continue
        part, inputs = packed.parts[name], packed.shape[1]
        groups = np.arange(inputs) // (packed.scheme.group or inputs)
        if not np.array_equal(part.read(slice(0, inputs)), groups):
            raise CheckpointError(
                f"{part.info.file}: tensor {part.name}: groups of inputs that are no neighbours, "
                "and the configuration does not say so: say --quantization none"
            )


# ------------------------------------------------------------------- compressed-tensors


def _packed_codes(packed: Packed, rows: slice, columns: slice) -> np.ndarray:
    _check_order(packed)
    words, inside = words_of(columns, 4)
    return _bytes(packed.parts["weight_packed"].read(rows, words), inside)


def _packed_scales(packed: Packed, rows: slice, groups: slice) -> np.ndarray:
    part = packed.parts["weight_scale"]
    if packed.scheme.group is not None:
        return part.read(rows, groups).astype(np.float32)
    whole = part.read(*(slice(0, size) for size in part.info.shape)).astype(np.float32)
    return np.broadcast_to(whole.reshape(-1), packed.shape[:1])[rows, None][:, groups]


# ------------------------------------------------------------------- inputs first


def _inputs_first_scales(packed: Packed, rows: slice, groups: slice) -> np.ndarray:
    if packed.scheme.is_symmetric:
        _check_symmetric(packed, rows, groups)
    return packed.parts["scales"].read(groups, rows).T.astype(np.float32)


def _check_symmetric(packed: Packed, rows: slice, groups: slice) -> None:
    part = packed.parts["qzeros"]
    if (_gptq_zeros(packed, rows, groups) != SYMMETRIC_ZERO).any():
        raise CheckpointError(
            f"{part.info.file}: tensor {part.name}: expected zero points of {SYMMETRIC_ZERO}, "
            "because the configuration says that codes are symmetric: say --quantization none"
        )


def _gptq_codes(packed: Packed, rows: slice, columns: slice) -> np.ndarray:
    _check_order(packed)
    words, inside = words_of(columns, 4)
    return _bytes(packed.parts["qweight"].read(words, rows).T, inside)


def _gptq_zeros(packed: Packed, rows: slice, groups: slice) -> np.ndarray:
    return gptq_zeros(packed, rows, groups).astype(np.uint8)


def _awq_codes(packed: Packed, rows: slice, columns: slice) -> np.ndarray:
    inputs = slice(2 * columns.start, 2 * columns.stop)
    return pair(awq_numbers(packed, "qweight", inputs, rows))


def _awq_zeros(packed: Packed, rows: slice, groups: slice) -> np.ndarray:
    return awq_numbers(packed, "qzeros", groups, rows)


# ------------------------------------------------------------------- stacks of experts


def _mxfp4_codes(packed: Packed, experts: slice, columns: slice, outputs: slice) -> np.ndarray:
    """The bytes of the file, 16 in a block."""
    blocks, inside = words_of(columns, 16)
    raw = packed.parts["blocks"].read(experts, outputs, blocks)
    return raw.reshape(*raw.shape[:2], -1)[..., inside].swapaxes(1, 2)


def _mxfp4_scales(packed: Packed, experts: slice, groups: slice, outputs: slice) -> np.ndarray:
    part = packed.parts["scales"]
    powers = part.read(experts, outputs, groups).view(np.uint8)
    if (powers > LARGEST_E8M0).any():
        raise CheckpointError(
            f"{part.info.file}: tensor {part.name}: expected powers of two up to 2^125, found "
            f"{int((powers > LARGEST_E8M0).sum())} that are larger, or none"
        )
    return powers.swapaxes(1, 2)


READERS: Mapping[str, Reader] = {
    "packed": Reader(_packed_codes, _packed_scales, packed_zeros),
    "gptq": Reader(_gptq_codes, _inputs_first_scales, _gptq_zeros),
    "awq": Reader(_awq_codes, _inputs_first_scales, _awq_zeros),
    "mxfp4": Reader(_mxfp4_codes, _mxfp4_scales),
}
"""The kinds of `quant_config.Scheme` that may have four bits."""
