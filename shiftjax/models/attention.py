"""Ragged paged attention and the KV write, in plain XLA.

A step holds decode rows (one token each) and then prefill chunks. The two are served differently:

    decode    lanes x rounds: every lane owns a job (part of one row's context), every round takes the
              next `chunk` tokens of all lanes at once; parts of a row are combined at the end
    prefill   tiles x chunks: `tile` query tokens of one sequence against `chunk` context tokens

Both are loops whose trip counts are data, so that the work follows the real lengths and not the
padded table. Who does what is planned once per step on the host (`plan_attention`) and shared by
all layers. The softmax is the online one (Milakov and Gimelshein, 2018), the split of long contexts
that of Flash-Decoding (Dao et al., 2023).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

MAX_LANES = 32  # decode jobs that advance together
CHUNK_TOKENS = 64  # context tokens of one decode round
TILE_TOKENS = 64  # query tokens of one prefill tile
TILE_CHUNK_TOKENS = 256  # context tokens of one prefill round
LOWEST = -1e30  # the running maximum before the first key: finite, so that exp(-inf - LOWEST) is 0


class AttentionPlan(NamedTuple):
    """Who computes what in one step; made by `plan_attention`, the same for every layer.

    All int32. `waves * lanes` bounds the jobs of any step of the bucket, `tiles` the tiles.
    A dead job has `job_begin == job_end` and adds nothing.
    """

    job_row: Int32[Array | np.ndarray, "waves lanes"]  # decode row (= token = sequence) of the job
    job_begin: Int32[Array | np.ndarray, "waves lanes"]  # first context position of the job
    job_end: Int32[Array | np.ndarray, "waves lanes"]  # one past its last context position
    wave_rounds: Int32[Array | np.ndarray, " waves"]  # rounds of the longest job of the wave
    num_waves: Int32[Array | np.ndarray, ""]
    row_parts: Int32[Array | np.ndarray, " jobs"]  # flat job ids, grouped by row
    row_first: Int32[Array | np.ndarray, " seqs"]  # where in row_parts the row's jobs begin
    row_count: Int32[Array | np.ndarray, " seqs"]  # and how many they are: 0 for a padded row
    max_parts: Int32[Array | np.ndarray, ""]  # largest row_count
    tile_seq: Int32[Array | np.ndarray, " tiles"]  # sequence of the tile
    tile_start: Int32[Array | np.ndarray, " tiles"]  # first token of the window that is read
    tile_begin: Int32[Array | np.ndarray, " tiles"]  # first token of the window that is the tile's
    tile_end: Int32[Array | np.ndarray, " tiles"]  # one past its last token
    tile_shift: Int32[Array | np.ndarray, " tiles"]  # position in the sequence less token index
    tile_chunk_begin: Int32[Array | np.ndarray, " tiles"]  # first context chunk that it sees
    tile_chunk_end: Int32[Array | np.ndarray, " tiles"]  # one past the last
    num_tiles: Int32[Array | np.ndarray, ""]


class AttentionMetadata(NamedTuple):
    """What attention must know of a step besides q, k and v. All int32, padded to the bucket."""

    slot_mapping: Int32[Array | np.ndarray, " tokens"]  # where k, v go; padding: the null block
    block_tables: Int32[Array | np.ndarray, "seqs blocks_per_seq"]  # padding: the null block 0
    seq_lens: Int32[Array | np.ndarray, " seqs"]  # context with this step's tokens; padding: 0
    query_start_loc: Int32[Array | np.ndarray, " seqs+1"]  # first token of each; padding repeats
    num_decodes: Int32[Array | np.ndarray, ""]  # the first sequences, one token each
    plan: AttentionPlan


def pool_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int]:
    """The shape of one layer's K (or V) pool: a (block, head) tile is contiguous."""
    return num_blocks, num_kv_heads, block_size, head_dim


