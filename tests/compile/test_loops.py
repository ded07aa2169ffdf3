"""The XLA loops of attention for GPUs without kernels: what a round launches, and what it keeps."""

import re

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest

aot.require()
pytestmark = pytest.mark.thorough

from pallas_kernels.rows import Sequences  # noqa: E402
from shiftjax.models.attention import (  # noqa: E402
    LoopOptions,
    divide_attention,
    ragged_paged_attention,
)
from shiftjax.models.attention_work import GPU_SIZES  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16  # Llama-8B's, on one GPU
FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")
LINE = re.compile(r"^\s*(?:ROOT )?%\S+ = .*? ([a-z][a-z-]*)\(", re.MULTILINE)
WHILE = re.compile(r" while\(.*?body=%([\w.-]+)")


def compiled_loops(chip: str, rows: int) -> tuple[str, int]:
    """Compile a decode step of one layer; return its program and the bytes of its temporaries."""
    mesh = aot.make_mesh(chip, (1,), ("x",))
    tables = np.zeros((rows, 512), np.int32)
    lens, starts = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
    sizes = {"num_tokens": rows, "block_size": BLOCK_SIZE, "sizes": GPU_SIZES}
    work = divide_attention(tables, Sequences(lens, starts, 0), **sizes)
    q = jax.ShapeDtypeStruct((rows, HEADS, HEAD_DIM), jnp.bfloat16)
    pool = (jax.ShapeDtypeStruct((16_385, KV_HEADS, BLOCK_SIZE, HEAD_DIM), jnp.bfloat16),) * 2

    def attend(*arguments):
        return ragged_paged_attention(*arguments, LoopOptions(HEAD_DIM**-0.5, sizes=GPU_SIZES))

    with jax.set_mesh(mesh):
        arguments = aot.on_device(mesh, (q, pool, tables, work))
        compiled = jax.jit(attend).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return compiled.as_text() or "", memory.temp_size_in_bytes


@pytest.mark.parametrize("chip", ["a100", "a10", "l4"])
def test_a_round_is_a_few_launches_and_gathers_once(chip):
    text, temporary_bytes = compiled_loops(chip, 64)
    bodies = {}
    for name in WHILE.findall(text):
        body = text[text.index(f"\n%{name} (") :].partition("\n}")[0]
        bodies[name] = [one for one in LINE.findall(body) if one not in FREE]
    inner = [some for some in bodies.values() if "while" not in some]
    assert (len(bodies), len(inner)) == (3, 2)  # rounds of rows; tiles, and rounds of a tile
    assert all(len(launches) <= 12 for launches in inner)
    lanes, _, chunk = GPU_SIZES.row_loop(64)
    gathered = 2 * lanes * chunk * KV_HEADS * HEAD_DIM * 2  # keys and values, once
    assert gathered < temporary_bytes < 1.15 * gathered
