"""Who computes what in one step of attention: divided on the host, once, for all layers. No JAX.

rows      the contexts of tokens that attend one by one (decodes, drafts, whatever wants logits)
          are cut into jobs; `lanes` jobs advance together, a chunk a round; a wave is over when its
          longest job is, then the next `lanes` jobs begin

              lane 0 | row 0: chunks 0 1 2 |        a row of 3 chunks, whole
              lane 1 | row 1: chunks 0 1 2 |        the first half of a row of 6, and
              lane 2 | row 1: chunks 3 4 5 |        its second: combined at the end

tiles     chunks of prompts are cut into tiles of query tokens; tiles are computed one after the
          other, each against the context chunks that it can see. On a CPU drafts of some length
          are tiles, too: their rows read the same context, which a tile reads once
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from pallas_kernels.rows import Rows, Sequences
from pallas_kernels.window import Window, first_seen
from shiftjax.parallel.positions import (
    GATHERED_TOKENS,
    GATHERED_TOKENS_ON_CPU,
    GATHERS,
    Positions,
)


class RowLoop(NamedTuple):
    """How the decode rows of a bucket are looped over."""

    lanes: int  # jobs that advance together
    waves: int  # of so many jobs each: as many as a step of the bucket can need
    chunk: int  # about so many context tokens are taken of each lane, a round


class LoopSizes(NamedTuple):
    """How much the loops do at a time. The result is the same, but for rounding."""

    row_loop: Callable[[int], RowLoop]  # by the rows of the bucket
    tile: int  # query tokens of a prefill tile
    tile_chunk: int  # context tokens of a prefill round
    # of a tile in buckets up to `tile` whose tokens may all be rows; sequences that have at least
    # half as many rows are tiles there. None: rows never are, and all tiles have the same size
    row_tile: int | None = None
    whole_rows: bool = False  # no row is cut into jobs: the order of its sums is its own
    in_order: bool = False  # nor does it depend on how many rows and heads are computed together
    # context tokens that neighbours gather in an exchange; exchanges before tiles attend
    gathered: int = GATHERED_TOKENS_ON_CPU
    gathers: int = GATHERS


def _cpu_rows(num_rows: int, chunk: int = 64) -> RowLoop:
    lanes = min(num_rows, 32)
    return RowLoop(lanes, -(-(num_rows + lanes) // lanes), chunk)


def _gpu_rows(num_rows: int) -> RowLoop:
    """Return one wave, so that there is one loop, of rounds of 4,096 tokens or more.

    A row is taken in the same chunks in every bucket: what it gives depends on them.
    """
    return RowLoop(max(16, num_rows, min(2 * num_rows, 128)), 1, 256)


# A round fits a cache; also of what is no GPU.
CPU_SIZES = LoopSizes(_cpu_rows, tile=64, tile_chunk=128)
CPU_DRAFT_SIZES = CPU_SIZES._replace(row_tile=8)  # chunks of prompts are dearer in these
# A round is a few launches, one after the other, some 50 us: it needs as much to do.
GPU_SIZES = LoopSizes(_gpu_rows, tile=512, tile_chunk=1024, gathered=GATHERED_TOKENS)


def loop_sizes(
    platform: str,
    deterministic: bool = False,
    drafts: bool = False,
    exchanges: bool = False,
    largest_block: int = 1,
) -> LoopSizes:
    """Return the sizes for the devices of a platform, as JAX names it.

    With `deterministic` ones the sums over a row's context do not depend on other rows, nor on
    which group has it, if the `largest_block` of all groups is named; with `drafts` sequences may
    have several rows, which stay such with `exchanges`: those of rows are smaller than those of
    tiles.
    """
    if platform == "gpu":
        return GPU_SIZES._replace(whole_rows=deterministic)
    if deterministic:
        loop = partial(_cpu_rows, chunk=whole_blocks(64, largest_block))
        sizes = CPU_SIZES._replace(row_loop=loop, whole_rows=True, in_order=True)
        return sizes._replace(tile_chunk=loop(1).chunk)
    return CPU_DRAFT_SIZES if drafts and not exchanges else CPU_SIZES


class RowWork(NamedTuple):
    """The decode rows of a step: NumPy arrays from `divide_rows`, JAX arrays inside the step.

    Shapes depend on the bucket only. `waves * lanes` bounds the jobs of any step of the bucket;
    what is beyond the real ones is zeros: a job from 0 to 0 adds nothing.
    """

    job_row: Int32[Any, "waves lanes"]  # the row that a job belongs to: its query
    job_seq: Int32[Any, "waves lanes"]  # the sequence of that row: its block table
    job_begin: Int32[Any, "waves lanes"]  # first context position of the job
    job_end: Int32[Any, "waves lanes"]  # one past its last
    wave_rounds: Int32[Any, " waves"]  # rounds until the longest job of the wave is done
    num_waves: Int32[Any, ""]  # waves that have jobs: the trip count of a decode
    row_parts: Int32[Any, " jobs"]  # flat places of jobs in (waves, lanes), grouped by row
    row_first: Int32[Any, " rows"]  # where in `row_parts` a row begins
    row_count: Int32[Any, " rows"]  # how many parts it has: 0 for what is not a decode row
    max_parts: Int32[Any, ""]  # the largest of these: the trip count of combining


class TileWork(NamedTuple):
    """The tiles of a step, like `RowWork`: `tiles` of them at most, zeros beyond."""

    tile_seq: Int32[Any, " tiles"]  # the sequence that a tile belongs to
    tile_start: Int32[Any, " tiles"]  # first token read: early enough that a whole tile exists
    tile_begin: Int32[Any, " tiles"]  # first token that the tile owns, hence writes
    tile_end: Int32[Any, " tiles"]  # one past the last that it owns
    tile_shift: Int32[Any, " tiles"]  # position in the sequence = token index + shift
    # first context chunk that the tile sees; a block, where these are gathered
    tile_chunk_begin: Int32[Any, " tiles"]
    tile_chunk_end: Int32[Any, " tiles"]  # one past the last
    num_tiles: Int32[Any, ""]  # the trip count


class GatheredWork(NamedTuple):
    """What tiles see of contexts, one after the other, for devices that gather it.

    In blocks of the tables. `num_blocks` is the number of all of them.
    """

    seq_begin: Int32[Any, " seqs"]  # where a sequence's blocks begin
    seq_first: Int32[Any, " seqs"]  # which of its table is the first of them
    num_blocks: Int32[Any, ""]


class AttentionWork(NamedTuple):
    """The work of one step."""

    rows: Any  # RowWork; of kernels a DecodeWork
    # TileWork, or a PrefillWork of kernels; of these None where every token of the bucket may be a
    # row
    tiles: Any
    gathered: GatheredWork | None = None  # where devices split positions


def tile_tokens(num_tokens: int, num_rows: int, sizes: LoopSizes = CPU_SIZES) -> int:
    """Query tokens of a tile in a bucket of so many tokens and rows."""
    return min(num_tokens, _row_tile(num_tokens, num_rows, sizes) or sizes.tile)


def _row_tile(num_tokens: int, num_rows: int, sizes: LoopSizes) -> int | None:
    return sizes.row_tile if num_tokens <= min(num_rows, sizes.tile) else None


def whole_blocks(tokens: int, block_size: int) -> int:
    """About `tokens` context tokens as whole blocks, at least one."""
    return block_size * max(1, tokens // block_size)


def divide_attention(
    block_tables: Int32[np.ndarray, "seqs blocks_per_seq"],
    sequences: Sequences,
    *,
    num_tokens: int,
    block_size: int,
    window: Window | None = None,
    sizes: LoopSizes = CPU_SIZES,
    positions: Positions | None = None,
) -> AttentionWork:
    """Divide one step; `num_tokens` is the bucket's. With `positions` blocks are their stripes.

    Every token of the first `num_decodes` sequences is a decode row; the others are prefill chunks.
    Where `sizes` let many rows
    of a sequence be tiles, they are, and no jobs. Raises ValueError where a context is longer than
    its block table, which the device would read past without a word.
    """
    seq_lens, query_start_loc, num_decodes, _ = sequences
    check_contexts(block_tables, seq_lens, block_size)
    num_rows = sequences.most_rows
    tile = tile_tokens(num_tokens, num_rows, sizes)
    options = {"block_size": block_size, "window": window, "sizes": sizes, "positions": positions}
    rows = sequences.rows
    in_tiles = np.arange(len(seq_lens)) >= num_decodes
    if _row_tile(num_tokens, num_rows, sizes):
        in_tiles |= 2 * np.diff(query_start_loc) >= tile
        rows = rows._replace(length=np.where(in_tiles[rows.seq], 0, rows.length))
    divided = divide_rows(rows, num_rows, **options)
    if positions is not None:
        own = {"num_tokens": num_tokens, "block_size": block_size, "window": window, "sizes": sizes}
        return AttentionWork(divided, *divide_gathered(sequences, **own))
    chunk = whole_blocks(sizes.tile_chunk, block_size)
    of = np.flatnonzero(in_tiles), sequences, num_tokens, tile
    return AttentionWork(divided, _divide_tiles(*of, chunk, window=window))


def divide_tiles(
    sequences: Sequences,
    *,
    num_tokens: int,
    block_size: int,
    window: Window | None = None,
    sizes: LoopSizes = CPU_SIZES,
) -> tuple[TileWork, None]:
    """Divide the chunks of a step, of whose rows a kernel takes care; nothing is gathered.

    Arguments as of `divide_attention`.
    """
    tile = tile_tokens(num_tokens, sequences.most_rows, sizes)
    chunks = np.arange(sequences.num_decodes, len(sequences.lens))
    chunk = whole_blocks(sizes.tile_chunk, block_size)
    return _divide_tiles(chunks, sequences, num_tokens, tile, chunk, window=window), None


def divide_gathered(
    sequences: Sequences,
    *,
    num_tokens: int,
    block_size: int,
    window: Window | None = None,
    sizes: LoopSizes = CPU_SIZES,
) -> tuple[TileWork, GatheredWork]:
    """Divide the chunks of a step whose contexts are gathered, and say what is; blocks are stripes.

    Arguments as of `divide_attention`.
    """
    tile = tile_tokens(num_tokens, sequences.most_rows, sizes)
    chunks = np.arange(sequences.num_decodes, len(sequences.lens))
    tiles = _divide_tiles(chunks, sequences, num_tokens, tile, block_size, window=window)
    return tiles, gathered_of(sequences, block_size, window)


def gathered_of(
    sequences: Sequences, block_size: int, window: Window | None = None, unit: int = 1
) -> GatheredWork:
    """Return which blocks the chunks of a step see, of their contexts whole units of blocks."""
    lens, starts, num_decodes, _ = sequences
    new, size = np.diff(starts), unit * block_size
    is_chunk = (np.arange(len(lens)) >= num_decodes) & (new > 0)
    oldest = np.maximum(first_seen(lens - new, window), 0)
    first = np.where(is_chunk, oldest // size * unit, 0).astype(np.int32)
    end = np.where(is_chunk, -(-lens // size) * unit, 0).astype(np.int32)
    after = np.cumsum(end - first, dtype=np.int32)
    return GatheredWork(after - (end - first), first, after[-1:].sum(dtype=np.int32))


def check_contexts(
    block_tables: Int32[np.ndarray, "seqs blocks_per_seq"],
    seq_lens: Int32[np.ndarray, " seqs"],
    block_size: int,
) -> None:
    """Raise ValueError where a context is longer than its block table."""
    limit = block_tables.shape[1] * block_size
    if seq_lens.max(initial=0) > limit:
        raise ValueError(
            f"a context of {seq_lens.max()} tokens does not fit a block table of "
            f"{block_tables.shape[1]} blocks of {block_size} ({limit} tokens)"
        )


def divide_rows(
    rows: Rows,
    num_rows: int,
    *,
    block_size: int,
    window: Window | None = None,
    sizes: LoopSizes = CPU_SIZES,
    positions: Positions | None = None,
) -> RowWork:
    """Divide decode rows, of which a step of the bucket has `num_rows` at most.

    With `positions` jobs are of a device's own: from the first to the last that some device has.
    What a device has not of them it cuts off in the step (`neighbours.localised`).
    """
    lanes, waves, chunk = sizes.row_loop(num_rows)
    capacity = waves * lanes
    chunk = whole_blocks(chunk, block_size if positions is None else positions.block)
    end = rows.length.astype(np.int64)
    begin = np.maximum(first_seen(end - 1, window), 0)
    if positions is not None:
        begin, end = positions.count(begin, positions.ways - 1), positions.count(end, 0)
    first_chunk = begin // chunk
    chunks = -(-end // chunk) - first_chunk
    longest = int(chunks.max(initial=1))
    rounds = longest if sizes.whole_rows else _rounds_per_job(chunks, lanes, capacity)
    parts = -(-chunks // rounds)
    row = np.repeat(np.arange(len(end)), parts)
    row_first = np.cumsum(parts) - parts
    job_chunk = first_chunk[row] + (np.arange(len(row)) - row_first[row]) * rounds
    job_rounds = np.minimum(rounds, first_chunk[row] + chunks[row] - job_chunk)
    order = np.argsort(-job_rounds, kind="stable")  # so that short jobs make short waves
    place = np.empty_like(order)
    place[order] = np.arange(len(order))

    def in_waves(values: np.ndarray) -> np.ndarray:
        return _padded(values[order], capacity).reshape(-1, lanes)

    return RowWork(
        job_row=in_waves(row),
        job_seq=in_waves(rows.seq[row]),
        job_begin=in_waves(np.maximum(job_chunk * chunk, begin[row])),
        job_end=in_waves(np.minimum((job_chunk + rounds) * chunk, end[row])),
        wave_rounds=in_waves(job_rounds).max(axis=1),
        num_waves=np.asarray(-(-len(row) // lanes), np.int32),
        row_parts=_padded(place, capacity),
        row_first=_padded(row_first, num_rows),
        row_count=_padded(parts, num_rows),
        max_parts=np.asarray(parts.max(initial=0), np.int32),
    )


def _rounds_per_job(chunks: np.ndarray, lanes: int, capacity: int) -> int:
    """Return the longest job, in rounds, for which waves * rounds is least.

    Equal contexts come out as one wave of whole rows, one long context among short ones as many
    jobs. Some 16 lengths are tried; the longest context always fits, with one job a row.
    """
    longest = int(chunks.max(initial=1))
    rounds = np.unique(np.geomspace(1, longest, num=16).round().astype(np.int64))[::-1]
    num_jobs = (-(-chunks[:, None] // rounds)).sum(axis=0)
    cost = -(-num_jobs // lanes) * rounds
    return int(rounds[np.argmin(np.where(num_jobs <= capacity, cost, np.iinfo(np.int64).max))])


def _divide_tiles(
    seqs: np.ndarray,
    sequences: Sequences,
    num_tokens: int,
    tile: int,
    chunk: int,
    *,
    window: Window | None,
) -> TileWork:
    """Cut the sequences `seqs` into tiles of `tile` tokens, in a bucket of `num_tokens`.

    A round takes `chunk` tokens of context.
    """
    seq_lens, query_start_loc, *_ = sequences
    capacity = -(-num_tokens // tile) + len(seq_lens)
    first, after = (query_start_loc[at].astype(np.int64) for at in (seqs, seqs + 1))
    tiles = -(-(after - first) // tile)
    owner = np.repeat(np.arange(len(tiles)), tiles)
    nth = np.arange(len(owner)) - (np.cumsum(tiles) - tiles)[owner]
    begin = first[owner] + nth * tile
    end = np.minimum(begin + tile, after[owner])
    shift = (seq_lens[seqs] - after)[owner]
    oldest = np.maximum(first_seen(begin + shift, window), 0)
    fields = {
        "tile_seq": seqs[owner],
        "tile_start": np.minimum(begin, num_tokens - tile),
        "tile_begin": begin,
        "tile_end": end,
        "tile_shift": shift,
        "tile_chunk_begin": oldest // chunk,
        "tile_chunk_end": -(-(end + shift) // chunk),
    }
    padded = {name: _padded(values, capacity) for name, values in fields.items()}
    return TileWork(**padded, num_tiles=np.asarray(len(owner), np.int32))


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