def write_kv(
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> tuple[
    Float[Array, "blocks kv_heads block_size head_dim"],
    Float[Array, "blocks kv_heads block_size head_dim"],
]:
    """Write each token's k and v into its slot; in place where the pools are donated.

    Padding tokens all write to the null block: which of them stays there is unspecified.
    """
    block_size = jnp.int32(k_pool.shape[2])
    block, offset = lax.div(slot_mapping, block_size), lax.rem(slot_mapping, block_size)

    def put(pool, rows):
        return pool.at[block, :, offset].set(rows.astype(pool.dtype), mode="promise_in_bounds")

    return put(k_pool, k), put(v_pool, v)


def chunk_tokens(block_size: int, target: int) -> int:
    """Tokens of a round: whole blocks, at least one, about `target`."""
    return block_size * max(1, target // block_size)


def plan_attention(
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    num_decodes: int,
    *,
    num_tokens: int,
    block_size: int,
    sliding_window: int | None = None,
) -> AttentionPlan:
    """The work of one step, from its padded arrays; `num_tokens` is the bucket's.

    The shapes of the result depend on the shapes given, not on the values.
    """
    decode = _plan_decode(seq_lens, int(num_decodes), block_size, sliding_window)
    prefill = _plan_prefill(
        seq_lens, query_start_loc, int(num_decodes), num_tokens, block_size, sliding_window
    )
    return AttentionPlan(**decode, **prefill)


def _plan_decode(
    seq_lens: np.ndarray, num_decodes: int, block_size: int, window: int | None
) -> dict[str, np.ndarray]:
    """Cut the contexts of the decode rows into jobs of at most `rounds` chunks each.

    With J(r) = sum(ceil(chunks / r)) jobs in ceil(J / lanes) waves of r rounds, the r with the
    least waves * r is taken: equal lengths need one wave and no split, one long context among
    short ones is spread over the lanes.
    """
    num_seqs = len(seq_lens)
    lanes = min(num_seqs, MAX_LANES)
    capacity = -(-(num_seqs + lanes) // lanes) * lanes
    chunk = chunk_tokens(block_size, CHUNK_TOKENS)
    end = seq_lens[:num_decodes].astype(np.int64)
    begin = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
    first_chunk = begin // chunk
    chunks = -(-end // chunk) - first_chunk
    rounds = _least_rounds(chunks, lanes, capacity)
    parts = -(-chunks // rounds)
    row = np.repeat(np.arange(num_decodes), parts)
    row_first = np.cumsum(parts) - parts
    job_chunk = first_chunk[row] + (np.arange(len(row)) - row_first[row]) * rounds
    job_begin = np.maximum(job_chunk * chunk, begin[row])
    job_end = np.minimum((job_chunk + rounds) * chunk, end[row])
    length = -(-job_end // chunk) - job_begin // chunk
    order = np.argsort(-length, kind="stable")  # long jobs share waves

    def jobs(values: np.ndarray) -> np.ndarray:
        return _padded(values[order], capacity).reshape(-1, lanes)

    place = np.empty(len(row), np.int64)
    place[order] = np.arange(len(row))
    return {
        "job_row": jobs(row),
        "job_begin": jobs(job_begin),
        "job_end": jobs(job_end),
        "wave_rounds": jobs(length).max(axis=1),
        "num_waves": np.asarray(-(-len(row) // lanes), np.int32),
        "row_parts": _padded(place, capacity),
        "row_first": _padded(row_first, num_seqs),
        "row_count": _padded(parts, num_seqs),
        "max_parts": np.asarray(parts.max(initial=0), np.int32),
    }


def _least_rounds(chunks: np.ndarray, lanes: int, capacity: int) -> int:
    longest = int(chunks.max(initial=1))
    candidates = np.unique(np.geomspace(1, longest, num=16).round().astype(np.int64))
    num_jobs = (-(-chunks[:, None] // candidates)).sum(axis=0)
    cost = np.where(num_jobs <= capacity, -(-num_jobs // lanes) * candidates, np.iinfo(np.int64).max)
    return int(candidates[len(cost) - 1 - np.argmin(cost[::-1])])


def _plan_prefill(
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    num_decodes: int,
    num_tokens: int,
    block_size: int,
    window: int | None,
) -> dict[str, np.ndarray]:
    tile = min(TILE_TOKENS, num_tokens)
    chunk = chunk_tokens(block_size, TILE_CHUNK_TOKENS)
    capacity = -(-num_tokens // tile) + len(seq_lens)
    lens = np.diff(query_start_loc)[num_decodes:].astype(np.int64)
    tiles = -(-lens // tile)
    seq = num_decodes + np.repeat(np.arange(len(lens)), tiles)
    nth = np.arange(len(seq)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    seq_end = query_start_loc[seq + 1].astype(np.int64)
    begin = query_start_loc[seq] + nth * tile
    end = np.minimum(begin + tile, seq_end)
    shift = seq_lens[seq] - seq_end
    oldest = 0 if window is None else np.maximum(begin + shift - window + 1, 0)
    return {
        "tile_seq": _padded(seq, capacity),
        "tile_start": _padded(np.minimum(begin, num_tokens - tile), capacity),
        "tile_begin": _padded(begin, capacity),
        "tile_end": _padded(end, capacity),
        "tile_shift": _padded(shift, capacity),
        "tile_chunk_begin": _padded(oldest // chunk + np.zeros_like(begin), capacity),
        "tile_chunk_end": _padded(-(-(end + shift) // chunk), capacity),
        "num_tiles": np.asarray(len(seq), np.int32),
    }


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    v_pool: Float[Array, "blocks kv_heads block_size head_dim"],
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """softmax(scale * q k^T) v of every token over its own sequence's keys, causal.

    `sliding_window` lets a token see that many keys, itself included; the plan must have been made
    with the same. Rows of padding tokens come out as zeros. Softmax and sums are float32.
    """
    pools = _flat(k_pool), _flat(v_pool)
    shape = k_pool.shape
    out = _decode(q, pools, shape, metadata, scale)
    return _prefill(q, out, pools, shape, metadata, scale, sliding_window)


def _flat(pool: jax.Array) -> jax.Array:
    """[blocks * kv_heads, block_size * head_dim]: a gather of long rows is a memory copy."""
    blocks, kv_heads, block_size, head_dim = pool.shape
    return pool.reshape(blocks * kv_heads, block_size * head_dim)


def _rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """table[index] for a 2-D table and indices known to be in bounds: no clamps, no wrapping."""
    dims = lax.GatherDimensionNumbers(
        offset_dims=(index.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(
        table, index[..., None], dims, (1, table.shape[1]), mode="promise_in_bounds"
    )


def _chunked_tables(block_tables: jax.Array, per_chunk: int) -> jax.Array:
    """[seqs, chunks, per_chunk], padded with the null block."""
    seqs, blocks = block_tables.shape
    padded = jnp.pad(block_tables, ((0, 0), (0, -blocks % per_chunk)))
    return padded.reshape(seqs, -1, per_chunk)


def _attend(state, q, pools, shape, block_ids, seen, exists, scale):
    """One round of the online softmax: q [lanes kv_heads rows head_dim] against one chunk.

    `seen` [lanes, 1 or rows, chunk] masks scores; `exists` [lanes, chunk] says which slots hold
    tokens of the sequence: the others may hold anything, NaN included, which 0 * v would keep.
    """
    maximum, total, acc = state
    _, kv_heads, block_size, head_dim = shape
    lanes, per_chunk = block_ids.shape
    chunk = per_chunk * block_size
    tile_ids = block_ids[:, None] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    k = _rows(pools[0], tile_ids).reshape(lanes, kv_heads, chunk, head_dim)
    v = _rows(pools[1], tile_ids)
    keep = jnp.broadcast_to(
        exists.reshape(lanes, 1, per_chunk, block_size, 1),
        (lanes, kv_heads, per_chunk, block_size, head_dim),
    )
    v = jnp.where(keep.reshape(v.shape), v, 0).reshape(k.shape)
    scores = jnp.einsum("wkgd,wkcd->wkgc", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None], scores * scale, -jnp.inf)
    new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
    p = jnp.exp(scores - new_maximum[..., None])
    decay = jnp.exp(maximum - new_maximum)
    pv = jnp.einsum("wkgc,wkcd->wkgd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new_maximum, total * decay + p.sum(axis=-1), acc * decay[..., None] + pv


def _empty_state(lanes: int, kv_heads: int, rows: int, head_dim: int):
    heads = (lanes, kv_heads, rows)
    return (
        jnp.full(heads, LOWEST, jnp.float32),
        jnp.zeros(heads, jnp.float32),
        jnp.zeros((*heads, head_dim), jnp.float32),
    )


def _decode(q, pools, shape, metadata, scale):
    """Attention of the decode rows, [tokens heads head_dim]; the other rows are zeros."""
    tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = shape
    plan = metadata.plan
    waves, lanes = plan.job_row.shape
    seqs = metadata.seq_lens.shape[0]
    group = heads // kv_heads
    chunk = chunk_tokens(block_size, CHUNK_TOKENS)
    tables = _chunked_tables(metadata.block_tables, chunk // block_size)
    num_chunks = tables.shape[1]
    tables = tables.reshape(seqs * num_chunks, -1)
    flat_q = q.reshape(tokens, heads * head_dim)

    def wave(w, parts):
        row, begin, end = (x[w] for x in (plan.job_row, plan.job_begin, plan.job_end))
        first = lax.div(begin, jnp.int32(chunk))
        lane_q = _rows(flat_q, row).reshape(lanes, kv_heads, group, head_dim)

        def round_(r, state):
            index = jnp.minimum(first + r, num_chunks - 1)
            position = (first + r)[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)
            valid = (position >= begin[:, None]) & (position < end[:, None])
            block_ids = _rows(tables, row * num_chunks + index)
            return _attend(
                state, lane_q, pools, shape, block_ids, valid[:, None], valid, scale
            )

        state = _empty_state(lanes, kv_heads, group, head_dim)
        state = lax.fori_loop(0, plan.wave_rounds[w], round_, state)
        return tuple(
            lax.dynamic_update_slice(part, new[None], (w,) + (0,) * new.ndim)
            for part, new in zip(parts, state, strict=True)
        )

    empty = _empty_state(waves * lanes, kv_heads, group, head_dim)
    parts = tuple(x.reshape(waves, lanes, *x.shape[1:]) for x in empty)
    parts = lax.fori_loop(0, plan.num_waves, wave, parts)
    out = _combine(parts, plan, seqs)
    out = out.reshape(seqs, heads, head_dim).astype(q.dtype)
    return jnp.pad(out, ((0, max(0, tokens - seqs)), (0, 0), (0, 0)))[:tokens]


def _combine(parts, plan, seqs):
    """[seqs, kv_heads * group, head_dim] from the partial states of each row's jobs."""
    maximum, total, acc = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in parts)
    jobs, kv_heads, group, head_dim = acc.shape
    heads = kv_heads * group
    maximum, total = maximum.reshape(jobs, heads), total.reshape(jobs, heads)
    acc = acc.reshape(jobs, heads * head_dim)

    def body(i, state):
        old_max, old_total, old_acc = state
        job = plan.row_parts[jnp.minimum(plan.row_first + i, jobs - 1)]
        live = (i < plan.row_count)[:, None]
        part_max = jnp.where(live, _rows(maximum, job), LOWEST)
        new_max = jnp.maximum(old_max, part_max)
        weight = jnp.where(live, jnp.exp(part_max - new_max), 0.0)
        decay = jnp.exp(old_max - new_max)
        part = _rows(acc, job).reshape(seqs, heads, head_dim)
        return (
            new_max,
            old_total * decay + _rows(total, job) * weight,
            old_acc * decay[..., None] + part * weight[..., None],
        )

    state = (
        jnp.full((seqs, heads), LOWEST, jnp.float32),
        jnp.zeros((seqs, heads), jnp.float32),
        jnp.zeros((seqs, heads, head_dim), jnp.float32),
    )
    _, total, acc = lax.fori_loop(0, plan.max_parts, body, state)
    return acc / jnp.where(total > 0, total, 1.0)[..., None]


def _prefill(q, out, pools, shape, metadata, scale, window):
    """`out` with the rows of the prefill chunks filled in, tile by tile."""
    tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = shape
    plan = metadata.plan
    group = heads // kv_heads
    tile = min(TILE_TOKENS, tokens)
    chunk = chunk_tokens(block_size, TILE_CHUNK_TOKENS)
    tables = _chunked_tables(metadata.block_tables, chunk // block_size)
    grouped_q = q.reshape(tokens, kv_heads, group, head_dim)

    def one_tile(t, out):
        start, seq = plan.tile_start[t], plan.tile_seq[t]
        tile_q = lax.dynamic_slice_in_dim(grouped_q, start, tile)
        tile_q = tile_q.transpose(1, 0, 2, 3).reshape(1, kv_heads, tile * group, head_dim)
        token = start + jnp.arange(tile, dtype=jnp.int32)
        query = jnp.repeat(token + plan.tile_shift[t], group)[:, None]
        last = plan.tile_end[t] + plan.tile_shift[t]

        def round_(c, state):
            position = c * chunk + jnp.arange(chunk, dtype=jnp.int32)
            seen = position <= query
            if window is not None:
                seen &= position > query - window
            block_ids = lax.dynamic_slice(tables, (seq, c, 0), (1, 1, tables.shape[2]))[0]
            exists = (position < last)[None]
            return _attend(
                state, tile_q, pools, shape, block_ids, (seen & exists)[None], exists, scale
            )

        state = _empty_state(1, kv_heads, tile * group, head_dim)
        _, total, acc = lax.fori_loop(
            plan.tile_chunk_begin[t], plan.tile_chunk_end[t], round_, state
        )
        new = (acc / jnp.where(total > 0, total, 1.0)[..., None]).astype(out.dtype)
        new = new.reshape(kv_heads, tile, group, head_dim).transpose(1, 0, 2, 3)
        mine = (token >= plan.tile_begin[t]) & (token < plan.tile_end[t])
        old = lax.dynamic_slice_in_dim(out, start, tile)
        new = jnp.where(mine[:, None, None], new.reshape(old.shape), old)
        return lax.dynamic_update_slice_in_dim(out, new, start, axis=0)

    return lax.fori_loop(0, plan.num_tiles, one_tile, out)
