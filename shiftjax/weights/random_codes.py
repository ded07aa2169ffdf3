"""Random codes of four bits: as a checkpoint that has them would say them."""

import math
import zlib

import numpy as np

from shiftjax.arch.config import Codes, ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.weights import weights_of
from shiftjax.parallel.four_bits import SYMMETRIC_ZERO
from shiftjax.parallel.stored import is_quantised
from shiftjax.weights.packed import E2M1
from shiftjax.weights.source import OF_CODES, OF_SCALE, OF_ZEROS, part_shape

_PER_COUNTER = 32  # bytes of one counter of Philox
_SPREAD = {"mxfp4": 2.93, "int4": 4.64}  # root mean square of all codes, less their zero


def packed_tensors(config: ModelConfig) -> frozenset[str]:
    """Return the matrices of a model that are codes of four bits."""
    codes = config.codes
    if codes is None or not FORMATS[codes.format].is_packed:
        return frozenset()
    weights, formats = weights_of(config), Formats(codes.format)
    packed = (each for each in weights if is_quantised(each, config, formats))
    return frozenset(name for each in packed for name in each.tensors)


def read_random(
    key: tuple[int, str], suffix: str, shape: tuple[int, int], codes: Codes, rows: slice
) -> np.ndarray:
    """Return rows of the numbers of a matrix of this shape, or of a part of it.

    All depends on the key alone, a seed and the matrix's name. Numbers have variance 1 / inputs.
    """
    num, inputs = rows.stop - rows.start, shape[1]
    own = FORMATS[codes.format]
    unit = 1 / (_SPREAD[codes.format] * math.sqrt(inputs))
    power = round(math.log2(unit))
    scale = power + 127 if own.scale == np.uint8 else unit
    if suffix == OF_SCALE:
        groups = part_shape(shape, suffix, codes)[1]
        return np.full((num, groups), scale, own.scale)
    if suffix == OF_ZEROS:
        return np.full((num, part_shape(shape, suffix, codes)[1]), SYMMETRIC_ZERO, np.uint8)
    raw = random_bytes(key, rows.start * inputs // 2, rows.stop * inputs // 2).reshape(num, -1)
    if suffix == OF_CODES:
        return raw
    numbers = np.stack([raw & 15, raw >> 4], axis=-1).reshape(num, inputs)
    if own.scale == np.uint8:
        return E2M1[numbers] * np.float32(2.0**power)
    return (numbers.astype(np.float32) - SYMMETRIC_ZERO) * np.float32(scale)


def random_bytes(key: tuple[int, str], start: int, stop: int) -> np.ndarray:
    """Return bytes [start, stop) of a tensor's stream, by a seed and the tensor's name."""
    seed, name = key
    bits = np.random.Philox(key=np.array([seed, zlib.crc32(name.encode())], np.uint64))
    first = start // _PER_COUNTER
    bits.advance(first)
    words = 4 * (-(-stop // _PER_COUNTER) - first)
    raw = bits.random_raw(words).view(np.uint8)
    return raw[start - first * _PER_COUNTER : stop - first * _PER_COUNTER]
