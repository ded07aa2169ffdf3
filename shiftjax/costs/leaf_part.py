"""Seconds of products with row-parallel matrices, by how their results are summed. No JAX.

Where numerics are strict (`arch/numerics.py`) a device multiplies its leaves one by one. Launches
of their own make of them what is exchanged, and of that what layers read.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from shiftjax.arch.numerics import NUMERICS, WIDE_BYTES, NumericsName
from shiftjax.costs.kernel_costs import KernelCosts
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout


class Passes(NamedTuple):
    """What is read and written beside products and collectives, in float32 numbers of a result."""

    of_leaf: int  # for each leaf
    once: int
    launches: int  # as compiled steps of Llama-70B have them
    more: int = 0  # where a device has several leaves


PASSES: Mapping[NumericsName, Passes] = MappingProxyType(
    {
        "fast": Passes(0, 0, 0),
        "float32": Passes(0, 0, 0),
        # the tree of a device's own, if it has several; the tree of all devices' (read once)
        "invariant": Passes(1, 1, 1, 1),
        # the largest number of a token, whole units, and numbers again
        "integer": Passes(2, 2, 3),
    }
)


def leaves_of(kernels: KernelCosts, layout: Layout, mode: Mode) -> int:
    """Return the leaves of a weight that a device multiplies one by one."""
    is_strict = NUMERICS[kernels.formats.sums].is_strict
    return layout.padded_for // layout.ways(mode) if is_strict else 1


def row_product(
    kernels: KernelCosts, layout: Layout, mode: Mode, rows: float, inner: int
) -> tuple[float, int]:
    """(seconds, kernels) of a product with a device's part of a row-parallel matrix."""
    numerics, hidden = NUMERICS[kernels.formats.sums], layout.model.hidden_size
    num, passes = leaves_of(kernels, layout, mode), PASSES[numerics.name]
    output = WIDE_BYTES if numerics.is_wide else 0
    seconds = num * kernels.product(rows, inner // num, hidden, output)
    if layout.num_devices == 1:
        return seconds, num
    numbers = (passes.of_leaf * num + passes.once) * rows * hidden
    launches = passes.launches + (passes.more if num > 1 else 0)
    return seconds + kernels.moved(numbers * WIDE_BYTES), num + launches
