"""Ragged paged attention by its definition, in NumPy: what every implementation must agree with."""

import numpy as np


def ragged_paged_attention(
    q: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> np.ndarray:
    """Causal attention of every token over its own sequence, in float64; padding rows are zeros.

    `q` is `[tokens, heads, head_dim]`, a pool `[blocks, kv_heads, block_size, head_dim]`. The last
    token of sequence `i` has position `seq_lens[i] - 1`. A token sees `sliding_window` keys at
    most, itself included. Reads the slots of real context tokens and no others.
    """
    q, k_pool, v_pool = (np.asarray(x).astype(np.float64) for x in (q, k_pool, v_pool))
    out = np.zeros_like(q)
    group = q.shape[1] // k_pool.shape[1]
    block_size = k_pool.shape[2]
    for i, length in enumerate(np.asarray(seq_lens)):
        begin, end = query_start_loc[i], query_start_loc[i + 1]
        block, offset = np.divmod(np.arange(length), block_size)
        slots = np.asarray(block_tables)[i, block], slice(None), offset
        k, v = (np.repeat(pool[slots], group, axis=1) for pool in (k_pool, v_pool))
        distance = np.arange(length - (end - begin), length)[:, None] - np.arange(length)
        seen = (distance >= 0) & (distance < (sliding_window or length + 1))
        scores = np.einsum("thd,chd->htc", q[begin:end], k) * scale
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e300))
        p /= np.maximum(p.sum(axis=-1, keepdims=True), 1e-300)
        out[begin:end] = np.einsum("htc,chd->thd", p, v)
    return out
