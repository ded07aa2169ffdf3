"""Steps with experts, compiled for 8 H200s: nothing of an expert is moved, copied or widened."""

import math
from collections import Counter
from dataclasses import replace

import aot
import pytest
from hlo import collectives, instructions, sizes_of, weight_moves

from shiftjax.arch.presets import PRESETS
from shiftjax.device.step import StepDef
from shiftjax.parallel.grid import Mode

aot.require()
pytestmark = pytest.mark.thorough

from steps import (  # noqa: E402
    KERNEL,
    Case,
    CompiledStep,
    Compiler,
    predicted_collectives,
)

NUM_LAYERS = 2
TOKENS = 1280  # of base steps: no activation has as many numbers as a matrix
QWEN = replace(PRESETS["qwen3-30b-a3b"], num_layers=NUM_LAYERS)
CASES = [
    Case(8, 1, Mode(8, 8), model=QWEN, num_tokens=TOKENS),
    Case(8, 1, Mode(8, 1), model=QWEN),
    Case(8, 1, Mode(8, 8), "fp8", model=QWEN, num_tokens=TOKENS),
    Case(8, 1, Mode(8, 1), "fp8", model=QWEN),
    Case(8, 1, Mode(8, 8), model=QWEN, num_tokens=TOKENS, experts_sp=8),
]
EXPERT_KERNELS = 3  # of a layer: rows collected, as they are or as codes; gated, product
LOOPS = Case(8, 1, Mode(8, 8), model=QWEN, num_tokens=TOKENS, attention="xla")


def name_of(case: Case) -> str:
    name = f"{case.size}-{case.sp}x{case.tp}-{case.mode.label}-{case.attention}"
    return name if case.experts_sp == 1 else f"{name}-experts{case.experts_sp}"


@pytest.fixture(scope="module")
def compiled() -> Compiler:
    return Compiler()


def stacks(one: CompiledStep) -> set[tuple[int, int]]:
    """(rows, columns) of the matrices of a layer's experts on a device."""
    pairs = zip(one.step.model.declared, one.shards, strict=True)
    shapes = [x.sharding.shard_shape(x.shape) for weight, x in pairs if weight.axes[0] == "experts"]
    return {(math.prod(shape[:-1]), shape[-1]) for shape in shapes if len(shape) == 3}


def loops_of_rows(one: CompiledStep) -> list[str]:
    """Loops that carry hidden states: over tiles of experts. The sampler's loops carry none."""
    loops = [i for i in instructions(one.text) if i.opcode == "while"]
    return [i.name for i in loops if f",{QWEN.hidden_size}]" in i.shape]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_experts_are_read_where_they_are(case, compiled):
    one = compiled(case)
    item, wider = {"bf16": ("bf16", "f32"), "fp8": ("f8e4m3fn", "bf16")}[case.size]
    num = 16 * case.experts_sp
    assert stacks(one) == {(num * 768, 2048), (num * 2048, 768)}
    assert weight_moves(one.text, stacks(one), item) == []
    moves = ("copy", "transpose", "convert", "concatenate", "copy-start")
    large = [i for i in instructions(one.text) if i.opcode in moves]
    numbers = {rows * columns for rows, columns in stacks(one)}
    kinds = [i.shape.partition("[")[0] for i in large]
    whole = [i for i, kind in zip(large, kinds, strict=True) if kind in (item, wider)]
    assert [i for i in whole if math.prod(sizes_of(i.shape)) in numbers] == []


def test_counting_pairs_takes_one_kernel_and_no_collective(compiled, monkeypatch):
    """Those of all layers are put together; the sizes are there already."""
    case = CASES[3]
    counts = compiled(case)
    monkeypatch.setattr(StepDef, "counts", property(lambda self: False))
    plain = Compiler()(case)
    assert collectives(counts.text) == collectives(plain.text)
    kernels = [
        sum(each.opcode in ("fusion", "custom-call", "copy") for each in instructions(one.text))
        for one in (counts, plain)
    ]
    assert kernels[0] == kernels[1] + 1


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_collectives_are_predicted_to_the_byte(case, compiled):
    one = compiled(case)
    assert collectives(one.text) == predicted_collectives(one)


def test_experts_of_base_move_nothing(compiled):
    """But for the exchanges of attention, hidden states of sampled rows, and what they sample."""
    whole, shared = (
        compiled(Case(8, 1, Mode(8, 8), model=QWEN, num_tokens=TOKENS, experts_sp=sp))
        for sp in (8, 1)
    )
    kinds = Counter(kind for kind, _ in collectives(whole.text).elements())
    assert kinds["all-to-all"] == 2 * NUM_LAYERS
    assert kinds["all-gather"] == kinds["reduce-scatter"] == 0
    of_experts = Counter(kind for kind, _ in collectives(shared.text).elements()) - kinds
    assert of_experts == {"all-gather": NUM_LAYERS, "reduce-scatter": NUM_LAYERS}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_products_of_experts_are_kernels_and_nothing_loops(case, compiled):
    one, alone = compiled(case), case.model
    assert one.step.experts.name == "pallas" and alone is not None
    kernels = one.text.count(KERNEL)
    assert kernels >= NUM_LAYERS * (EXPERT_KERNELS + 2)
    assert loops_of_rows(one) == []


def test_without_kernels_experts_are_a_loop(compiled):
    one = compiled(LOOPS)
    assert one.step.experts.name == "xla" and len(loops_of_rows(one)) == NUM_LAYERS
