"""Steps of Llama 4, compiled for 8 H200s: chunks and whole contexts by kernels, experts, too."""

from dataclasses import replace

import aot
import pytest
from hlo import collectives
from spent import exhaustive

from pallas_kernels.window import Chunk
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

SCOUT, MAVERICK = PRESETS["llama-4-scout"], PRESETS["llama-4-maverick"]
MODELS = {  # two layers, of which the second sees everything and has no positions
    "scout": replace(SCOUT, num_layers=2, layer_kinds=SCOUT.layer_kinds[-2:]),
    "maverick": replace(MAVERICK, num_layers=2, layer_kinds=MAVERICK.layer_kinds[-2:]),
}


@pytest.mark.parametrize(
    ("name", "size", "mesh", "experts_sp"),
    [
        ("scout", "bf16", (8, 1, Mode(8, 8)), 8),  # whole on a device: nothing is exchanged
        ("scout", "fp8", (4, 2, Mode(4, 1)), 1),
        *exhaustive(("maverick", "bf16", (8, 1, Mode(8, 1)), 1)),  # the first layer has an MLP
    ],
)
def test_both_kinds_of_layers_run_as_kernels(name, size, mesh, experts_sp):
    model = MODELS[name]
    assert model.windows == (Chunk(8192), None)
    sp, tp, mode = mesh
    case = Case(sp, tp, mode, size, model=model, num_tokens=1280, experts_sp=experts_sp)
    one = compile_step(case, chip_devices())
    assert one.step.attention.name == "pallas"
    of_experts = 3 * model.num_expert_layers
    assert one.text.count(KERNEL) >= 2 * 2 + of_experts  # of rows and tiles, or a combine each
    assert collectives(one.text) == predicted_collectives(one)
