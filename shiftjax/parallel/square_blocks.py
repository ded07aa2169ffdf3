"""Where a checkpoint's scales of square blocks are those of a row-parallel matrix's. No JAX."""

import math

import numpy as np

from shiftjax.arch.weights import Weight
from shiftjax.options import ConfigError
from shiftjax.parallel.blocks import BLOCK
from shiftjax.parallel.layout import Layout


def squares_of_blocks(plain: Weight, codes: Weight, layout: Layout) -> np.ndarray:
    """Return which of a checkpoint's blocks of inputs each stored one is a part of.

    Of a stored row-parallel matrix and its codes: int `[rows of codes, blocks of a row]`; -1 where
    all inputs are padding.

    Raises:
        ConfigError: inputs of one stored block are of several blocks of the checkpoint.
    """
    assert plain.axes[0] is not None
    rows = layout.source_rows(plain.axes[0], layout.stored_in(plain))[:, None]
    per_row = math.prod(plain.shape[1:-1])
    inputs = np.where(rows < 0, -1, rows * per_row + np.arange(per_row))
    squares = np.where(inputs < 0, -1, inputs // BLOCK)
    parts = squares.reshape(codes.shape[0], -1, codes.shape[-1])
    found = parts.max(axis=-1)
    if not ((parts == found[..., None]) | (parts < 0)).all():
        words = (
            f"{plain.name}: {codes.shape[-1]} inputs share a scale, which cuts blocks of {BLOCK}"
        )
        raise ConfigError([f"{words} of the checkpoint: use --quantization none"])
    return found
