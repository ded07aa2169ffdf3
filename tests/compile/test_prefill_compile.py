"""The prefill kernel, compiled for Hopper GPUs: what the compiler made of it.

Chosen near the limits: 128 query rows, head_dim 128 and rounds of 128 tokens take nearly all
registers and all shared memory.
"""

import re
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import entry, instructions

aot.require()
pytestmark = pytest.mark.thorough

from pallas_kernels.call import AttentionOptions, CodeKind, PagedKV  # noqa: E402
from pallas_kernels.prefill import prefill_attention, prefill_parts  # noqa: E402
from pallas_kernels.prefill_work import DEFAULT_CONFIG, PrefillConfig, divide_prefill  # noqa: E402
from pallas_kernels.rows import Sequences  # noqa: E402
from pallas_kernels.window import Chunk  # noqa: E402

FP8 = jnp.float8_e4m3fn
TOKENS, SEQS, BLOCKS, MAX_BLOCKS = 2048, 64, 4096, 256
WGMMA, TMA_LOAD = r"wgmma\.mma_async", r"cp\.async\.bulk\.tensor\.\dd\.shared"
TMA_STORE = r"cp\.async\.bulk\.tensor\.\dd\.global"
CASES = {
    "q_per_kv 8, blocks of 16": {},
    "a 70B of TP = 8, blocks of 256": {"kv_heads": 1, "block_size": 256},
    "q_per_kv 1, a bucket of less than a box": {"q_per_kv": 1, "tokens": 8},
    "q_per_kv 4, blocks of 32, window": {"q_per_kv": 4, "block_size": 32, "window": 1024},
    "q_per_kv 5, chunks": {"q_per_kv": 5, "window": Chunk(8192)},
    "fp8, q_per_kv 5, chunks of no power of two": {
        "kv_dtype": FP8,
        "kv_tile": 64,
        "q_per_kv": 5,
        "window": Chunk(1000),
    },
    "q_per_kv 7, soft cap": {"q_per_kv": 7, "soft_cap": 50.0},
    "head_dim 64, q_per_kv 3, 4 stages": {
        "head_dim": 64,
        "q_per_kv": 3,
        "config": PrefillConfig(128, 4),
    },
    "head_dim 96": {"head_dim": 96, "q_per_kv": 1},
    "head_dim 192, window": {"head_dim": 192, "kv_tile": 64, "window": 1000},
    "float16, blocks of 128": {"dtype": jnp.float16, "block_size": 128},
    "q_per_kv 16, window, soft cap": {
        "kv_heads": 1,
        "q_per_kv": 16,
        "window": 1000,
        "soft_cap": 50.0,
    },
    "q_per_kv 32": {"kv_heads": 1, "q_per_kv": 32},
    "fp8": {"kv_dtype": FP8, "kv_tile": 64},
    "fp8, blocks of 128, window, soft cap": {
        "kv_dtype": FP8,
        "kv_tile": 64,
        "block_size": 128,
        "window": 1000,
        "soft_cap": 50.0,
    },
    "sinks": {"sinks": True},
    "sinks, head_dim 64, window": {"head_dim": 64, "window": 128, "sinks": True},
    "sinks, q_per_kv 1": {"q_per_kv": 1, "sinks": True},
    "codes": {"codes": CodeKind()},
    "codes, one KV head, blocks of 256": {"codes": CodeKind(), "kv_heads": 1, "block_size": 256},
    "codes, fp8, q_per_kv 5, sinks": {
        "codes": CodeKind(),
        "kv_dtype": FP8,
        "kv_tile": 64,
        "q_per_kv": 5,
        "sinks": True,
    },
    "codes, q_per_kv 16, window, soft cap": {
        "codes": CodeKind(),
        "kv_heads": 1,
        "q_per_kv": 16,
        "window": 1000,
        "soft_cap": 50.0,
    },
    "parts": {"gives": "parts"},
    "parts, q_per_kv 4, one KV head, an H200": {
        "gives": "parts",
        "kv_heads": 1,
        "q_per_kv": 4,
        "chip": "h200",
    },
    "parts, q_per_kv 16, window, soft cap": {
        "gives": "parts",
        "kv_heads": 1,
        "q_per_kv": 16,
        "window": 1000,
        "soft_cap": 50.0,
    },
    "parts, q_per_kv 32": {"gives": "parts", "kv_heads": 1, "q_per_kv": 32},
    "parts, head_dim 192": {"gives": "parts", "head_dim": 192, "kv_tile": 64, "kv_heads": 1},
    "parts, fp8, q_per_kv 5, chunks": {
        "gives": "parts",
        "kv_dtype": FP8,
        "kv_tile": 64,
        "q_per_kv": 5,
        "window": Chunk(1000),
    },
}


