"""The prefill kernel, compiled for Hopper GPUs: what the compiler made of it.

Chosen near the limits: 128 query rows, head_dim 128 and rounds of 128 tokens take nearly all
registers and all shared memory.
"""

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import instructions

aot.require()

from pallas_kernels.call import AttentionOptions, PagedKV  # noqa: E402
from pallas_kernels.prefill import prefill_attention  # noqa: E402
from pallas_kernels.prefill_work import DEFAULT_CONFIG, PrefillConfig, divide_prefill  # noqa: E402

FP8 = jnp.float8_e4m3fn
TOKENS, SEQS, BLOCKS, MAX_BLOCKS, KV_HEADS = 2048, 64, 4096, 256, 8
WGMMA, TMA_LOAD = r"wgmma\.mma_async", r"cp\.async\.bulk\.tensor\.\dd\.shared"
TMA_STORE = r"cp\.async\.bulk\.tensor\.\dd\.global"
CASES = {
    "q_per_kv 8, blocks of 16": {},
    "q_per_kv 1": {"q_per_kv": 1},
    "q_per_kv 4, blocks of 32, window": {"q_per_kv": 4, "block_size": 32, "sliding_window": 1024},
    "q_per_kv 7, soft cap": {"q_per_kv": 7, "soft_cap": 50.0},
    "head_dim 64, q_per_kv 3, 4 stages": {
        "head_dim": 64,
        "q_per_kv": 3,
        "config": PrefillConfig(128, 4),
    },
    "float16, blocks of 128": {"dtype": jnp.float16, "block_size": 128},
    "q_per_kv 16, window, soft cap": {"q_per_kv": 16, "sliding_window": 1000, "soft_cap": 50.0},
    "q_per_kv 32": {"q_per_kv": 32},
    "fp8": {"kv_dtype": FP8},
    "fp8, blocks of 128, window, soft cap": {
        "kv_dtype": FP8,
        "block_size": 128,
        "sliding_window": 1000,
        "soft_cap": 50.0,
    },
}


def compile_kernel(
    chip="h100",
    q_per_kv=8,
    head_dim=128,
    block_size=16,
    dtype=jnp.bfloat16,
    kv_dtype=jnp.bfloat16,
    config=DEFAULT_CONFIG,
    **options,
):
    lens = np.array([TOKENS] + [0] * (SEQS - 1), np.int32)
    starts = np.array([0] + [TOKENS] * SEQS, np.int32)
    kv_dtype = dtype if kv_dtype == jnp.bfloat16 else kv_dtype
    q = jax.ShapeDtypeStruct((TOKENS, q_per_kv * KV_HEADS, head_dim), dtype)
    pool = jax.ShapeDtypeStruct((BLOCKS, KV_HEADS, block_size, head_dim), kv_dtype)
    kv = PagedKV(pool, pool, jax.ShapeDtypeStruct((SEQS, MAX_BLOCKS), jnp.int32), lens)
    work = divide_prefill(lens, starts, 0, num_tokens=TOKENS, q_per_kv=q_per_kv)
    mesh = aot.make_mesh(chip, (1,), ("x",))

    def attend(*arrays):
        return prefill_attention(*arrays, AttentionOptions(head_dim**-0.5, **options), config)

    return aot.compile_for(mesh, attend, *aot.on_device(mesh, (q, kv, work)))


@pytest.mark.parametrize("name", CASES)
def test_it_uses_the_chip(name):
    case = CASES[name]
    compiled = compile_kernel(**case)
    [kernel] = compiled.kernels
    assert kernel.registers * 3 * 128 <= 65536
    assert max(compiled.shared_memory_bytes) <= aot.SHARED_MEMORY_LIMIT
    head_dim, kv_tile = case.get("head_dim", 128), 64 if "kv_dtype" in case else 128
    assert kernel.count(WGMMA) == (head_dim + kv_tile) // 16  # one loop: masks are a branch in it
    assert kernel.count(TMA_LOAD) and kernel.count(TMA_STORE)
    assert kernel.count(r"setmaxnreg\.inc") == kernel.count(r"setmaxnreg\.dec") == 1
    assert not kernel.count(r"\bmma\.sync|\bld\.local|\bst\.local")


def test_nothing_is_copied():
    """One launch: the pools, q and the output are used where they are."""
    compiled = compile_kernel("h200")
    program = compiled.executable.as_text()
    big = [i for i in instructions(program) if str(TOKENS) in i.shape or str(BLOCKS) in i.shape]
    assert {i.opcode for i in big} == {"parameter", "custom-call"}
    assert compiled.executable.memory_analysis().temp_size_in_bytes < 1024


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="head_dim 256 with kv_tile 64 and 2 stages takes"):
        compile_kernel(head_dim=256)
