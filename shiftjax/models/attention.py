"""Ragged paged attention and the KV write, in plain XLA.

A step holds decode rows (tokens that attend one by one) and then tiles of many; `attention_work`
says how they are cut up. Both parts are loops whose trip counts are data, so that the work follows
the real lengths and never the padded block table; how much a round takes depends on the platform.
The softmax is the online one (Milakov and Gimelshein, arXiv 1805.02867), the split of long contexts
that of Flash-Decoding (Dao et al., 2023).

Pools of fp8 hold e4m3 codes in units of a scale for each KV head. The products are with the codes,
which activations' formats hold exactly, and the scales are applied to scores and to the output: as
the kernels do. A CPU moves no fp8 but in float16, all of a pool: there pools are bytes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, Int32, UInt8

from pallas_kernels.call import CodeKind
from pallas_kernels.window import Window, first_seen
from shiftjax.arch.cache import LayerCache, layers_of_pools
from shiftjax.arch.numerics import LEAST_ROWS
from shiftjax.models.attention_work import (
    CPU_SIZES,
    AttentionWork,
    LoopSizes,
    RowWork,
    divide_attention,
    tile_tokens,
    whole_blocks,
)
from shiftjax.models.neighbours import Neighbours, answered
from shiftjax.models.products import CODE, LARGEST_CODE
from shiftjax.models.softmaxes import LOWEST, State, normalised, sinks_by_row

__all__ = [
    "AttentionMetadata",
    "AttentionWork",
    "divide_attention",
    "in_tiles",
    "ragged_paged_attention",
    "row_attention",
    "write_kv",
]

BYTE = jnp.dtype(jnp.uint8)

Blocks = Float[Array, "blocks kv_heads block_size head_dim"] | UInt8[Array, "blocks kv_heads ..."]
# K and V, or latents, of one layer, or of several, one after the other
LayerPool = tuple[Blocks, ...]
# Those of a model: heads of layers may differ, and so may the shapes of pools.
ModelPools = list[tuple[Float[Array, "_ _ _ _"] | UInt8[Array, "_ _ _ _"], ...]]
KVScales = Float[Array, "2 kv_heads"]  # what a code of K, and of V, is in units of


class AttentionMetadata(NamedTuple):
    """What attention must know of a step besides q, k and v; int32, padded to the bucket."""

    # Both of each cache group, `[groups, ...]`, until `of_group` where the model has several.
    slot_mapping: Int32[Any, "*groups tokens"]  # where a token's k, v go; padding: the null block
    block_tables: Int32[Any, "*groups seqs blocks_per_seq"]  # padding: the null block 0
    seq_lens: Int32[Any, " seqs"]  # context length with this step's tokens; padding: 0
    query_start_loc: Int32[Any, " seqs_plus_1"]  # first token of each sequence; padding repeats
    num_decodes: Int32[Any, ""]  # every token of so many of the first sequences is a decode row
    work: Any  # who computes what, for each window of the model: a tuple of AttentionWork here

    def of_group(self, group: int) -> "AttentionMetadata":
        """Return what layers of one of `ModelConfig.cache_groups` must know.

        As it is where all have one table, and where packed rows keep nothing, and have none.
        """
        if self.block_tables is None or self.block_tables.ndim == 2:
            return self
        slots, tables = self.slot_mapping[group], self.block_tables[group]
        return self._replace(slot_mapping=slots, block_tables=tables)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolPlace:
    """Which part of a pool of several layers is one layer's."""

    layer: Any  # Int32[Array, ""]: the how manieth of them
    layers: int = field(metadata={"static": True})

    def blocks(self, pool: LayerPool) -> int:
        """Blocks of each layer."""
        return pool[0].shape[0] // self.layers

    def first(self, pool: LayerPool) -> Int32[Array, ""]:
        """The layer's null block, from which its blocks are counted."""
        return self.layer * jnp.int32(self.blocks(pool))


