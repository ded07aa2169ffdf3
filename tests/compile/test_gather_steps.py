"""Gathered weights, compiled for 8 H200s: the gathers hide behind products, two layers at most."""

import aot
import pytest
from hlo import Instruction, collectives, entry, shape_bytes

from shiftjax.costs.collectives import weight_collectives
from shiftjax.costs.memory import temporary_bytes, weight_bytes
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

aot.require()
pytestmark = pytest.mark.thorough

from steps import (  # noqa: E402
    NUM_DEVICES,
    NUM_LAYERS,
    Case,
    Compiler,
    define_step,
    device_bytes,
    llama_70b,
    predicted_collectives,
)

LARGE = 32 << 20  # bytes, of a matrix that is not k or v
NUM_TOKENS = 16_384  # of a step: from here on gathering is predicted to pay
CASES = [
    Case(sp, tp, Mode(sp, sp), size, "gather", num_layers=3, num_tokens=NUM_TOKENS)
    for sp, tp, size in ((8, 1, "bf16"), (4, 2, "fp8"))
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.size}-{c.sp}x{c.tp}")


@pytest.fixture(scope="module")
def compiled() -> Compiler:
    return Compiler()


def is_product(one: Instruction) -> bool:
    """XLA's own, a library's, or a kernel of codes."""
    return any(name in one.rest for name in ("gemm", "cublas", "block_product", "block_gated"))


def products_behind(text: str, least_bytes: int) -> list[tuple[int, int]]:
    """(bytes, products between start and done) of every gather of so many bytes, in order."""
    begun: dict[str, int] = {}
    found, num_products = [], 0
    for one in entry(text):
        num_products += is_product(one)
        if one.opcode == "all-gather-start":
            begun[one.name] = num_products
        elif one.opcode == "all-gather-done" and least_bytes <= (size := shape_bytes(one.shape)):
            found.append((size, num_products - begun[one.operands[0]]))
    return found


def large(gathers: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    return {key: count for key, count in gathers.items() if key[1] >= LARGE}


@every_case
def test_every_weight_of_a_layer_is_gathered_once(case, compiled):
    """The compiler may put small ones together, which is well: k and v, and scales."""
    one = compiled(case)
    predicted, found = predicted_collectives(one), collectives(one.text)
    assert large(found) == large(predicted)
    assert sum(large(predicted).values()) >= 5 * case.num_layers  # q, o, gate, up, down
    total = [sum(size * count for (_, size), count in each.items()) for each in (found, predicted)]
    assert total[0] == total[1]


@every_case
def test_matrices_arrive_while_products_run(case, compiled):
    """Those of the first layer have nothing to hide behind; some hide behind attention."""
    one = compiled(case)
    moves = weight_collectives(one.step.layout, case.mode, case.formats)
    matrices = [move.num_bytes for move in moves if move.num_bytes >= LARGE]
    gathers = products_behind(one.text, LARGE)
    assert len(gathers) == len(matrices) == 5 * case.num_layers  # none waits where it stands
    later = gathers[len(gathers) // case.num_layers :]
    hidden = sum(size for size, products in later if products)
    assert hidden > 0.5 * sum(size for size, _ in later)


@every_case
def test_no_more_than_two_layers_are_held(case, compiled):
    one, (tokens, rows) = compiled(case), case.bucket[:2]
    assert one.temporary_bytes < temporary_bytes(one.step.layout, case.formats, tokens, 0, rows)


@every_case
def test_a_device_holds_what_plain_tp_would_to_the_byte(case, compiled):
    """Of all 80 layers, in both modes, and in few: an eighth, for there are 8 KV heads."""
    layout = Layout(llama_70b(NUM_LAYERS), 1, NUM_DEVICES)
    expected = weight_bytes(layout, case.formats)
    step, _ = define_step(case._replace(num_layers=NUM_LAYERS), compiled.devices)
    for mode in (case.mode, Mode(case.sp, 1)):
        assert device_bytes(step.weights.abstract(mode, step.mesh)) == expected


@every_case
def test_shift_is_given_the_shards_that_it_views_elsewhere(case, compiled):
    shift = Mode(case.sp, 1)
    own, viewed = (
        define_step(case._replace(strategy=strategy), compiled.devices)[0]
        for strategy in ("gather", "alias")
    )
    apart = (step.weights._replace(is_joined=False) for step in (own, viewed))
    pairs = zip(*(weights.abstract(shift, own.mesh) for weights in apart), strict=True)
    for ours, theirs in pairs:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.sharding.is_equivalent_to(theirs.sharding, len(ours.shape))
