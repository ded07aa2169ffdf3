"""Launches of a layer by name, in steps of Llama-70B compiled for 8 H200s that are not here.

What costs price is what is launched: a fusion that is lost, or won, fails here by name.
"""

import aot
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from spent import exhaustive, thorough

aot.require()

from steps import Case, Compiler, modes_of  # noqa: E402

from serving.bench.launch_list import Launch, layer_launches, named_launches  # noqa: E402
from shiftjax.costs.machine_files import load_engine  # noqa: E402
from shiftjax.parallel.grid import Mode  # noqa: E402

pytestmark = pytest.mark.thorough

FEW, MANY = 2, 4  # layers; XLA's choices have a period of two
ATTENDING = ("decode_attention", "prefill_attention")
CHUNKS = 1  # more where prompts are in the step: what joins their parts
CASES = [
    Case(sp, tp, mode, size)
    for size in ("bf16", "fp8")
    for sp, tp in ((1, 8), (8, 1))
    for mode in modes_of(sp)
]
ROWS = [(case,) for case in CASES]


def name_of(case: Case) -> str:
    return f"{case.size}-{case.sp}x{case.tp}-{case.mode.label}"


@pytest.fixture(scope="module")
def compiled() -> Compiler:
    return Compiler()


def of_a_layer(case: Case, compiled: Compiler) -> list[Launch]:
    depths = (case._replace(num_layers=layers) for layers in (FEW, MANY))
    return layer_launches(*(named_launches(compiled(each).text) for each in depths))


@pytest.mark.parametrize(
    ("case",), [*thorough(*ROWS[2::2]), *exhaustive(*ROWS[:2], *ROWS[3::2])], ids=name_of
)
def test_a_layer_launches_what_costs_count(case, compiled):
    """Beside products, attention and what devices exchange."""
    engine, found = load_engine("shiftjax"), of_a_layer(case, compiled)
    kinds = [one for one in found if one.kind in ("other", "kernel") and one.name not in ATTENDING]
    rows, exchanges = case.bucket.tokens // case.mode.sp, case.mode.sp > 1
    counted = engine.num_layer_launches(case.formats.dense, rows, exchanges=exchanges)
    counted += CHUNKS * exchanges
    assert abs(len(kinds) - counted) <= 1, [one.name for one in found]


@pytest.mark.skipif(not hasattr(plgpu, "alloc_semaphore"), reason="needs jax 0.12")
@pytest.mark.parametrize("size", ["fp8", *exhaustive("bf16")])
def test_sums_by_the_switch_are_in_the_launches_of_their_norms(size, compiled):
    """Two launches a layer less: as costs have it, the other launches are the same."""
    case = Case(1, 8, Mode(1, 1), size)
    plain, switched = (of_a_layer(case._replace(sums=s), compiled) for s in ("xla", "multimem"))
    assert len(switched) == len(plain) - 2
    assert [one.name for one in switched].count("sum_norm_rows") == 2
    assert not [one.name for one in switched if one.kind == "collective"]


@pytest.mark.parametrize("size", ["bf16", "fp8"])
def test_base_launches_no_more_than_shift_but_its_exchanges(size, compiled):
    """Codes do not depend on what a device has of a row: no loop over parts of it."""
    base, shift = (of_a_layer(Case(8, 1, mode, size), compiled) for mode in modes_of(8))
    products = [[one for one in each if one.kind == "product"] for each in (base, shift)]
    assert len(products[0]) <= len(products[1]) + 1  # gate and up may be two
    engine, fmt = load_engine("shiftjax"), Case(8, 1, Mode(8, 1), size).formats.dense
    own, others = engine.launches_of(fmt, 192, exchanges=True), engine.launches_of(fmt)
    exchanges = 2 + len(own) - len(others)
    tiles = 3  # of chunks: attention, what joins its parts, and a copy of queries
    assert len(base) <= len(shift) + exchanges + tiles
