"""Products with one matrix of four bits, compiled for Hopper GPUs: what the compiler made of it."""

import aot
import jax
import jax.numpy as jnp
import pytest

aot.require()
pytestmark = pytest.mark.thorough

from pallas_kernels.dense import DenseWeights, dense_config, dense_product  # noqa: E402

REGISTERS = 168  # of a thread at the launch: three warpgroups have all of a multiprocessor's
WGMMA = r"wgmma\.mma_async"
WIDENED = r"mul\S*\.bf16x2"
# Blocks, outputs and inputs of a block, on one device and on one of 8.
MATRICES = {
    "Llama-70B, q, TP 8": (1, 1024, 8192),
    "Llama-70B, k, TP 8": (1, 128, 8192),
    "Llama-70B, gate": (1, 28672, 8192),
    "Llama-70B, gate, TP 8": (1, 3584, 8192),
    "Llama-70B, o, all blocks": (8, 8192, 1024),
    "Llama-70B, down": (1, 8192, 28672),
    "Llama-70B, down, all blocks": (8, 8192, 3584),
    "Llama-70B, down, TP 8": (1, 8192, 3584),
    "Llama-8B, gate": (1, 14336, 4096),
    "Llama-8B, down, TP 8": (1, 4096, 1792),
    "Llama-8B, o, TP 8": (1, 4096, 512),
}


# Each kernel for one chip alone: of what a process compiles again nothing is said.
@pytest.mark.parametrize(("chip", "tokens"), [("h100", 8), ("h200", 32), ("h100", 2048)])
@pytest.mark.parametrize("has_zeros", [False, True], ids=["symmetric", "zeros"])
def test_the_product_fits_the_chip(chip, tokens, has_zeros, capsys):
    for name, (blocks, outputs, inputs) in MATRICES.items():
        of_groups = blocks, inputs // 128, outputs
        weights = DenseWeights(
            jax.ShapeDtypeStruct((blocks, outputs, inputs // 2), jnp.uint8),
            jax.ShapeDtypeStruct(of_groups, jnp.float32),
            jax.ShapeDtypeStruct(of_groups, jnp.uint8) if has_zeros else None,
        )
        x = jax.ShapeDtypeStruct((tokens, blocks * inputs), jnp.bfloat16)
        mesh = aot.make_mesh(chip, (1,), ("x",))
        with capsys.disabled():  # Mosaic prints what it takes
            program = aot.compile_for(mesh, dense_product, *aot.on_device(mesh, (x, weights)))
        (kernel,) = program.kernels
        assert kernel.registers <= REGISTERS, name
        assert kernel.count(WIDENED) == 2 * 128 // 4, name
        assert kernel.count(WGMMA) in (16, 32, 48), name  # a loop may be unrolled
        assert max(program.shared_memory_bytes) <= aot.SHARED_MEMORY_LIMIT
        config = dense_config(tokens, weights)
        rows = -(-tokens // config.rows) * config.rows
        sums = 4 * rows * -(-outputs // 256) * 256 * config.parts[1] * (config.parts[1] > 1)
        of_tokens = 2 * rows * (2 * blocks * inputs + 2 * outputs)
        assert program.executable.memory_analysis().temp_size_in_bytes <= sums + of_tokens + 4096
