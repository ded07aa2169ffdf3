"""Steps with weights of four bits, compiled for H200s: they are read as they are."""

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
from shiftjax.parallel.stored import with_packed_codes

aot.require()
pytestmark = pytest.mark.thorough

from steps import (  # noqa: E402
    CHIP,
    KERNEL,
    Case,
    CompiledStep,
    chip_devices,
    compile_step,
    predicted_collectives,
)

NUM_LAYERS = 2
MODEL = replace(PRESETS["gpt-oss-120b"], num_layers=NUM_LAYERS)
UNTOUCHED = ("parameter", "bitcast", "get-tuple-element", "tuple", "slice")  # of all layers
CASES = {
    "base of SP 8, a chunk": Case(8, 1, Mode(8, 8), "mxfp4", model=MODEL, num_tokens=1280),
    "shift of SP 8, decodes": Case(8, 1, Mode(8, 1), "mxfp4", model=MODEL),
}
DENSE = with_packed_codes(replace(PRESETS["llama-70b"], num_layers=NUM_LAYERS), "int4")
DENSE_CASES = {
    "base of SP 8, a chunk": Case(8, 1, Mode(8, 8), "int4", model=DENSE, num_tokens=1280),
    "shift of SP 8, decodes": Case(8, 1, Mode(8, 1), "int4", model=DENSE),
}
MATRICES = 7  # of a layer


@pytest.fixture(scope="module", params=CASES)
def one(request) -> CompiledStep:
    return compile_step(CASES[request.param], chip_devices())


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


@pytest.mark.parametrize("name", DENSE_CASES)
def test_dense_matrices_are_read_as_they_are(name):
    """Each is a kernel; nothing has as many numbers as a matrix, and no layer adds temporaries."""
    case = DENSE_CASES[name]
    one, longer = (
        compile_step(case._replace(model=replace(DENSE, num_layers=layers)), chip_devices())
        for layers in (NUM_LAYERS, 2 * NUM_LAYERS)
    )
    assert one.step.products.packed[::3] == ("pallas", "")
    assert one.text.count("grouped_product") >= NUM_LAYERS * MATRICES
    pairs = zip(one.step.model.declared, one.shards, strict=True)
    shapes = [(w.name, math.prod(x.sharding.shard_shape(x.shape)), w.kind) for w, x in pairs]
    codes = {size for name, size, kind in shapes if kind == "codes" and "down" in name}
    (down,) = codes  # of one layer
    made = [i for i in instructions(one.text) if i.opcode not in UNTOUCHED]
    assert [i for i in made if math.prod(sizes_of(i.shape)) in (down, 2 * down)] == []
    assert abs(longer.temporary_bytes - one.temporary_bytes) < 8e6
    assert collectives(one.text) == predicted_collectives(one)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_dense_matrices_are_widened_in_few_tiles(tokens):
    """Without kernels each is some launches; a tile is no more than what the chip caches."""
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
