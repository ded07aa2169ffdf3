"""Ragged paged attention on a Hopper GPU: the one interface to the kernels.

A step holds decode rows (one token each) and then prefill chunks; `work_plan.plan_step` says how
they are cut up. Chunks go to `prefill` (bound by the matrix units), which also clears the padding;
then decode rows go to `decode` (split-K, bound by memory), which writes into the same output. Both
read the pools in place. They are two kernels because they need different shapes of thread block:
two warpgroups of 64 full rows with 192 KB of shared memory there, and as many bytes in flight as
possible for a few rows here.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode import decode_attention
from pallas_kernels.prefill import prefill_attention
from pallas_kernels.work_plan import DEFAULT_CONFIG, KernelConfig, WorkPlan


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    seq_lens: Int32[Array, " seqs"],
    plan: WorkPlan,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | jax.Array = 1.0,
    v_scale: float | jax.Array = 1.0,
    config: KernelConfig = DEFAULT_CONFIG,
    interpret: Any = False,
) -> Float[Array, "tokens heads head_dim"]:
    """softmax(soft_cap(scale * q k^T)) v of every token over its own sequence, causal.

    q is bfloat16 or float16; the pools are of q's type, or float8_e4m3fn. Values in a pool stand
    for `k_scale` (`v_scale`; a number, or one for each KV head) times themselves. `soft_cap` c
    makes a logit x c * tanh(x / c). A token sees `sliding_window` keys at most, itself included.
    Block tables are padded with the null block 0. Slots that hold no token of the context may hold
    anything, NaN included. Rows of padding tokens are zeros. `plan` must have been made with the
    same `config`. `interpret`: False, or `InterpretGPUParams` to run on a CPU. Raises ValueError
    for what the kernels cannot do.
    """
    context = k_pool, v_pool, block_tables, seq_lens
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "interpret": interpret,
    }
    out = prefill_attention(q, *context, plan.prefill, **options, config=config.prefill)
    return decode_attention(q, *context, plan.decode, **options, out=out, config=config.decode)
