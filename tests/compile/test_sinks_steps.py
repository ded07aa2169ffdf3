"""Steps of gpt-oss, compiled for 8 H200s: sinks go to the kernels as they are."""

from dataclasses import replace

import aot
import pytest
from hlo import collectives, instructions
from spent import exhaustive

from shiftjax.arch.presets import PRESETS
from shiftjax.parallel.grid import Mode

aot.require()
pytestmark = pytest.mark.thorough

from steps import (  # noqa: E402
    KERNEL,
    Case,
    chip_devices,
    compile_step,
    predicted_collectives,
)

NUM_LAYERS = 2  # one has a window


@pytest.mark.parametrize(
    "frees", [True, *exhaustive(False)]
)  # a pool for each layer, or one for both
def test_sinks_are_no_launch_and_no_pool_is_copied(frees):
    model = replace(PRESETS["gpt-oss-120b"], num_layers=NUM_LAYERS, frees_blocks=frees)
    case = Case(8, 1, Mode(8, 8), model=model, num_tokens=1280)
    one = compile_step(case, chip_devices())
    assert one.step.attention.name == "pallas"
    assert one.text.count(KERNEL) >= 4 * NUM_LAYERS  # chunks and rows, and what combines each
    heads = case.layout.heads_per_device
    shapes = {f"bf16[{size}]" for size in (f"{heads}", f"{heads},1", f"1,{heads}")}
    of_sinks = [i for i in instructions(one.text) if i.shape.partition("{")[0] in shapes]
    assert {i.opcode for i in of_sinks} == {"parameter", "bitcast"}
    assert collectives(one.text) == predicted_collectives(one)
    rows = {array.shape[0] for pool in one.pools for array in pool}
    shapes = tuple(f"bf16[{num}," for num in rows)
    assert sum(rows) == (1 if frees else NUM_LAYERS) * case.pool.num_blocks
    of_pools = [i.opcode for i in instructions(one.text) if i.shape.startswith(shapes)]
    assert "parameter" in of_pools and not {"copy", "copy-start"} & {*of_pools}
