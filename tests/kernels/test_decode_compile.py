"""What the compiler makes of decode attention and the KV write for an H100, where it is installed.

Two thread blocks share a multiprocessor, which the design counts on: registers and shared memory
must leave room for both. Nothing the size of the pool may be made; what is written is in place.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile import aot
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.call import AttentionOptions, CodeKind, PagedKV
from pallas_kernels.decode import decode_attention, decode_parts
from pallas_kernels.decode_work import (
    FEW_HEADS,
    DecodeConfig,
    divide_decode,
    groups_of,
    most_jobs,
)
from pallas_kernels.head_codes import like_heads
from pallas_kernels.kv_write import write_kv
from pallas_kernels.latent_decode import REGISTERS
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.rows import Rows
from pallas_kernels.step_work import KernelConfig, StepWork
from pallas_kernels.tuned import safe_config
from pallas_kernels.window import Chunk

aot.require()
pytestmark = pytest.mark.thorough

SM_REGISTERS = 65536
SM_SHARED_MEMORY = 228 * 1024
RESERVED = 1024  # bytes of shared memory that the system takes for each thread block
FP8 = jnp.float8_e4m3fn
NUM_BLOCKS = 4096
SEQS, CONTEXT = 64, 2048
ROWS = Rows(np.arange(SEQS, dtype=np.int32), np.full(SEQS, CONTEXT, np.int32))


class Case(NamedTuple):
    """A deployment: a device of an 8-GPU group has one KV head, a single GPU all of them."""

    head_dim: int = 128
    block_size: int = 16
    q_per_kv: int = 8
    kv_heads: int = 8
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = jnp.bfloat16
    options: AttentionOptions = AttentionOptions(0.1)
    has_sinks: bool = False
    config: DecodeConfig = DecodeConfig()
    blocks_per_sm: int = 2


CASES = {
    "bf16": Case(),
    "bf16, one KV head": Case(kv_heads=1),
    "sinks, head_dim 64, one KV head": Case(64, kv_heads=1, has_sinks=True),
    "f16, head_dim 64, blocks of 128": Case(64, 128, 4, dtype=jnp.float16, kv_dtype=jnp.float16),
    "q_per_kv 5, chunks": Case(q_per_kv=5, options=AttentionOptions(0.1, Chunk(8192))),
    "fp8, window, cap": Case(
        kv_dtype=FP8, options=AttentionOptions(0.1, 1024, soft_cap=50.0, kv_scales=(0.1, 1.0))
    ),
    "fp8, head_dim 64, blocks of 64": Case(64, 64, 1, kv_dtype=FP8),
    "head_dim 96, q_per_kv 1, 32 KV heads": Case(96, q_per_kv=1, kv_heads=32),
    "head_dim 96, fp8, window": Case(
        96, q_per_kv=1, kv_dtype=FP8, options=AttentionOptions(0.1, 1024)
    ),
    "q_per_kv 16, one KV head, blocks of 256": Case(block_size=256, q_per_kv=16, kv_heads=1),
    "q_per_kv 32, one KV head, blocks of 8": Case(
        block_size=8,
        q_per_kv=32,
        kv_heads=1,
        config=safe_config(128, 32).decode,
        blocks_per_sm=1,
    ),
    "one block a multiprocessor, tiles of 128": Case(
        config=DecodeConfig(128, 132, 227 * 1024), blocks_per_sm=1
    ),
    # What attends must differ from that of all other cases: it is said of once.
    "codes, q_per_kv 9": Case(q_per_kv=9, options=AttentionOptions(0.1, codes=CodeKind())),
    "codes, fp8, one KV head": Case(
        kv_heads=1, kv_dtype=FP8, options=AttentionOptions(0.1, codes=CodeKind())
    ),
    "codes, q_per_kv 32, one KV head": Case(
        q_per_kv=32,
        kv_heads=1,
        block_size=32,
        options=AttentionOptions(0.1, codes=CodeKind()),
        config=safe_config(128, 32).decode,
        blocks_per_sm=1,
    ),
}


@pytest.fixture(scope="module")
def mesh():
    return aot.make_mesh("h100", (1,), ("x",))


def struct(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def made(text: str) -> list[str]:
    """The operations of a compiled program, but for what costs nothing."""
    entry = text[text.index("\nENTRY") :]
    operations = re.findall(r"^ +(?:ROOT )?%\S+ = .*? ([a-z][\w\-]*)\(", entry, re.MULTILINE)
    free = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}
    return [operation for operation in operations if operation not in free]


@pytest.mark.parametrize("name", CASES)
def test_decode_fits_the_chip(name, mesh, capsys):
    case = CASES[name]
    work = divide_decode(ROWS, SEQS, kv_heads=case.kv_heads, config=case.config)
    pool = struct((NUM_BLOCKS, case.kv_heads, case.block_size, case.head_dim), case.kv_dtype)
    q = struct((SEQS, case.kv_heads * case.q_per_kv, case.head_dim), case.dtype)
    tables = struct((SEQS, CONTEXT // case.block_size))

    def attend(q, kv, work, out, sinks):
        return decode_attention(
            q, kv, work, case.options._replace(sinks=sinks), case.config, out=out
        )

    sinks = struct(q.shape[1:2], case.dtype) if case.has_sinks else None
    kv = PagedKV(pool, pool, tables, struct((SEQS,)))
    out = like_heads(q, case.options.codes)
    arguments = aot.on_device(mesh, (q, kv, work, out, sinks))
    with capsys.disabled():  # Mosaic prints what it takes
        program = aot.compile_for(mesh, attend, *arguments, donate_argnums=(3,))
    # What combines is the same for several cases, and may have been compiled before.
    [attention] = [kernel for kernel in program.kernels if "attention" in kernel.name]
    tile = case.config.kv_tile
    # Products with K, 16 of head_dim at a time; with V, 64 of head_dim and 16 tokens at a time.
    products = (tile // 64) * (case.head_dim // 16) + -(-case.head_dim // 64) * (tile // 16)
    assert attention.count(r"wgmma\.mma_async") == products
    assert attention.count(r"fence\.proxy\.async") > 0  # what the interpreter does not miss
    assert case.blocks_per_sm * 256 * attention.registers <= SM_REGISTERS
    shared = program.shared_memory_bytes[0]
    assert shared <= case.config.shared_memory_bytes
    assert case.blocks_per_sm * (shared + RESERVED) <= SM_SHARED_MEMORY
    stage = 2 * tile * case.head_dim * jnp.dtype(case.kv_dtype).itemsize
    assert shared + stage > min(
        case.config.shared_memory_bytes, 16 * stage
    )  # a ring as deep as fits
    operations = made(program.executable.as_text())
    assert operations.count("custom-call") == 2
    assert set(operations) <= {"custom-call", "fusion"} and operations.count("fusion") <= 1
    memory = program.executable.memory_analysis()
    kept = sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(out))
    assert memory.alias_size_in_bytes == kept
    assert memory.temp_size_in_bytes < pool.size


@pytest.mark.parametrize("chip", ["h100", "h200"])
@pytest.mark.parametrize(
    ("head_dim", "q_per_kv", "block_size", "kv_dtype", "window"),
    [(128, 16, 16, jnp.bfloat16, None), (96, 8, 8, jnp.bfloat16, 1024), (64, 16, 16, FP8, 128)],
)
def test_parts_are_two_launches(chip, head_dim, q_per_kv, block_size, kv_dtype, window, capsys):
    """And what is made of them for the exchange: they leave as they come, and are turned there."""
    mesh = aot.make_mesh(chip, (1,), ("x",))
    low = None if window is None else np.zeros(SEQS, np.int32)
    work = divide_decode(ROWS._replace(low=low), SEQS, kv_heads=1)
    pool = struct((NUM_BLOCKS, 1, block_size, head_dim), kv_dtype)
    q = struct((SEQS, q_per_kv, head_dim), jnp.bfloat16)
    kv = PagedKV(pool, pool, struct((SEQS, CONTEXT // block_size)), None)

    def attend(q, kv, work):
        return decode_parts(q, kv, work, AttentionOptions(0.1, window))

    with capsys.disabled():
        program = aot.compile_for(mesh, attend, *aot.on_device(mesh, (q, kv, work)))
    operations = made(program.executable.as_text())
    assert operations.count("custom-call") == 2
    assert set(operations) <= {"custom-call", "fusion"} and operations.count("fusion") <= 3
    for kernel in program.kernels:
        assert 2 * 256 * kernel.registers <= SM_REGISTERS or "combine" in kernel.name
    assert 2 * (program.shared_memory_bytes[0] + RESERVED) <= SM_SHARED_MEMORY


@pytest.mark.parametrize(
    ("heads", "block_size", "chip", "kv_dtype", "options"),
    [
        (8, 16, "h100", jnp.bfloat16, {}),
        (16, 8, "h200", jnp.bfloat16, {}),
        (32, 8, "h200", jnp.bfloat16, {"soft_cap": 30.0}),
        (64, 128, "h200", jnp.bfloat16, {"window": 4096}),
        (128, 16, "h100", jnp.bfloat16, {}),
        (8, 8, "h200", FP8, {"soft_cap": 30.0, "window": 4096}),
        (128, 16, "h100", FP8, {}),
    ],
)
def test_latents_of_deepseek_fit_the_chip(heads, block_size, chip, kv_dtype, options, capsys):
    """One thread block on a multiprocessor, of up to 16 heads or 64; one ring, of two tiles.

    More than 16, or any of codes, are the long side of the instructions: two products, and not one
    each for 64 of the values. Registers move from the copies to the two warpgroups that compute.
    """
    mesh, config = aot.make_mesh(chip, (1,), ("x",)), safe_config(576, heads).decode
    rows = ROWS._replace(low=np.zeros(SEQS, np.int32)) if "window" in options else ROWS
    work = divide_decode(rows, SEQS, kv_heads=groups_of(heads), config=config)
    kv = PagedKV(
        struct((NUM_BLOCKS, 1, block_size, 576), kv_dtype),
        None,
        struct((SEQS, CONTEXT // block_size)),
        None,
    )
    q = struct((SEQS, heads, 576), jnp.bfloat16)
    all_options = AttentionOptions(0.1, values_in_keys=512)._replace(**options)

    def attend(q, kv, work):
        return decode_parts(q, kv, work, all_options, config)

    with capsys.disabled():
        program = aot.compile_for(mesh, attend, *aot.on_device(mesh, (q, kv, work)))
    [attention] = [kernel for kernel in program.kernels if "attention" in kernel.name]
    is_long, tile = heads > FEW_HEADS or kv_dtype == FP8, config.kv_tile
    of_values = 2 * tile // 16 if is_long else 512 // 64 * tile // 16
    assert attention.count(r"wgmma\.mma_async") == 576 // 16 + of_values
    threads = 384 if is_long else 256
    assert threads * attention.registers <= SM_REGISTERS
    assert 128 * (2 * REGISTERS[0] + REGISTERS[1]) <= threads * attention.registers or not is_long
    ring = 2 * tile * 576 * 2  # of codes: a tile of numbers, and two narrower ones
    assert ring < program.shared_memory_bytes[0] <= config.shared_memory_bytes < 2 * ring
    operations = made(program.executable.as_text())
    assert operations.count("custom-call") == 2
    assert is_long or operations.count("fusion") >= 1
    assert operations.count("fusion") <= 3


@pytest.mark.parametrize("codes", [None, CodeKind()])
@pytest.mark.parametrize("fixed_rounds", [None, 4])
def test_rows_alone_are_two_launches(fixed_rounds, codes, mesh):
    """No tiles of chunks, and no zeros that are written before: the combine writes every row."""
    config = DecodeConfig(fixed_rounds=fixed_rounds)
    work = StepWork(None, divide_decode(ROWS, SEQS, kv_heads=1, config=config))
    pool = struct((NUM_BLOCKS, 1, 16, 128), jnp.bfloat16)
    q = struct((SEQS, 8, 128), jnp.bfloat16)
    kv = PagedKV(pool, pool, struct((SEQS, CONTEXT // 16)), struct((SEQS,)))

    def attend(q, kv, work):
        settings = KernelConfig(decode=config)
        options = AttentionOptions(0.1, codes=codes)
        return ragged_paged_attention(q, kv, work, options, settings)

    program = aot.compile_for(mesh, attend, *aot.on_device(mesh, (q, kv, work)))
    assert made(program.executable.as_text()) == ["custom-call"] * 2
    jobs = SEQS + 264 if fixed_rounds is None else SEQS * most_jobs(config, 1)
    results = jobs * (128 + 1) * 8 * 4  # float32 outputs and lse of 8 query heads
    assert results <= program.executable.memory_analysis().temp_size_in_bytes < results + 4096


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, FP8])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_the_kv_write_is_one_launch_in_place(kv_dtype, kv_heads, mesh):
    tokens, head_dim = 64, 128
    pool = struct((NUM_BLOCKS, kv_heads, 16, head_dim), kv_dtype)
    rows = struct((tokens, kv_heads, head_dim), jnp.bfloat16)
    table = struct((tokens, head_dim // 2), jnp.float32)
    scale = 0.5 if kv_dtype == FP8 else 1.0

    def write(pool, k, v, slots, *rope):
        return write_kv(pool, k, v, slots, rope=rope, scales=(scale, scale))

    shapes = (pool, pool), rows, rows, struct((tokens,)), table, table
    program = aot.compile_for(mesh, write, *aot.on_device(mesh, shapes), donate_argnums=0)
    assert len(program.kernels) == 1
    assert made(program.executable.as_text()) == ["custom-call"]
    memory = program.executable.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * pool.size * pool.dtype.itemsize
    assert memory.temp_size_in_bytes == 0


def test_a_sharded_layer_makes_no_copy():
    """Write, then attend, on a quarter of the heads each, as the engine's steps do."""
    mesh, heads = aot.make_mesh("h200", (4,), ("tp",)), PartitionSpec(None, "tp")
    kv_heads, head_dim, block_size = 8, 128, 16
    work = divide_decode(ROWS, SEQS, kv_heads=kv_heads // 4)

    def layer(q, k, v, k_pool, v_pool, out, slots, tables, seq_lens, rope, work):
        pool = write_kv((k_pool, v_pool), k, v, slots, rope=rope)
        kv = PagedKV(*pool, tables, seq_lens)
        return decode_attention(q, kv, work, AttentionOptions(0.1), out=out), *pool

    q = struct((SEQS, 8 * kv_heads, head_dim), jnp.bfloat16)
    row = struct((SEQS, kv_heads, head_dim), jnp.bfloat16)
    pool = struct((NUM_BLOCKS, kv_heads, block_size, head_dim), jnp.bfloat16)
    table = struct((SEQS, head_dim // 2), jnp.float32)
    tables = struct((SEQS, CONTEXT // block_size))
    split = aot.on_device(mesh, (q, row, row, pool, pool, q))
    split = [x.update(sharding=NamedSharding(mesh, heads)) for x in split]
    whole = struct((SEQS,)), tables, struct((SEQS,)), (table, table), work
    specs = *[heads] * len(split), *[PartitionSpec()] * len(whole)
    step = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=(heads,) * 3, check_vma=False)
    program = aot.compile_for(
        mesh, step, *split, *aot.on_device(mesh, whole), donate_argnums=(3, 4, 5)
    )
    assert made(program.executable.as_text()) == ["custom-call"] * 3
    written = 2 * pool.size + q.size  # elements of 2 bytes, of 4 devices
    assert program.executable.memory_analysis().alias_size_in_bytes == 2 * written // 4
