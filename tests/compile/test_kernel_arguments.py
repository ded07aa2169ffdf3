"""What XLA gives to kernels in compiled steps: slices in place, where Mosaic takes them.

A fusion of a call and its slices forgets what the call writes in place, and Mosaic refuses an
argument that does not begin at 256 bytes. Only a chip says so; the program shows both.
"""

import math
import re
from dataclasses import replace

import aot
import pytest

aot.require()

from steps import Case, Compiler  # noqa: E402

from shiftjax.arch.presets import PRESETS  # noqa: E402
from shiftjax.device.joined import ARGUMENT_ALIGNMENT  # noqa: E402
from shiftjax.parallel.grid import Mode  # noqa: E402

pytestmark = pytest.mark.thorough

BYTES = {"s32": 4, "f32": 4, "bf16": 2, "f8e4m3fn": 1}
ALIAS = "output_to_operand_aliasing"
SLICE = re.compile(r"= (\w+)\[[\d,]*\]\S* slice\(%(\w[\w.]*)\), slice=\{([^}]*)\}")
LLAMA, SMALL = PRESETS["llama-70b"], PRESETS["smollm2-135m"]  # hidden sizes of 8,192 and of 576
QWEN = PRESETS["qwen3-30b-a3b"]  # norms of heads
BIASED = PRESETS["qwen2.5-32b"]  # biases of heads
CASES = {
    "a prompt": Case(2, 2, Mode(2, 2), model=LLAMA),
    "decodes in FP8": Case(2, 2, Mode(2, 1), "fp8", model=LLAMA),
    "decodes with norms of heads and experts": Case(1, 4, Mode(1, 1), model=QWEN),
    "decodes with biases": Case(2, 2, Mode(2, 1), model=BIASED),
    "decodes of a narrow model": Case(1, 1, Mode(1, 1), model=SMALL, num_decodes=8),
}


@pytest.fixture(scope="module")
def compiled() -> Compiler:
    return Compiler()


def fusions_of_kernels(text: str) -> list[str]:
    """The computations that a kernel and the slices that it reads are."""
    computations = re.split(r"\n(?=%|ENTRY)", text)
    return [
        each
        for each in computations
        if each.startswith("%dynamic-slice-fusion") and 'custom_call_target="mosaic' in each
    ]


def begins(computation: str) -> list[int]:
    """Where each slice of a computation begins, in bytes."""
    found = []
    for dtype, source, limits in SLICE.findall(computation):
        declared = re.search(rf"%{re.escape(source)} = \w+\[([\d,]*)\]", computation)
        assert declared is not None
        sizes = [int(size) for size in declared[1].split(",")]
        starts = [int(limit.strip("[ ").split(":")[0]) for limit in limits.split(", ")]
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        places = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        found.append(places * BYTES[dtype])
    return found


@pytest.mark.parametrize("name", CASES)
def test_kernels_get_slices_that_they_take(name, compiled):
    case = CASES[name]
    assert case.model is not None
    one = compiled(case._replace(model=replace(case.model, num_layers=2)))
    fusions = fusions_of_kernels(one.text)
    places = [place for each in fusions for place in begins(each)]
    assert len(places) >= len(fusions) > 0
    assert [place for place in places if place % ARGUMENT_ALIGNMENT] == []
    assert [each for each in fusions if ALIAS in each] == []
    assert any(ALIAS in line and "rope_write" in line for line in one.text.splitlines())
