"""Tiles of prompts where devices split positions: what the tiles see is gathered once a layer.

The contexts of all sequences with tiles lie one after the other, in blocks of the tables
(`GatheredWork`). A round gathers as many of them as its buffer holds, in a few exchanges; then the
tiles that see some of these go on with their softmaxes. Trip counts are data, the same on all
devices. What neighbours have of blocks becomes pages of a pool: place r has its blocks one after
the other, so the i-th page of the round is at `page_of(i)`. Kernels read such pools by a table.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.window import first_seen
from shiftjax.models.attention import (
    LayerPool,
    LoopOptions,
    attend_chunk,
    empty_state,
    fetch_chunk,
    take,
)
from shiftjax.models.attention_work import AttentionWork, GatheredWork, LoopSizes, tile_tokens
from shiftjax.models.softmaxes import State
from shiftjax.parallel.positions import Positions, gathered_tokens


@runtime_checkable
class Gathering(Protocol):
    """Who can gather what devices have of blocks: `Neighbours`."""

    @property
    def positions(self) -> Positions:
        """How they split positions."""
        ...

    def gather_blocks(self, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return blocks `[blocks, ...]` of all: `[ways, blocks, ...]` of each array."""
        ...


class Rounds(NamedTuple):
    """What a round gathers; in blocks of the tables."""

    neighbours: Gathering
    piece: int  # of an exchange
    gathers: int  # exchanges
    most: int  # blocks that a step may gather

    @property
    def blocks(self) -> int:
        """Of the buffer."""
        return self.piece * self.gathers

    @property
    def are_one(self) -> bool:
        """Whether the buffer holds whatever a step gathers."""
        return self.most <= self.blocks

    def num_for(self, work: GatheredWork) -> Int32[Array, ""]:
        """Return how many rounds a step has."""
        return lax.div(work.num_blocks + (self.blocks - 1), jnp.int32(self.blocks))

    def page_of(self, nth: jax.Array) -> jax.Array:
        """Return where in the pool of pages the nth run of tokens is that a device has."""
        positions = self.neighbours.positions
        ways = jnp.int32(positions.ways)
        return positions.place(lax.rem(nth, ways)) * self.blocks + lax.div(nth, ways)


