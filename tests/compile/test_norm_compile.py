"""The kernel of the residual stream, compiled for Hopper GPUs: what the compiler made of it."""

import aot
import jax
import jax.numpy as jnp
import pytest

aot.require()
pytestmark = pytest.mark.thorough

from pallas_kernels.norm_codes import NormKind, add_norm  # noqa: E402

WIDTHS = {
    "SmolLM2": 576,
    "gpt-oss": 2880,
    "Llama-8B": 4096,
    "Qwen3-32B": 5120,
    "Gemma 3 27B": 5376,
    "Llama-70B": 8192,
    "the widest": 16384,
}
# Registers of a thread. Up to 128 four rows are at work on a multiprocessor at once.
MOST_REGISTERS = {8192: 128, 16384: 208}  # a row is read whole before it is written


# Each kernel for one chip alone: of what a process compiles again nothing is said.
@pytest.mark.parametrize(("chip", "codes"), [("h100", False), ("h200", True)])
def test_a_row_stays_in_registers(chip, codes, capsys):
    """A spill is an error."""
    for name, width in WIDTHS.items():
        x = jax.ShapeDtypeStruct((8, width), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((width,), jnp.bfloat16)
        mesh = aot.make_mesh(chip, (1,), ("x",))

        def run(x, added, weight):
            return add_norm(x, added, weight, NormKind(1e-5, codes=codes))

        with capsys.disabled():  # Mosaic prints what it takes
            program = aot.compile_for(mesh, run, *aot.on_device(mesh, (x, x, weight)))
        (kernel,) = program.kernels
        most = next(most for widest, most in MOST_REGISTERS.items() if width <= widest)
        assert kernel.registers <= most, name
        # one launch: the new stream, then its norm, or codes and their scales
        assert program.executable.as_text().count('custom_call_target="mosaic_gpu') == 1
