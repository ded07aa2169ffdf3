"""Steps with adapters, compiled for GPUs: no collective more, and launches as costs count them."""

from dataclasses import replace

import aot
import pytest
from spent import exhaustive, thorough

aot.require()

from hlo import collectives, launches  # noqa: E402
from steps import Case, Compiler, llama_70b  # noqa: E402

from shiftjax.arch.config import LayerParts, LoraSlots  # noqa: E402
from shiftjax.costs.kernel_costs import KernelCosts  # noqa: E402
from shiftjax.costs.lora_part import lora_products  # noqa: E402
from shiftjax.costs.machine_files import load_machine  # noqa: E402
from shiftjax.parallel.grid import Mode  # noqa: E402

pytestmark = pytest.mark.thorough
LAYERS = 2
SHIFT, BASE = Mode(4, 1), Mode(4, 4)


@pytest.fixture(scope="module")
def compiled() -> Compiler:
    return Compiler()


@pytest.mark.parametrize(
    ("size", "mode"),
    [*thorough(("bf16", SHIFT), ("bf16", BASE)), *exhaustive(("fp8", SHIFT), ("fp8", BASE))],
)
def test_adapters_add_products_and_no_collective(size, mode, compiled):
    model = llama_70b(LAYERS)
    adapted = replace(model, lora=LoraSlots(8, 16))
    plain, with_adapters = (
        compiled(Case(4, 2, mode, size, model=each)) for each in (model, adapted)
    )
    assert collectives(plain.text) == collectives(with_adapters.text) != {}
    kernels = KernelCosts(load_machine("h200x8"), with_adapters.case.formats)
    rows = with_adapters.case.bucket.tokens // mode.sp
    _, counted = lora_products(kernels, with_adapters.case.layout, mode, rows, LayerParts())
    added = len(launches(with_adapters.text)) - len(launches(plain.text))
    assert abs(added / LAYERS - counted) <= (0 if mode == SHIFT else 3)