def pool_places(
    caches: Sequence[LayerCache], num_pools: int
) -> dict[int, tuple[int, PoolPlace | None]]:
    """Return for each layer its pool and its place there; None where it has a pool alone."""
    return {
        layer: (nth, PoolPlace(np.int32(place), len(places)) if len(places) > 1 else None)
        for nth, (_, places) in enumerate(layers_of_pools(caches, num_pools))
        for place, layers in enumerate(places)
        for layer in layers
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerTerms:
    """What attention must know of a layer besides its keys and values."""

    # which of `ModelConfig.attentions`, and of the works of a step
    window: int = field(default=0, metadata={"static": True})
    # what codes are in units of; None: pools are no codes, or in units of 1
    kv_scales: Float[Any, "2 kv_heads"] | None = None
    # logits that take part in each head's softmax and have no value; None: there are none
    sinks: Float[Any, " heads"] | None = None
    # in a pool of several layers; None: the pool is this layer's
    place: PoolPlace | None = None
    # of codes that the next product reads: kernels may give such in place of numbers; None: it
    # reads numbers
    codes: CodeKind | None = None
    # queries are of the heads of all neighbours who split positions, and so is the output, of which
    # this device's part is asked
    of_all: bool = field(default=False, metadata={"static": True})

    def first(self, pool: LayerPool) -> Int32[Array, ""] | None:
        """Return the block of the pool that the layer's are counted from; None: 0."""
        return None if self.place is None else self.place.first(pool)

    def block_tables(self, pool: LayerPool, tables: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """Return block numbers of the layer as those of the pool."""
        return tables if self.place is None else tables + self.place.first(pool)

    def slots(self, pool: LayerPool, slots: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """Return slots of the layer as those of the pool."""
        block_size = jnp.int32(pool[0].shape[2])
        return slots if self.place is None else slots + self.place.first(pool) * block_size

    def own(self, pool: LayerPool) -> tuple[jax.Array, ...]:
        """Return the layer's part of the pool: a slice, which costs nothing before a kernel."""
        if self.place is None:
            return pool
        first, count = self.place.first(pool), self.place.blocks(pool)
        return tuple(lax.dynamic_slice_in_dim(blocks, first, count) for blocks in pool)


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Return cap * tanh(x / cap), which is about x where that is small; None: x (Gemma 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Scores(NamedTuple):
    """Scale and soft cap of attention scores."""

    scale: float | Float[Array, "1 kv_heads 1 1"]
    soft_cap: float | None

    def __call__(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the scaled and capped scores, before the softmax."""
        return soft_cap(products * self.scale, self.soft_cap)


class RowMetadata(NamedTuple):
    """What layers that compute logit rows alone must know of them."""

    num_rows: Int32[Any, ""]  # real ones; the first of the step's `sample_rows`
    work: Any  # of `AttentionBackend.divide_rows`, for each window of the model


def write_kv(
    pool: LayerPool,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    slot_mapping: Int32[Array, " tokens"],
    kv_scales: KVScales | None = None,
) -> LayerPool:
    """Write each token's k and v into its slot, in place where the pool is donated.

    Without v a pool has k alone, of which a part is values (`LoopOptions.values_in_keys`).

    Padding tokens all write to the null block; whose values stay there is unspecified. Pools of
    codes take `kv_scales` (None: 1). What is beyond the largest code becomes that, and NaN stays.
    """
    block_size = jnp.int32(pool[0].shape[2])
    block, offset = lax.div(slot_mapping, block_size), lax.rem(slot_mapping, block_size)

    def put(blocks, rows, scale):
        slots = blocks.at[block, :, offset]
        rows = _coded(rows, scale) if _are_codes(blocks) else rows
        rows = lax.bitcast_convert_type(rows, BYTE) if blocks.dtype == BYTE else rows
        rows = rows.astype(blocks.dtype)
        return slots.set(rows, mode="promise_in_bounds", wrap_negative_indices=False)

    k_scale, v_scale = _of_each(kv_scales)
    if v is None:
        return (put(pool[0], k, k_scale),)
    return put(pool[0], k, k_scale), put(pool[1], v, v_scale)


def _are_codes(blocks: Blocks) -> bool:
    return blocks.dtype in (CODE, BYTE)


def _coded(
    rows: Float[Array, "tokens kv_heads head_dim"], scale: Float[Array, " kv_heads"] | None
) -> Float8e4m3fn[Array, "tokens kv_heads head_dim"]:
    """Return the codes of keys or values, saturated: a plain conversion would give NaN."""
    wide = rows.astype(jnp.float32)
    if scale is not None:
        wide = wide / scale[None, :, None]
    return jnp.clip(wide, -LARGEST_CODE, LARGEST_CODE).astype(CODE)


class LoopOptions(NamedTuple):
    """What the loops are told beside arrays of tokens.

    Scores are capped by `soft_cap`. `window` says how far back a token sees. `kv_scales` are those
    with which the pool was written. `sinks` are logits of scores that no value belongs to, one for
    each head (gpt-oss). With `frees_blocks` there may be anything behind the window, NaN included.
    `neighbours` are those that split positions with this device: its pool has its own of them.
    Where pools have no values, these are the first `values_in_keys` numbers of keys (MLA). Sinks
    are of own heads; with `of_all` rows have the queries of all neighbours.
    """

    scale: float
    soft_cap: float | None = None
    window: Window | None = None
    kv_scales: KVScales | None = None
    sinks: Float[Array, " heads"] | None = None
    sizes: LoopSizes = CPU_SIZES
    frees_blocks: bool = False
    neighbours: Neighbours | None = None
    values_in_keys: int | None = None
    of_all: bool = False

    @property
    def scores(self) -> Scores:
        """How scores come out of products, keys' scales included."""
        return Scores(_scaled(self.scale, _of_each(self.kv_scales)[0]), self.soft_cap)

    def width(self, head_dim: int) -> int:
        """Return the numbers of a value, where keys have so many."""
        return self.values_in_keys or head_dim

    def values(self, state: State, times: int = 1) -> jax.Array:
        """Return the output of a softmax whose state has each head so many times."""
        sinks = sinks_by_row(self.sinks, state.total.shape[1], times)
        return self.scaled(normalised(state, sinks))

    def scaled(self, values: jax.Array) -> jax.Array:
        """Return values, or sums of them, that are in units of codes as numbers."""
        return _scaled(values, _of_each(self.kv_scales)[1])


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    pool: LayerPool,
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    work: AttentionWork,
    options: LoopOptions,
) -> Float[Array, "tokens heads width"]:
    """softmax(scale * q k^T) v of every token over the keys of its own sequence, causal.

    The work must have been divided with the same window, and with the same `sizes`. Rows of
    padding tokens are zeros. Slots that hold no token of the context may hold anything, NaN
    included.
    """
    out = row_attention(q, pool, block_tables, work.rows, options)
    return in_tiles(q, out, pool, block_tables, work, options)


def take(table: jax.Array, index: jax.Array) -> jax.Array:
    """Return table[index] for indices known to be in bounds: neither clamped nor wrapped."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _gather_chunk(blocks: Blocks, block_ids: Int32[Array, "lanes per_chunk"]) -> jax.Array:
    """Return the blocks of one head after the other, [lanes kv_heads blocks block_size*head_dim].

    Whole rows of block_size * head_dim elements: the backend copies them as memory.
    """
    num_blocks, kv_heads, block_size, head_dim = blocks.shape
    heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    flat = blocks.reshape(num_blocks * kv_heads, block_size * head_dim)
    return take(flat, block_ids[:, None, :] * kv_heads + heads)


def _chunked(block_tables: jax.Array, block_size: int, chunk: int) -> jax.Array:
    """Return the tables as [seqs, chunks, blocks of a chunk], filled up with the null block."""
    seqs, blocks = block_tables.shape
    per_chunk = chunk // block_size
    padded = jnp.pad(block_tables, ((0, 0), (0, -blocks % per_chunk)))
    return padded.reshape(seqs, -1, per_chunk)


def empty_state(like: jax.Array, lanes: int, kv_heads: int, rows: int, width: int) -> State:
    """Return the state before the first key; it varies over the mesh axes that `like` does."""

    def filled(value: float, *shape: int) -> jax.Array:
        return jnp.full_like(like, value, shape=(lanes, kv_heads, rows, *shape), dtype=jnp.float32)

    return State(filled(LOWEST), filled(0.0), filled(0.0, width))


def fetch_chunk(
    pool: LayerPool,
    block_ids: Int32[Array, "lanes per_chunk"],
    exists: jax.Array,
    dtype: Any,
    values_in_keys: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return k and v of one chunk of context, `[lanes, kv_heads, chunk, width]` each.

    `exists` [lanes, chunk] says which slots hold context: elsewhere v is 0, for 0 * NaN is not.
    """
    lanes, per_chunk = block_ids.shape
    _, kv_heads, block_size, head_dim = pool[0].shape
    parts = tuple(_gather_chunk(blocks, block_ids) for blocks in pool)
    k, v = parts[0], parts[-1]
    if _are_codes(pool[0]):
        k, v = (lax.bitcast_convert_type(x, CODE).astype(dtype) for x in (k, v))
    keep = exists.reshape(lanes, 1, per_chunk, block_size, 1)
    keep = jnp.broadcast_to(keep, (lanes, kv_heads, per_chunk, block_size, head_dim))
    v = jnp.where(keep.reshape(v.shape), v, 0)
    shape = lanes, kv_heads, per_chunk * block_size, head_dim
    return k.reshape(shape), v.reshape(shape)[..., :values_in_keys]


def attend_chunk(
    state: State,
    q: Float[Array, "lanes kv_heads rows head_dim"],
    k: Float[Array, "lanes kv_heads chunk head_dim"],
    v: Float[Array, "lanes kv_heads chunk width"],
    seen: jax.Array,
    scores: Scores,
    *,
    in_order: bool = False,
) -> State:
    """Take one chunk of context into the softmax; `seen` [lanes, 1 or rows, chunk] masks scores.

    With `in_order` no bit depends on how many lanes, heads or rows there are: on CPUs the order of
    XLA's sums of rows does, and that of its products of few rows.
    """
    rows = q.shape[2]
    fill = ((0, 0), (0, 0), (0, max(0, LEAST_ROWS - rows) if in_order else 0), (0, 0))
    wide_q = jnp.pad(q, fill)
    products = jnp.einsum("lkrd,lkcd->lkrc", wide_q, k, preferred_element_type=jnp.float32)
    masked = jnp.where(seen[:, None], scores(products[:, :, :rows]), -jnp.inf)
    maximum = jnp.maximum(state.maximum, masked.max(axis=-1))
    decay = jnp.exp(state.maximum - maximum)
    p = jnp.exp(masked - maximum[..., None])
    wide_p = jnp.pad(p.astype(v.dtype), fill)
    pv = jnp.einsum("lkrc,lkcd->lkrd", wide_p, v, preferred_element_type=jnp.float32)[:, :, :rows]
    total = state.total * decay + (_sum_by_halves(p) if in_order else p.sum(axis=-1))
    return State(maximum, total, state.weighted * decay[..., None] + pv)


def _sum_by_halves(x: Float[Array, "*rows width"]) -> Float[Array, "*rows"]:
    while x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return functools.reduce(jnp.add, (x[..., i] for i in range(x.shape[-1])))


def _of_each(kv_scales: KVScales | None) -> tuple[Any, Any]:
    """Return the scales of K and of V; None: what the pool holds is no code, or in units of 1."""
    return (None, None) if kv_scales is None else (kv_scales[0], kv_scales[1])


def _scaled(x: Any, scale: Float[Array, " kv_heads"] | None) -> Any:
    """Return a number, or `[lanes, kv_heads, rows, width]`, of codes times their scale."""
    return x if scale is None else x * scale[None, :, None, None]


def row_attention(
    q: Float[Array, "tokens heads head_dim"],
    pool: LayerPool,
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    work: RowWork,
    options: LoopOptions,
) -> Float[Array, "tokens heads width"]:
    """Return attention of the decode rows: row i is q[i]. Rows that have no jobs are zeros.

    A row sees as much of its sequence as `work` says, the window included. Where neighbours split
    positions, each answers the queries of all of them at its own; the parts are put together. With
    `options.of_all` it has these queries, and returns its part of what they find: all add it up.
    """
    tokens, heads, head_dim = q.shape
    num_rows, neighbours = work.row_count.shape[0], options.neighbours
    state, sinks = answered(
        neighbours,
        q if neighbours is None else q[:num_rows],
        lambda asked: _row_states(asked, pool, block_tables, work, options),
        sinks_by_row(options.sinks, pool[0].shape[1]),
        of_all=options.of_all,
    )
    out = options.scaled(normalised(state, sinks))
    out = out.reshape(num_rows, heads, options.width(head_dim))
    # Not zeros.at[:num_rows].set: where that covers all, its empty index array crashes Shardy.
    return jnp.pad(out[:tokens].astype(q.dtype), ((0, max(0, tokens - num_rows)), (0, 0), (0, 0)))


def _row_states(
    q: Float[Array, "tokens heads head_dim"],
    pool: LayerPool,
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    work: RowWork,
    options: LoopOptions,
) -> State:
    """Return the softmaxes of the decode rows over what this device has of their contexts."""
    tokens, heads, head_dim = q.shape
    kv_heads, block_size = pool[0].shape[1:3]
    num_rows, scores = work.row_count.shape[0], options.scores
    in_order = options.sizes.in_order
    width, (waves, lanes) = options.width(head_dim), work.job_row.shape
    chunk = whole_blocks(options.sizes.row_loop(num_rows).chunk, block_size)
    tables = _chunked(block_tables, block_size, chunk)
    jobs = jnp.stack([work.job_row, work.job_seq, work.job_begin, work.job_end], axis=1)
    offsets = jnp.arange(chunk, dtype=jnp.int32)[None]

    def run_wave(w):
        row, seq, begin, end = take(jobs, w)
        lane_q = take(q.reshape(tokens, -1), row).reshape(lanes, kv_heads, -1, head_dim)
        first = lax.div(begin, jnp.int32(chunk))

        def run_round(r, state):
            position = (first + r)[:, None] * chunk + offsets
            exists = (position >= begin[:, None]) & (position < end[:, None])
            nth = jnp.minimum(first + r, tables.shape[1] - 1)  # a finished job reads what it likes
            block_ids = tables.at[seq, nth].get(
                mode="promise_in_bounds", wrap_negative_indices=False
            )
            k, v = fetch_chunk(pool, block_ids, exists, q.dtype, options.values_in_keys)
            return attend_chunk(state, lane_q, k, v, exists[:, None], scores, in_order=in_order)

        state = empty_state(q, lanes, kv_heads, heads // kv_heads, width)
        return lax.fori_loop(0, take(work.wave_rounds, w), run_round, state)

    def put_wave(w, parts):
        put, state = lax.dynamic_update_slice_in_dim, run_wave(w)
        return State(*(put(old, new, w * lanes, 0) for old, new in zip(parts, state, strict=True)))

    if waves == 1:
        return _combine_all(run_wave(jnp.int32(0)), work)
    parts = empty_state(q, waves * lanes, kv_heads, heads // kv_heads, width)
    return _combine(q, lax.fori_loop(0, work.num_waves, put_wave, parts), work)


def _combine(q: jax.Array, parts: State, work: RowWork) -> State:
    """Return the state of every row from those of its parts."""
    num_rows = work.row_count.shape[0]
    jobs, kv_heads, q_per_kv, width = parts.weighted.shape

    def add_part(i, state):
        job = take(work.row_parts, jnp.minimum(work.row_first + i, jobs - 1))
        part = State(*(take(x, job) for x in parts))
        live = (i < work.row_count)[:, None, None]
        part_maximum = jnp.where(live, part.maximum, LOWEST)
        maximum = jnp.maximum(state.maximum, part_maximum)
        decay = jnp.exp(state.maximum - maximum)
        gain = jnp.where(live, jnp.exp(part_maximum - maximum), 0.0)
        return State(
            maximum,
            state.total * decay + part.total * gain,
            state.weighted * decay[..., None] + part.weighted * gain[..., None],
        )

    state = empty_state(q, num_rows, kv_heads, q_per_kv, width)
    return lax.fori_loop(0, work.max_parts, add_part, state)


def _combine_all(parts: State, work: RowWork) -> State:
    """Return the same without a loop, which a GPU would launch a part at a time.

    Every row sums over all jobs, those of other rows with a weight of 0.
    """
    jobs = parts.total.shape[0]
    nth = jnp.arange(jobs, dtype=jnp.int32)[None] - work.row_first[:, None]
    mine = (nth >= 0) & (nth < work.row_count[:, None])  # of the jobs in the order of `row_parts`
    maximum, total, weighted = (take(x, work.row_parts) for x in parts)
    highest = jnp.where(mine[..., None, None], maximum[None], LOWEST).max(1, keepdims=True)
    gain = jnp.where(mine[..., None, None], jnp.exp(maximum[None] - highest), 0.0)
    sums = jnp.einsum("njkr,jkrd->nkrd", gain, weighted, precision=lax.Precision.HIGHEST)
    return State(highest[:, 0], (gain * total[None]).sum(1), sums)


def in_tiles(
    q: jax.Array,
    out: jax.Array,
    pool: LayerPool,
    block_tables: jax.Array,
    divided: AttentionWork,
    options: LoopOptions,
) -> Float[Array, "tokens heads width"]:
    """Return `out` with the rows of tiles filled in, one tile after the other."""
    (heads, head_dim), width = q.shape[1:], out.shape[-1]
    kv_heads, block_size = pool[0].shape[1:3]
    q_per_kv, scores, window = heads // kv_heads, options.scores, options.window
    work, num_rows = divided.tiles, divided.rows.row_first.shape[0]
    in_order = options.sizes.in_order
    tile = tile_tokens(q.shape[0], num_rows, options.sizes)
    chunk = whole_blocks(options.sizes.tile_chunk, block_size)
    tables = _chunked(block_tables, block_size, chunk)
    spans = work.tile_start, work.tile_begin, work.tile_end, work.tile_shift
    chunks = work.tile_chunk_begin, work.tile_chunk_end
    tiles = jnp.stack((work.tile_seq, *spans, *chunks), axis=1)
    rows = lax.div(jnp.arange(tile * q_per_kv, dtype=jnp.int32), jnp.int32(q_per_kv))[:, None]
    offsets = jnp.arange(chunk, dtype=jnp.int32)[None]

    def run_tile(t, out):
        seq, start, begin, end, shift, chunk_begin, chunk_end = take(tiles, t)
        tile_q, old = (lax.dynamic_slice_in_dim(x, start, tile) for x in (q, out))
        tile_q = tile_q.reshape(tile, kv_heads, q_per_kv, head_dim).transpose(1, 0, 2, 3)
        tile_q = tile_q.reshape(1, kv_heads, tile * q_per_kv, head_dim)

        def run_round(c, state):
            key, query = c * chunk + offsets, start + shift + rows
            exists = key < end + shift
            seen = (key <= query) & exists
            if window is not None:
                seen &= key >= first_seen(query, window)
            if window is not None and options.frees_blocks:
                exists &= key >= first_seen(begin + shift, window)
            block_ids = take(take(tables, seq), c)[None]
            k, v = fetch_chunk(pool, block_ids, exists, q.dtype, options.values_in_keys)
            return attend_chunk(state, tile_q, k, v, seen[None], scores, in_order=in_order)

        state = empty_state(q, 1, kv_heads, tile * q_per_kv, width)
        state = lax.fori_loop(chunk_begin, chunk_end, run_round, state)
        new = options.values(state, tile).astype(q.dtype)
        new = new.reshape(kv_heads, tile, q_per_kv, width).transpose(1, 0, 2, 3)
        token = start + jnp.arange(tile, dtype=jnp.int32)
        mine = ((token >= begin) & (token < end))[:, None, None]
        new = jnp.where(mine, new.reshape(tile, heads, width), old)
        return lax.dynamic_update_slice_in_dim(out, new, start, axis=0)

    return lax.fori_loop(0, work.num_tiles, run_tile, out)