def rounds_of(
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    neighbours: Gathering,
    sizes: LoopSizes,
    unit: int = 1,
) -> Rounds:
    """Return the rounds, whose buffer is no longer than all contexts of a step; of whole units."""
    stripe, (seqs, blocks) = neighbours.positions.stripe, block_tables.shape
    piece = gathered_tokens(stripe, sizes.gathered) // stripe
    piece, most = max(1, piece // unit) * unit, seqs * -(-blocks // unit) * unit
    return Rounds(neighbours, piece, min(sizes.gathers, -(-most // piece)), most)


def gather_pages(
    pool: tuple[jax.Array, ...],
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    work: GatheredWork,
    first: Int32[Array, ""],
    rounds: Rounds,
) -> tuple[jax.Array, ...]:
    """Return a pool of pages with `rounds.blocks` blocks of the contexts, from `first` on.

    `[ways * blocks, heads, block, width]` of each array of the pool. Pages beyond the contexts hold
    anything.
    """
    places, num_seqs = jnp.arange(rounds.piece, dtype=jnp.int32), block_tables.shape[0]

    def gather(n, pages):
        nth = first + n * rounds.piece + places
        seq = (work.seq_begin[None] <= nth[:, None]).sum(1, dtype=jnp.int32) - 1
        seq = jnp.clip(seq, 0, num_seqs - 1)
        column = nth - take(work.seq_begin, seq) + take(work.seq_first, seq)
        ids = block_tables[seq, jnp.minimum(column, block_tables.shape[1] - 1)]
        ids = jnp.where(nth < work.num_blocks, ids, 0)
        found = rounds.neighbours.gather_blocks(tuple(take(blocks, ids) for blocks in pool))
        put, at = lax.dynamic_update_slice_in_dim, n * rounds.piece
        return tuple(put(old, new, at, 1) for old, new in zip(pages, found, strict=True))

    size, ways = rounds.neighbours.positions.block, rounds.neighbours.positions.ways
    shapes = [(ways, rounds.blocks, x.shape[1], size, x.shape[3]) for x in pool]
    pages = tuple(map(jnp.zeros, shapes, (blocks.dtype for blocks in pool)))
    left = work.num_blocks - first
    count = jnp.minimum(lax.div(left + (rounds.piece - 1), jnp.int32(rounds.piece)), rounds.gathers)
    pages = lax.fori_loop(0, count, gather, pages)
    return tuple(each.reshape(-1, *each.shape[2:]) for each in pages)


class _Step(NamedTuple):
    """What all rounds of a layer's tiles know."""

    work: AttentionWork
    rounds: Rounds
    options: LoopOptions
    tokens: int  # of the bucket


def in_gathered_tiles(
    q: Float[Array, "tokens heads head_dim"],
    out: Float[Array, "tokens heads width"],
    pool: LayerPool,
    block_tables: Int32[Array, "seqs blocks_per_seq"],
    work: AttentionWork,
    options: LoopOptions,
) -> Float[Array, "tokens heads width"]:
    """Return `out` with the rows of tiles filled in."""
    (tokens, heads, head_dim), width, kv_heads = q.shape, out.shape[-1], pool[0].shape[1]
    neighbours, gathered = options.neighbours, work.gathered
    assert neighbours is not None and gathered is not None
    rounds = rounds_of(block_tables, neighbours, options.sizes)
    step = _Step(work, rounds, options, tokens)
    by_head = q.reshape(tokens, kv_heads, -1, head_dim).transpose(1, 0, 2, 3)
    by_head = by_head.reshape(1, kv_heads, -1, head_dim)

    def run_round(n, states):
        first = n * rounds.blocks
        pages = gather_pages(pool, block_tables, gathered, first, rounds)
        return _attend_pages(by_head, states, pages, first, step)

    count = _after(out, rounds.num_for(gathered))
    states = empty_state(q, 1, kv_heads, by_head.shape[2], width)
    states = lax.fori_loop(0, count, run_round, states)
    new, in_tile = options.values(states, tokens).astype(q.dtype), states.total[..., None] != 0

    def by_token(x):
        x = x.reshape(kv_heads, tokens, heads // kv_heads, -1).transpose(1, 0, 2, 3)
        return x.reshape(tokens, heads, -1)

    return jnp.where(by_token(in_tile), by_token(new), out)


def _after(rows: jax.Array, count: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the count of rounds, once the rows of decodes are known.

    Nothing else would order the exchanges of the two. On CPUs a loop's may then run beside them,
    and processes take what comes first for what they wait for (gloo has one queue for each kind).
    """
    seen = lax.bitcast_convert_type(rows[0, 0, 0].astype(jnp.float32), jnp.int32)
    return jnp.where(count >= 0, count, seen)  # no count is negative, which a compiler cannot know


def _attend_pages(
    q: Float[Array, "1 kv_heads rows head_dim"],
    states: State,
    pages: LayerPool,
    first: Int32[Array, ""],
    step: _Step,
) -> State:
    """Return the softmaxes of all tokens after those of tiles have seen the pages.

    The pages are of blocks from `first` on. Rows are tokens, each with its heads of a KV head.
    """
    (_, tiles, gathered), rounds, options, tokens = step
    assert gathered is not None
    window, stripe = options.window, rounds.neighbours.positions.stripe
    ways, per_chunk = stripe // pages[0].shape[2], max(1, options.sizes.tile_chunk // stripe)
    tile = tile_tokens(tokens, step.work.rows.row_first.shape[0], options.sizes)
    q_per_kv = q.shape[2] // tokens
    shift = take(gathered.seq_begin, tiles.tile_seq) - take(gathered.seq_first, tiles.tile_seq)
    shift -= first  # from blocks of a tile's table to those of the buffer
    low, high = tiles.tile_chunk_begin + shift, tiles.tile_chunk_end + shift
    low, high = jnp.maximum(low, 0), jnp.minimum(high, rounds.blocks)
    spans = tiles.tile_start, tiles.tile_begin, tiles.tile_end, tiles.tile_shift
    spans = jnp.stack((*spans, low, high, shift), axis=1)
    rows = lax.div(jnp.arange(tile * q_per_kv, dtype=jnp.int32), jnp.int32(q_per_kv))
    offsets = jnp.arange(per_chunk * stripe, dtype=jnp.int32)[None]

    def run_tile(t, states):
        start, begin, end, ahead, low, high, shift = take(spans, t)
        own = tile * q_per_kv
        tile_q = lax.dynamic_slice_in_dim(q, start * q_per_kv, own, 2)
        old = State(*(lax.dynamic_slice_in_dim(x, start * q_per_kv, own, 2) for x in states))
        token = start + rows

        def run_chunk(c, state):
            block = low + c * per_chunk
            key, query = (block - shift) * stripe + offsets, token[:, None] + ahead
            exists = (key < end + ahead) & (key < (high - shift) * stripe)
            seen = (key <= query) & exists
            if window is not None:
                seen &= key >= first_seen(query, window)
            if window is not None and options.frees_blocks:
                exists &= key >= first_seen(begin + ahead, window)
            nth = block * ways + jnp.arange(per_chunk * ways, dtype=jnp.int32)
            ids = rounds.page_of(jnp.minimum(nth, rounds.blocks * ways - 1))[None]
            k, v = fetch_chunk(pages, ids, exists, q.dtype, options.values_in_keys)
            return attend_chunk(state, tile_q, k, v, seen[None], options.scores)

        count = lax.div(jnp.maximum(high - low, 0) + (per_chunk - 1), jnp.int32(per_chunk))
        new = lax.fori_loop(0, count, run_chunk, old)
        mine = ((token >= begin) & (token < end))[None, None]

        def put(x, before, after):
            kept = jnp.where(mine.reshape(1, 1, -1, *(1,) * (x.ndim - 3)), after, before)
            return lax.dynamic_update_slice_in_dim(x, kept, start * q_per_kv, 2)

        return State(*map(put, states, old, new))

    real = jnp.arange(low.shape[0], dtype=jnp.int32) < tiles.num_tiles
    before, until = (real & (high <= 0)).sum(), (real & (low < rounds.blocks)).sum()
    return lax.fori_loop(before.astype(jnp.int32), until.astype(jnp.int32), run_tile, states)
