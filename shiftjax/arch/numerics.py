"""How partial products of row-parallel weights are summed over devices, and what that promises.

    fast        each rounded to the type of activations, then any all-reduce
    float32     float32, any all-reduce, rounded once
    invariant   float32 of one leaf a device of the widest group, one binary tree, rounded once
    integer     the same leaves as fixed-point numbers, which any all-reduce sums to the same bits

A *leaf* is what one device of the widest mode adds: 1/P of the rows of a weight. A mode that splits
weights less has several leaves on a device and multiplies them one by one, so that all modes add up
the same numbers. Strict ones promise equal bits in every mode, batch and chunk; `models/leaves.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

NumericsName = Literal["fast", "float32", "invariant", "integer"]


class Numerics(NamedTuple):
    """One row of the table."""

    name: NumericsName
    is_strict: bool = False  # the same bits whatever the mode, the batch and the chunk
    is_wide: bool = True  # partial products are float32
    is_tree: bool = False  # leaves are summed in one binary tree: they are a power of two
    # Rows of a product, at least: XLA has other products, with other orders of sums, for fewer.
    least_rows: int = 1


LEAST_ROWS = 8
WIDE_BYTES = 4  # of a partial product that is not rounded
# On GPUs products of strict numerics have one tile: of so many rows and channels, where that suits
# (`device/strict.py`), and rows of codes (`pallas_kernels/block_problem.py`).
GPU_TILE, GPU_TILE_OF_CODES = 128, 64
FAST = Numerics("fast", is_wide=False)
NUMERICS: Mapping[str, Numerics] = MappingProxyType(
    {
        each.name: each
        for each in (
            FAST,
            Numerics("float32"),
            Numerics("invariant", is_strict=True, is_tree=True, least_rows=LEAST_ROWS),
            Numerics("integer", is_strict=True, least_rows=LEAST_ROWS),
        )
    }
)
