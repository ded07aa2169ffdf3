"""Attention of decode rows, one query token each, over the paged pool: split-K, for Hopper.

Decoding reads every key and value once and computes little with each, so memory sets its speed.
`decode_work` gives every thread block an equal share of the tokens to read, `decode_kernel` streams
and attends to them, and `decode_combine` puts together the jobs that a long context was cut into
(Flash-Decoding, Dao et al., 2023).
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode_combine import Parts, RowParts, combine_jobs, combine_parts
from pallas_kernels.decode_kernel import REDUCTION_BYTES, run_jobs
from pallas_kernels.decode_terms import Q_SLOTS, Inputs, Shape
from pallas_kernels.decode_work import (
    DEFAULT_CONFIG,
    FEW_HEADS,
    MANY_HEADS,
    DecodeConfig,
    DecodeWork,
    groups_of,
)
from pallas_kernels.head_codes import Heads, no_heads, wrong_codes
from pallas_kernels.latent_decode import run_jobs as run_many
from pallas_kernels.latent_decode import wrong_sizes
from pallas_kernels.mosaic import COLUMNS, FP8, scales_in_memory
from pallas_kernels.queries import Queries, by_kv_head, operand_type

ROW_TILE = 8  # query heads are padded to a multiple of this, the least that the MMA takes
MAX_STAGES = 16
BARRIER_BYTES = 1024  # barriers and what aligning the buffers costs: less than this


def decode_attention(
    q: Float[Array, "tokens heads head_dim"] | Queries,
    kv: PagedKV,
    work: DecodeWork,
    options: AttentionOptions,
    config: DecodeConfig = DEFAULT_CONFIG,
    *,
    out: Heads | None = None,
) -> Heads:
    """Attention of the decode rows: row i is token i, of the sequence that `work` says.

    Other rows are those of `out`, which is overwritten in place where its buffer may be; zeros
    without it, which cost no launch where every token may be a row. Arguments as in
    `paged_attention.ragged_paged_attention`; `work` must have been divided with the same `config`
    and number of KV heads. Raises ValueError for shapes that the kernel cannot take, and for
    latents, which `decode_parts` takes.
    """
    if options.values_in_keys is not None:
        raise ValueError("decode_attention: latents have parts alone, of decode_parts")
    parts = _run(q, kv, work, options, config)
    if out is None and parts.row_first.shape[0] < q.shape[0]:
        out = no_heads(q, options.codes)
    return combine_jobs(parts, q, out, config, options)


def decode_parts(
    q: Float[Array, "rows heads head_dim"],
    kv: PagedKV,
    work: DecodeWork,
    options: AttentionOptions,
    config: DecodeConfig = DEFAULT_CONFIG,
) -> RowParts:
    """Attention of decode rows over a part of their contexts, to be put together with others.

    Arguments as of `decode_attention`, but for sinks and codes, which are for who has all parts.
    Of latents (`options.values_in_keys`) the work must have been divided for their `groups_of`.
    """
    count, width = q.shape[1], options.values_in_keys or q.shape[2]
    q_per_kv = count // _groups(kv, count, options)
    jobs = _run(q, kv, work, options, config)
    is_long = _is_long(q_per_kv, kv, options)
    found = combine_parts(jobs, config, options, heads_first=is_long)
    lse = found.lse[..., :q_per_kv].reshape(len(found.lse), -1)
    if is_long:
        return RowParts(found.values[:, :, :q_per_kv].reshape(len(lse), -1, width), lse)
    values = jnp.moveaxis(found.values[..., :q_per_kv], 2, 3)  # [rows, kv_heads, q_per_kv, columns]
    if rest := width % COLUMNS:  # the last of the products has columns of the one before
        whole = width - rest
        values = jnp.concatenate([values[..., :whole], values[..., -rest:]], axis=-1)
    return RowParts(values.reshape(len(values), -1, width), lse)


def _is_long(q_per_kv: int, kv: PagedKV, options: AttentionOptions) -> bool:
    """Whether heads are on the long side of the instructions (`latent_decode`).

    Of codes they always are: on the short side, what widens them has no registers left.
    """
    if options.values_in_keys is None:
        return False
    return q_per_kv > FEW_HEADS or kv.k_pool.dtype == FP8


def _groups(kv: PagedKV, heads: int, options: AttentionOptions) -> int:
    return kv.k_pool.shape[1] if options.values_in_keys is None else groups_of(heads)


def _run(
    q: jax.Array | Queries,
    kv: PagedKV,
    work: DecodeWork,
    options: AttentionOptions,
    config: DecodeConfig,
) -> Parts:
    """Return what the jobs of all rows give."""
    check_call(q, kv, options, config)
    (_, block_size, head_dim), heads = kv.k_pool.shape[1:], q.shape[1]
    kv_heads = _groups(kv, heads, options)
    q_per_kv = heads // kv_heads
    is_long = _is_long(q_per_kv, kv, options)
    rows = MANY_HEADS if is_long else -(-q_per_kv // ROW_TILE) * ROW_TILE
    copy_tokens, slots = min(block_size, config.kv_tile), 1 if is_long else Q_SLOTS
    rings = 2 - (kv.v_pool is None)
    shape = Shape(
        rows=rows,
        head_dim=head_dim,
        kv_tile=config.kv_tile,
        stages=count_stages(rows, head_dim, kv.k_pool.dtype, config, rings, slots),
        copy_tokens=copy_tokens,
        copies_per_block=block_size // copy_tokens,
        dtype=operand_type(q.dtype, kv.k_pool.dtype),
        options=options,
        q_slots=slots,
    )
    count = min(q.shape[0], work.row_seq.shape[0])
    grouped = by_kv_head(q, (count, kv_heads, rows), shape.dtype)
    jobs = work.worker_first, work.job_row, work.job_begin, work.job_end
    scales, pools = scales_in_memory(options.kv_scales), kv._replace(seq_lens=None)
    of_rows = work.row_seq, work.row_length, None if options.window is None else work.row_low
    inputs = Inputs(*jobs, *of_rows, pools, scales, grouped)
    outputs, lse = (run_many if is_long else run_jobs)(shape, inputs)
    sinks = options.sinks
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(kv_heads, q_per_kv), ((0, 0), (0, rows - q_per_kv)))
    return Parts(outputs, lse, work.row_first[:count], work.row_jobs[:count], sinks)


def check_call(
    q: jax.Array | Queries, kv: PagedKV, options: AttentionOptions, config: DecodeConfig
) -> None:
    """Say by a ValueError what the kernel cannot take."""
    (_, heads, head_dim), (_, kv_heads, block_size, _) = q.shape, kv.k_pool.shape
    wrong = options.wrong(heads, kv_heads)
    if q.dtype not in (jnp.bfloat16, jnp.float16) or kv.k_pool.dtype not in (q.dtype, FP8):
        wrong.append(
            f"q of {q.dtype} and pools of {kv.k_pool.dtype}: q must be bfloat16 or float16, the "
            f"pools of the same type or {jnp.dtype(FP8)}"
        )
    if head_dim % 32 or head_dim < 64:
        wrong.append(f"head_dim {head_dim} is not a multiple of 32 from 64 on")
    width = options.values_in_keys
    if width is not None and _is_long(heads // groups_of(heads), kv, options):
        wrong += wrong_sizes(head_dim, width)
    if options.codes is not None:
        wrong += wrong_codes(head_dim)
    if config.kv_tile % 64:
        wrong.append(f"kv_tile {config.kv_tile} is not a multiple of 64")
    sizes = sorted((block_size, config.kv_tile))
    if block_size % 8 or sizes[1] % sizes[0]:
        wrong.append(
            f"block_size {block_size} must be a multiple of 8, and divide kv_tile "
            f"{config.kv_tile} or be a multiple of it"
        )
    if wrong:
        raise ValueError("decode_attention: " + "; ".join(wrong))


def count_stages(
    rows: int,
    head_dim: int,
    kv_dtype: DTypeLike,
    config: DecodeConfig,
    rings: int = 2,
    q_slots: int = Q_SLOTS,
) -> int:
    """Return how many tiles the rings of K and V hold; ValueError where that is less than two."""
    tile, row_bytes = config.kv_tile, 2 * head_dim
    fixed = q_slots * rows * row_bytes + 2 * rows * tile + REDUCTION_BYTES + BARRIER_BYTES
    if jnp.dtype(kv_dtype) == FP8:
        fixed += rings * tile * row_bytes
    stage = rings * tile * head_dim * jnp.dtype(kv_dtype).itemsize
    stages = (config.shared_memory_bytes - fixed) // stage
    if stages < 2:
        raise ValueError(
            f"decode_attention: {config.shared_memory_bytes} bytes of shared memory hold "
            f"{max(stages, 0)} stages of {stage} bytes beside {fixed} others, and 2 are needed: "
            "take half as many num_blocks with twice the shared_memory_bytes"
        )
    return min(stages, MAX_STAGES)