def compile_kernel(
    chip="h100",
    tokens=TOKENS,
    kv_heads=8,
    q_per_kv=8,
    head_dim=128,
    block_size=16,
    dtype=jnp.bfloat16,
    kv_dtype=jnp.bfloat16,
    config=DEFAULT_CONFIG,
    sinks=False,
    gives="attention",
    **options: Any,
):
    lens = np.array([tokens] + [0] * (SEQS - 1), np.int32)
    starts = np.array([0] + [tokens] * SEQS, np.int32)
    kv_dtype = dtype if kv_dtype == jnp.bfloat16 else kv_dtype
    q = jax.ShapeDtypeStruct((tokens, q_per_kv * kv_heads, head_dim), dtype)
    pool = jax.ShapeDtypeStruct((BLOCKS, kv_heads, block_size, head_dim), kv_dtype)
    kv = PagedKV(pool, pool, jax.ShapeDtypeStruct((SEQS, MAX_BLOCKS), jnp.int32), lens)
    sizes = {"num_tokens": tokens, "heads": (q_per_kv * kv_heads, kv_heads)}
    work = divide_prefill(Sequences(lens, starts, 0), **sizes, config=config)
    mesh = aot.make_mesh(chip, (1,), ("x",))

    of_heads = jax.ShapeDtypeStruct(q.shape[1:2], dtype) if sinks else None

    def attend(q, kv, work, sinks):
        own = AttentionOptions(head_dim**-0.5, **options, sinks=sinks)
        kernel = prefill_parts if gives == "parts" else prefill_attention
        return kernel(q, kv, work, own, config)

    return aot.compile_for(mesh, attend, *aot.on_device(mesh, (q, kv, work, of_heads)))


def attention_of(compiled):
    """The kernel that attends; what combines parts is shared, and may have been compiled before."""
    [kernel] = [kernel for kernel in compiled.kernels if "attention" in kernel.name]
    return kernel


@pytest.mark.parametrize("name", CASES)
def test_it_uses_the_chip(name):
    case = dict(CASES[name])
    kv_tile = case.pop("kv_tile", 128)
    compiled = compile_kernel(**case)
    kernel = attention_of(compiled)
    assert kernel.registers * 3 * 128 <= 65536
    assert max(compiled.shared_memory_bytes) <= aot.SHARED_MEMORY_LIMIT
    # One loop: masks are a branch in it.
    assert kernel.count(WGMMA) == (case.get("head_dim", 128) + kv_tile) // 16
    assert kernel.count(TMA_LOAD) and kernel.count(TMA_STORE)
    assert kernel.count(r"setmaxnreg\.inc") == kernel.count(r"setmaxnreg\.dec") == 1
    assert not kernel.count(r"\bmma\.sync|\bld\.local|\bst\.local|tanh\.approx")


def test_the_next_product_is_under_way_while_a_softmax_is_computed():
    kernel = attention_of(compile_kernel(kv_heads=1, config=PrefillConfig(overlap=True)))
    [softmax] = re.findall(r"wait_group\S* 1;(.*?)wgmma\.", kernel.ptx, re.DOTALL)
    assert softmax.count("ex2.approx") >= 64  # of a thread: a half of a row of 128


def test_nothing_is_copied():
    """Two launches: the pools, q and the output are used where they are; parts are all there is."""
    compiled = compile_kernel("h200")
    program = compiled.executable.as_text()
    big = [i for i in instructions(program) if str(TOKENS) in i.shape or str(BLOCKS) in i.shape]
    assert {i.opcode for i in big} <= {"parameter", "custom-call", "get-tuple-element", "tuple"}
    assert [i.opcode for i in entry(program)].count("custom-call") == 2
    parts = 3 * 132 * 128 * (128 + 1) * 4  # three for each thread block
    assert parts <= compiled.executable.memory_analysis().temp_size_in_bytes < 1.02 * parts


def test_one_machine_code_serves_all_buckets():
    kernels = [attention_of(compile_kernel(kv_heads=2, tokens=n)) for n in (TOKENS, 512)]
    large, small = (kernel.ptx.partition("ptxas info")[0] for kernel in kernels)
    assert large == small


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="head_dim 256 with kv_tile 64 and 2 stages takes"):
        compile_kernel(head_dim=256, config=PrefillConfig(64))
