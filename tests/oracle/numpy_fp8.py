"""The decoder of `numpy_llama` in e4m3 codes by ml_dtypes, sums in float64: matrices, KV, or both.

Written from the OCP definition of the format and independent of the code under test.
"""

from collections.abc import Collection
from contextlib import contextmanager
from unittest.mock import patch

import ml_dtypes
import numpy as np

from oracle import numpy_experts, numpy_llama

E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = 128  # inputs that share a scale, but for those of o and down


def by_blocks(x: np.ndarray, block: int) -> np.ndarray:
    """What rows look like as codes, each block of inputs in its own units; the last may be less."""
    parts = np.split(x, range(block, x.shape[-1], block), axis=-1)
    return np.concatenate([rounded(part) for part in parts], axis=-1)


def rounded(x: np.ndarray) -> np.ndarray:
    """What a row looks like as codes in units of its largest number / 448."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / 448)
    scale = np.where(scale == 0, np.float32(1), scale)
    return (x / scale).astype(E4M3).astype(np.float64) * scale


@contextmanager
def quantised(
    o: int = BLOCK,
    down: int = BLOCK,
    coded: Collection[str] | None = None,
    input_scale: float | None = None,
):
    """While it lasts, products have codes; so many inputs of o and of an MLP's down share a scale.

    `coded` are the tensors of a checkpoint that are numbers of codes already, others are plain.
    With `input_scale` all inputs are in its units.
    """
    plain_linear = numpy_llama.linear
    blocks = {"o_proj": o, "down_proj": down}

    def linear(x: np.ndarray, tensors: numpy_llama.Tensors, name: str) -> np.ndarray:
        if coded is not None and f"{name}.weight" not in coded:
            return plain_linear(x, tensors, name)
        weight = tensors[f"{name}.weight"]
        weight = rounded(weight) if coded is None else weight
        codes = by_blocks(x, blocks.get(name.rpartition(".")[2], BLOCK))
        if input_scale is not None:
            codes = saturated(x, np.array(input_scale)).astype(np.float64) * input_scale
        y = codes @ weight.T
        return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y

    def multiply(matrix: np.ndarray, x: np.ndarray) -> np.ndarray:
        return (rounded(matrix) if coded is None else matrix) @ by_blocks(x, BLOCK)

    with (
        patch.object(numpy_llama, "linear", linear),
        patch.object(numpy_experts, "multiply", multiply),
    ):
        yield


def saturated(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The codes of numbers in units of `scale`; what is too large for one has the largest."""
    with np.errstate(over="ignore"):  # to infinity, which is too large as well
        units = x.astype(np.float32) / scale.astype(np.float32)
    return np.clip(units, -448, 448).astype(E4M3)


@contextmanager
def cached():
    """While it lasts, keys and values are codes in units of the checkpoint's scales, or of 1."""

    def kept(x: np.ndarray, tensors: numpy_llama.Tensors, name: str) -> np.ndarray:
        scale = np.reshape(tensors.get(name, np.ones(1)), (-1, 1))
        return saturated(x, scale).astype(np.float64) * scale

    with patch.object(numpy_llama, "kept", kept):
        yield
