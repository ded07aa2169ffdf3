"""What the kernels compute by its definition, in NumPy: every implementation must agree with it."""

from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int
from ml_dtypes import float8_e4m3fn

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.grouped_work import ExpertWeights
from pallas_kernels.window import first_seen


def ragged_paged_attention(
    q: Float[Any, "tokens heads head_dim"],
    kv: PagedKV,
    query_start_loc: Int[Any, " seqs_plus_1"],
    options: AttentionOptions,
) -> Float64[np.ndarray, "tokens heads head_dim"]:
    """Causal attention of every token over its own sequence; padding rows are zeros.

    NumPy or JAX arrays. The last token of sequence `i` has position `seq_lens[i] - 1`. Reads the
    slots of real context tokens and no others.
    """
    window, cap, sinks = options.window, options.soft_cap, options.sinks
    q, *pool = (np.asarray(x).astype(np.float64) for x in (q, *kv[:2]))
    out = np.zeros_like(q)
    q_per_kv = q.shape[1] // pool[0].shape[1]
    block_size = pool[0].shape[2]
    for i, length in enumerate(np.asarray(kv.seq_lens)):
        begin, end = query_start_loc[i], query_start_loc[i + 1]
        block, offset = np.divmod(np.arange(length), block_size)
        slots = np.asarray(kv.block_tables)[i, block], slice(None), offset
        k, v = (
            np.repeat(x[slots] * np.asarray(scale).reshape(-1, 1), q_per_kv, axis=1)
            for x, scale in zip(pool, options.kv_scales, strict=True)
        )
        key, query = np.arange(length), np.arange(length - (end - begin), length)[:, None]
        seen = (key <= query) & (key >= first_seen(query, window))
        queries, keys = q[begin:end].transpose(1, 0, 2), k.transpose(1, 2, 0)  # by head
        scores = queries @ keys * options.scale
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        scores = np.where(seen, scores, -np.inf)
        if sinks is not None:  # keys that every token sees, whose values are zeros
            of_heads = np.asarray(sinks).astype(np.float64)[:, None, None]
            scores = np.concatenate([scores, np.broadcast_to(of_heads, (*scores.shape[:2], 1))], 2)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e300))
        p /= np.maximum(p.sum(axis=-1, keepdims=True), 1e-300)
        out[begin:end] = (p[..., :length] @ v.transpose(1, 0, 2)).transpose(1, 0, 2)
    return out


def experts(
    x: Float[Any, "tokens hidden"],
    weights: ExpertWeights,
    chosen: Int[Any, "tokens k"],
    gains: Float[Any, "tokens k"],
) -> Float64[np.ndarray, "tokens k hidden"]:
    """Return gain * down(silu(gate x) * up x) of every expert that is chosen; -1 gives zeros.

    Where weights are codes of eight bits, what they multiply is rounded to codes, blocks of inputs.
    """
    out, is_packed = np.zeros((*np.shape(chosen), x.shape[1])), weights.are_four_bits
    are_codes = weights.gate_scale is not None and not is_packed
    for expert in np.unique(np.asarray(chosen)[np.asarray(chosen) >= 0]):
        if is_packed:
            matrices = (four_bits(weights, name, expert) for name in ("gate", "up", "down"))
        else:
            matrices = (np.asarray(matrix[expert]).astype(np.float64) for matrix in weights[:3])
        gate, up, down = matrices
        rows = np.asarray(x)[(chosen == expert).any(axis=1)].astype(np.float64)
        if are_codes:
            scales = (np.asarray(scale)[expert, :, None] for scale in weights[3:6])
            gate, up, down = (m * s for m, s in zip((gate, up, down), scales, strict=True))
            rows = rounded_to_codes(rows)
        gated = rows @ gate.T
        inner = gated / (1 + np.exp(-gated)) * (rows @ up.T)
        if are_codes:
            inner = rounded_to_codes(inner)
        out[chosen == expert] = inner @ down.T
    return out * np.asarray(gains)[..., None]


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def four_bits(
    weights: ExpertWeights, name: str, expert: int
) -> Float64[np.ndarray, "outputs inputs"]:
    """Return what the codes of a matrix of an expert stand for."""
    codes, scale = (np.asarray(getattr(weights, each)[expert]) for each in (name, f"{name}_scale"))
    numbers = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1).astype(np.int64)
    group = numbers.shape[1] // scale.shape[0]
    units = np.repeat(scale.astype(np.float64), group, axis=0).T
    if scale.dtype == np.uint8:
        return np.concatenate([E2M1, -E2M1])[numbers] * 2.0 ** (units - 127)
    zeros = getattr(weights, f"{name}_zero")
    zero = 8 if zeros is None else np.repeat(np.asarray(zeros[expert]).astype(int), group, axis=0).T
    return (numbers - zero) * units


def rounded_to_codes(x: Float64[np.ndarray, "rows width"]) -> Float64[np.ndarray, "rows width"]:
    """Round to e4m3 codes in units of the largest of a row's 128 columns / 448."""
    firsts = range(0, x.shape[1], 128)
    scale = np.maximum(np.maximum.reduceat(abs(x), firsts, axis=1), 1e-20) / 448
    scale = scale.repeat(128, axis=1)[:, : x.shape[1]]
    return (x / scale).astype(float8_e4m3fn).astype(np.float64) * scale
