"""Steps of gpt-oss with experts of four bits, compiled for H200s: they are read as they are."""

import math
import re
from dataclasses import replace

import aot
import jax
import jax.numpy as jnp
import pytest
from hlo import collectives, instructions, sizes_of

from shiftjax.arch.presets import PRESETS
from shiftjax.models.four_bits import GPU_TILE_NUMBERS, packed_product
from shiftjax.parallel.grid import Mode

aot.require()
pytestmark = pytest.mark.thorough

from steps import (  # noqa: E402
    CHIP,
    KERNEL,
    NUM_DEVICES,
    Case,
    CompiledStep,
    compile_step,
    predicted_collectives,
)

NUM_LAYERS = 2
MODEL = replace(PRESETS["gpt-oss-120b"], num_layers=NUM_LAYERS)
UNTOUCHED = ("parameter", "bitcast", "get-tuple-element", "tuple", "slice")  # of all layers
CASES = {
    "base of SP 8, a chunk": Case(8, 1, Mode(8, 8), "mxfp4", model=MODEL, num_tokens=1280),
    "shift of SP 8, decodes": Case(8, 1, Mode(8, 1), "mxfp4", model=MODEL),
    "TP 8, decodes": Case(1, 8, Mode(1, 1), "mxfp4", model=MODEL),
}


@pytest.fixture(scope="module", params=CASES)
def one(request) -> CompiledStep:
    mesh = aot.make_mesh(CHIP, (NUM_DEVICES,), ("x",))
    return compile_step(CASES[request.param], list(mesh.devices.flat))


def test_products_are_kernels_and_weights_stay_four_bits(one):
    """No array has as many numbers as an expert's matrix, but what the kernels are given."""
    assert one.step.experts.name == "pallas"
    assert one.text.count(KERNEL) >= NUM_LAYERS * (3 + 2)  # rows collected, gated, product
    pairs = zip(one.step.model.declared, one.shards, strict=True)
    of_experts = {w.kind: x for w, x in pairs if w.axes[0] == "experts" and len(w.shape) == 3}
    codes, scales = of_experts["codes"], of_experts["scales"]
    assert (codes.dtype, scales.dtype) == ("uint8", "uint8")
    stacks = [math.prod(x.sharding.shard_shape(x.shape)) for x in (codes, scales)]
    widened = 2 * stacks[0], 2 * math.prod(codes.shape[1:])  # of all experts, and of one
    made = [i for i in instructions(one.text) if i.opcode not in UNTOUCHED]
    assert [i for i in made if math.prod(sizes_of(i.shape)) in (*stacks, *widened)] == []
    assert one.temporary_bytes < 2 * stacks[0]  # widened codes of one matrix would be 4 times that


@pytest.mark.parametrize("tokens", [64, 4096])
def test_dense_matrices_are_widened_in_few_tiles(tokens):
    """Each is some launches; a tile is no more than what the chip caches."""
    outputs, inputs = 7168, 8192  # gate and up of Llama-70B on one of 8 devices
    mesh = aot.make_mesh(CHIP, (1,), ("x",))
    arrays = (
        jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((outputs, inputs // 2), jnp.uint8),
        jax.ShapeDtypeStruct((outputs, inputs // 128), jnp.float32),
    )
    program = aot.compile_for(mesh, packed_product, *aot.on_device(mesh, arrays)).executable
    tiles = -(-outputs * inputs // GPU_TILE_NUMBERS)
    assert re.findall(r'known_trip_count":{"n":"(\d+)"', program.as_text()) == [str(tiles)]
    of_tokens = 2 * tokens * (2 * inputs + 2 * outputs)
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary <= 2 * GPU_TILE_NUMBERS + 3 * of_tokens


def test_collectives_are_those_of_bfloat16(one):
    assert collectives(one.text) == predicted_collectives(one)
