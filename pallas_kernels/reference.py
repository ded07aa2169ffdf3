"""Ragged paged attention by its definition, in NumPy: what every implementation must agree with."""

from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int

Pool = Float[Any, "blocks kv_heads block_size head_dim"]


def ragged_paged_attention(
    q: Float[Any, "tokens heads head_dim"],
    k_pool: Pool,
    v_pool: Pool,
    block_tables: Int[Any, "seqs blocks_per_seq"],
    seq_lens: Int[Any, " seqs"],
    query_start_loc: Int[Any, " seqs_plus_1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
) -> Float64[np.ndarray, "tokens heads head_dim"]:
    """Causal attention of every token over its own sequence; padding rows are zeros.

    NumPy or JAX arrays. The last token of sequence `i` has position `seq_lens[i] - 1`. A token
    sees `sliding_window` keys at most, itself included. `soft_cap` c makes a logit x
    c * tanh(x / c). Keys (values) are `k_scale` (`v_scale`; a number, or one for each KV head)
    times what is in the pool. Reads the slots of real context tokens and no others.
    """
    q, k_pool, v_pool = (np.asarray(x).astype(np.float64) for x in (q, k_pool, v_pool))
    out = np.zeros_like(q)
    group = q.shape[1] // k_pool.shape[1]
    block_size = k_pool.shape[2]
    for i, length in enumerate(np.asarray(seq_lens)):
        begin, end = query_start_loc[i], query_start_loc[i + 1]
        block, offset = np.divmod(np.arange(length), block_size)
        slots = np.asarray(block_tables)[i, block], slice(None), offset
        pools = (k_pool, k_scale), (v_pool, v_scale)
        k, v = (np.repeat(x[slots] * np.asarray(s).reshape(-1, 1), group, axis=1) for x, s in pools)
        distance = np.arange(length - (end - begin), length)[:, None] - np.arange(length)
        seen = (distance >= 0) & (distance < (sliding_window or length + 1))
        scores = np.einsum("thd,chd->htc", q[begin:end], k) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e300))
        p /= np.maximum(p.sum(axis=-1, keepdims=True), 1e-300)
        out[begin:end] = np.einsum("htc,chd->thd", p, v)
    return out
