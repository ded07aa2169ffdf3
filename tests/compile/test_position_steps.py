"""Steps of devices that split positions, compiled for 8 H200s: two of them have each KV head."""

from dataclasses import replace

import aot
import pytest
from hlo import collectives, counted, instructions
from spent import exhaustive

from shiftjax.arch.presets import PRESETS
from shiftjax.costs.collectives import context_gathers
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import GATHERED_TOKENS

aot.require()
pytestmark = pytest.mark.thorough

from steps import (  # noqa: E402
    KERNEL,
    Case,
    chip_devices,
    compile_step,
    predicted_collectives,
)

NUM_LAYERS, WAYS = 2, 2


class SplitCase(Case):
    """A case whose devices split positions, in blocks as large on each."""

    @property
    def layout(self) -> Layout:
        return replace(super().layout, by_position=True)

    @property
    def pool(self):
        whole = super().pool
        blocks = whole.blocks_per_seq // WAYS
        return replace(whole, block_size=whole.block_size * WAYS, blocks_per_seq=blocks)


@pytest.fixture(scope="module")
def model():
    sizes = {"num_layers": NUM_LAYERS, "num_heads": 32, "num_kv_heads": 4}
    return replace(PRESETS["llama-70b"], **sizes)


@pytest.mark.parametrize(
    ("size", "normalisers"), [("fp8", True), ("fp8", False), *exhaustive(("bf16", True))]
)
def test_decodes_are_kernels_and_two_exchanges_in_a_layer_or_one(model, size, normalisers):
    case = SplitCase(8, 1, Mode(8, 1), size, model=model, normalisers=normalisers)
    one = compile_step(case, chip_devices())
    assert one.step.attention.name == "pallas" and one.step.layout.position_ways == WAYS
    assert one.text.count(KERNEL) >= 2 * NUM_LAYERS  # what attends, and what combines
    assert " while(" not in one.text  # and so the step is one graph
    assert collectives(one.text) == predicted_collectives(one)
    rows = {array.shape[0] for pool in one.pools for array in pool}
    shapes = tuple(f"{kind}[{num}," for kind in ("bf16", "f8e4m3fn") for num in rows)
    of_pools = [i.opcode for i in instructions(one.text) if i.shape.startswith(shapes)]
    assert "parameter" in of_pools and not {"copy", "copy-start"} & {*of_pools}


@pytest.mark.parametrize("size", ["bf16", *exhaustive("fp8")])
def test_prompts_are_kernels_over_what_is_gathered(model, size):
    case = SplitCase(8, 1, Mode(8, 8), size, model=model, num_tokens=512)
    one = compile_step(case, chip_devices())
    assert one.text.count(KERNEL) >= 4 * NUM_LAYERS  # that attend, and that combine
    assert one.text.count(" while(") == 2 * NUM_LAYERS  # rounds; exchanges
    gathers = context_gathers(one.step.layout, one.case.formats, GATHERED_TOKENS) * NUM_LAYERS
    assert collectives(one.text) == predicted_collectives(one) + counted(gathers)
