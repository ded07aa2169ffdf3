"""The XLA loops of attention for GPUs without kernels: what a round launches, and what it keeps."""

import re

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives, counted
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

aot.require()
pytestmark = pytest.mark.thorough

from pallas_kernels.rows import Sequences  # noqa: E402
from shiftjax.arch.formats import FORMATS, Formats  # noqa: E402
from shiftjax.arch.presets import PRESETS  # noqa: E402
from shiftjax.costs.collectives import context_gathers, row_exchanges  # noqa: E402
from shiftjax.costs.memory import split_bytes  # noqa: E402
from shiftjax.models.attention import (  # noqa: E402
    AttentionMetadata,
    LayerTerms,
    LoopOptions,
    divide_attention,
    ragged_paged_attention,
)
from shiftjax.models.attention_backend import loops_of  # noqa: E402
from shiftjax.models.attention_work import GPU_SIZES  # noqa: E402
from shiftjax.models.neighbours import neighbours_of  # noqa: E402
from shiftjax.parallel.grid import ALL_AXES  # noqa: E402
from shiftjax.parallel.layout import Layout  # noqa: E402

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


@pytest.mark.parametrize("kv", ["bfloat16", "fp8"])
def test_neighbours_gather_latents_once_for_all_tiles(kv):
    """Of DeepSeek-V3, which 8 devices split; beside the buffer and the softmaxes are queries."""
    layout = Layout(PRESETS["deepseek-v3"], 8, 1, by_position=True)
    formats, rows, tokens = Formats("bfloat16", kv, "bfloat16"), 64, 4096
    loops = loops_of(layout.model, 64, "gpu", neighbours=neighbours_of(layout, 64))
    tables, lens, starts = np.zeros((rows, 512), np.int32), *map(np.zeros, (rows, rows + 1))
    lens, starts = lens.astype(np.int32), starts.astype(np.int32)
    work = loops.divide(tables, lens, starts, 0, num_tokens=tokens, num_rows=rows)
    slots = np.zeros(tokens, np.int32)
    metadata = AttentionMetadata(slots, tables, lens, starts, np.int32(0), work)
    mesh = aot.make_mesh("h200", (*(1,) * (len(ALL_AXES) - 1), 8), ALL_AXES)
    heads, pools, width = P(None, ALL_AXES), P(ALL_AXES), layout.model.head_dim

    def attend(q, pool, metadata):
        scales = None if kv == "bfloat16" else jnp.full((2, 1), 0.5)
        return loops.attend(q, (pool,), metadata, LayerTerms(kv_scales=scales))

    own = {"mesh": mesh, "in_specs": (heads, pools, P()), "out_specs": heads, "check_vma": False}
    arrays = (
        ((tokens, layout.model.num_heads, width), jnp.bfloat16, heads),
        ((8 * 4001, 1, 8, width), FORMATS[kv].dtype, pools),
    )
    q, pool = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arrays
    )
    with jax.set_mesh(mesh):
        metadata = aot.on_device(mesh, metadata)
        compiled = jax.jit(jax.shard_map(attend, **own)).lower(q, pool, metadata).compile()
    moves = context_gathers(layout, formats, 4096) + row_exchanges(layout, rows, 2)
    assert collectives(compiled.as_text() or "") == counted(moves)
    memory = compiled.memory_analysis()
    queries = tokens * layout.heads_per_device * width * 2
    assert memory is not None
    assert memory.temp_size_in_bytes < 1.02 * (split_bytes(layout, formats, tokens) + queries)
