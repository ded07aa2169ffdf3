"""The check of kernels that a GPU runs before it serves compiles for that GPU."""

from dataclasses import replace

import aot
import jax
import pytest

from shiftjax.device.attention_cases import on_each
from shiftjax.device.attention_steps import Cases, Shape, make_inputs, steps_of
from shiftjax.device.mesh import rows_mesh
from shiftjax.device.position_cases import tuned_in_turn
from shiftjax.models.attention_backend import loops_of, tuned_attention

aot.require()
pytestmark = pytest.mark.thorough

# One of 8 devices of gpt-oss-120b: a KV head, layers with and without a window, sinks.
SHAPE = Shape(8, 1, 64, 16, (128, None), "bfloat16", "bfloat16", (256, 64, 64), has_sinks=True)


# Of two neighbours who split positions.
SPLIT = replace(SHAPE, heads=16, block_size=32, ways=2)


@pytest.mark.parametrize("name", ["kernels", "loops", "places"])
def test_chunks_beside_decodes_are_one_program_of_two_gpus(name):
    devices = list(aot.make_mesh("h100", (2,), ("x",)).devices.flat)
    shape = SPLIT if name == "places" else SHAPE
    kernels, _ = tuned_attention(SHAPE.layout, devices[0], SHAPE.block_size, SHAPE.deterministic)
    loops = loops_of(SHAPE.layout.model, SHAPE.block_size)
    in_turn = tuned_in_turn(SPLIT, devices[0])
    backend = {"kernels": kernels, "loops": loops, "places": in_turn}[name]
    *_, step = steps_of(shape, Cases())
    inputs = make_inputs(shape, step)
    arrays = inputs.q, inputs.pool, inputs.metadata(step, backend), inputs.terms
    mesh = rows_mesh(devices)
    program = aot.compile_for(mesh, on_each(backend.attend, devices), *aot.on_device(mesh, arrays))
    text = program.executable.as_text()
    assert ("mosaic_gpu" in text) == (name != "loops")
    (sharding,) = jax.tree.leaves(program.executable.output_shardings)
    assert sharding.shard_shape((2, 2, *inputs.q.shape)) == (1, 2, *inputs.q.shape)
