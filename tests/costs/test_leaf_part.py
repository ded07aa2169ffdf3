"""What strict numerics cost beside what they exchange: leaves, passes, and fixed tiles on GPUs."""

import pytest

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.kernel_costs import KernelCosts
from shiftjax.costs.leaf_part import row_product
from shiftjax.costs.machine_files import load_machine
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

MODEL = PRESETS["llama-70b"]
LAYOUT, BASE, SHIFT = Layout(MODEL, 4, 2), Mode(4, 4), Mode(4, 1)
CPUS, GPUS = load_machine("cpu"), load_machine("h200x8")
ROWS = 64


def kernels(sums, machine=CPUS) -> KernelCosts:
    return KernelCosts(machine, Formats(sums=sums))


@pytest.mark.parametrize(
    ("sums", "mode", "launches"),
    [
        ("fast", BASE, 1),
        ("float32", BASE, 1),
        ("invariant", SHIFT, 2),  # a leaf, and the tree of all devices
        ("invariant", BASE, 6),  # four, the tree of them, and that of both devices
        ("integer", SHIFT, 4),
        ("integer", BASE, 7),
    ],
)
def test_a_device_multiplies_its_leaves_one_by_one(sums, mode, launches):
    inner = MODEL.intermediate_size // LAYOUT.ways(mode)
    seconds, num = row_product(kernels(sums), LAYOUT, mode, ROWS, inner)
    assert num == launches
    at_once, _ = row_product(kernels("float32"), LAYOUT, mode, ROWS, inner)
    assert (seconds > at_once) == (sums in ("invariant", "integer"))


def test_a_device_alone_sums_nothing():
    alone, inner = Layout(MODEL, 1, 1), MODEL.intermediate_size
    both = [row_product(kernels(n), alone, Mode(1, 1), ROWS, inner) for n in ("float32", "integer")]
    assert both[0] == both[1]


def test_on_gpus_strict_products_and_decodes_have_one_tile():
    """A product of few rows computes a whole tile; a decode waits for its whole context."""
    strict, fast = (kernels(sums, GPUS) for sums in ("invariant", "fast"))
    sizes = MODEL.hidden_size, 1280
    assert strict.product(1, *sizes) == strict.product(128, *sizes) > 4 * fast.product(1, *sizes)
    assert kernels("invariant").product(1, *sizes) == kernels("fast").product(1, *sizes)
    one, two = (
        each.attention(8, MODEL.head_dim, LAYOUT.cache).seconds(Work.decode(1, 8192), 1)
        for each in (fast, strict)
    )
    assert two > 4 * one
