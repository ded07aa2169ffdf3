"""Steps of Gemma 4, compiled for 8 H200s: kernels for heads of 256, loops for those of 512."""

from dataclasses import replace

import aot
import pytest
from hlo import collectives
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

DENSE = PRESETS["gemma-4-31b"]
MODELS = {  # two layers, of which the second sees everything
    "31b": replace(DENSE, num_layers=2, layer_kinds=DENSE.layer_kinds[-2:]),
    "e4b": replace(
        PRESETS["gemma-4-e4b"],
        num_layers=4,
        num_shared_kv_layers=2,
        layer_kinds=PRESETS["gemma-4-e4b"].layer_kinds[-2:],
    ),
}


@pytest.mark.parametrize(
    ("name", "sp", "tp", "mode"),
    [("31b", 8, 1, Mode(8, 8)), ("e4b", 4, 2, Mode(4, 1)), *exhaustive(("31b", 1, 8, Mode(1, 1)))],
)
def test_heads_of_256_run_as_kernels_and_those_of_512_as_loops(name, sp, tp, mode):
    case = Case(sp, tp, mode, model=MODELS[name], attention="pallas+xla", num_tokens=1280)
    one = compile_step(case, chip_devices())
    assert "head_dim 512" in one.step.attention.reason
    assert one.text.count(KERNEL) >= 2  # of the layers with a window alone
    assert collectives(one.text) == predicted_collectives(one)
