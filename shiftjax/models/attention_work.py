"""Who computes what in one step of attention: divided on the host, once, for all layers. No JAX.

decode    rows are cut into jobs; `lanes` jobs advance together, a chunk a round; a wave is over
          when its longest job is, then the next `lanes` jobs begin

              lane 0 | row 0: chunks 0 1 2 |        a row of 3 chunks, whole
              lane 1 | row 1: chunks 0 1 2 |        the first half of a row of 6, and
              lane 2 | row 1: chunks 3 4 5 |        its second: combined at the end

prefill   chunks of prompts are cut into tiles of query tokens; tiles are computed one after the
          other, each against the context chunks that it can see
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

MAX_LANES = 32
CHUNK_TOKENS = 64  # context tokens of a decode round, per lane
TILE_TOKENS = 64  # query tokens of a prefill tile
TILE_CHUNK_TOKENS = 128  # context tokens of a prefill round


class AttentionWork(NamedTuple):
    """The work of one step: NumPy arrays from `divide_attention`, JAX arrays inside the step.

    Shapes depend on the bucket only. `waves * lanes` bounds the jobs and `tiles` the tiles of any
    step of the bucket; what is beyond the real ones is zeros: a job from 0 to 0 adds nothing.
    """

    job_row: Int32[Any, "waves lanes"]  # the decode row (sequence, and token) that a job belongs to
    job_begin: Int32[Any, "waves lanes"]  # first context position of the job
    job_end: Int32[Any, "waves lanes"]  # one past its last
    wave_rounds: Int32[Any, " waves"]  # rounds until the longest job of the wave is done
    num_waves: Int32[Any, ""]  # waves that have jobs: the trip count of a decode
    row_parts: Int32[Any, " jobs"]  # flat places of jobs in (waves, lanes), grouped by row
    row_first: Int32[Any, " seqs"]  # where in `row_parts` a row begins
    row_count: Int32[Any, " seqs"]  # how many parts it has: 0 for what is not a decode row
    max_parts: Int32[Any, ""]  # the largest of these: the trip count of combining
    tile_seq: Int32[Any, " tiles"]  # the sequence that a tile belongs to
    tile_start: Int32[Any, " tiles"]  # first token read: early enough that a whole tile exists
    tile_begin: Int32[Any, " tiles"]  # first token that the tile owns, hence writes
    tile_end: Int32[Any, " tiles"]  # one past the last that it owns
    tile_shift: Int32[Any, " tiles"]  # position in the sequence = token index + shift
    tile_chunk_begin: Int32[Any, " tiles"]  # first context chunk that the tile sees
    tile_chunk_end: Int32[Any, " tiles"]  # one past the last
    num_tiles: Int32[Any, ""]  # the trip count of prefill


def num_lanes(num_seqs: int) -> int:
    """Decode jobs that advance together in a bucket of `num_seqs` sequences."""
    return min(num_seqs, MAX_LANES)


def tile_tokens(num_tokens: int) -> int:
    """Query tokens of a prefill tile in a bucket of `num_tokens`."""
    return min(num_tokens, TILE_TOKENS)


def whole_blocks(tokens: int, block_size: int) -> int:
    """About `tokens` context tokens as whole blocks, at least one."""
    return block_size * max(1, tokens // block_size)


def divide_attention(
    block_tables: Int32[np.ndarray, "seqs blocks_per_seq"],
    seq_lens: Int32[np.ndarray, " seqs"],
    query_start_loc: Int32[np.ndarray, " seqs_plus_1"],
    num_decodes: int,
    *,
    num_tokens: int,
    block_size: int,
    sliding_window: int | None = None,
) -> AttentionWork:
    """Divide one step, given its padded arrays; `num_tokens` is the bucket's.

    The first `num_decodes` sequences have one token each, in token order. Raises ValueError where a
    context is longer than its block table, which the device would read past without a word.
    """
    check_contexts(block_tables, seq_lens, block_size)
    decode = _divide_decode(seq_lens, num_decodes, block_size, sliding_window)
    starts = query_start_loc[num_decodes:].astype(np.int64)
    ends = seq_lens[num_decodes:].astype(np.int64)
    prefill = _divide_prefill(starts, ends, len(seq_lens), num_tokens, block_size, sliding_window)
    return AttentionWork(**decode, **prefill)


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


def _divide_decode(
    seq_lens: np.ndarray, num_decodes: int, block_size: int, window: int | None
) -> dict[str, np.ndarray]:
    num_seqs, lanes = len(seq_lens), num_lanes(len(seq_lens))
    capacity = -(-(num_seqs + lanes) // lanes) * lanes
    chunk = whole_blocks(CHUNK_TOKENS, block_size)
    end = seq_lens[:num_decodes].astype(np.int64)
    begin = np.maximum(end - (window or end), 0)
    first_chunk = begin // chunk
    chunks = -(-end // chunk) - first_chunk
    rounds = _rounds_per_job(chunks, lanes, capacity)
    parts = -(-chunks // rounds)
    row = np.repeat(np.arange(num_decodes), parts)
    row_first = np.cumsum(parts) - parts
    job_chunk = first_chunk[row] + (np.arange(len(row)) - row_first[row]) * rounds
    job_rounds = np.minimum(rounds, first_chunk[row] + chunks[row] - job_chunk)
    order = np.argsort(-job_rounds, kind="stable")  # so that short jobs make short waves
    place = np.empty_like(order)
    place[order] = np.arange(len(order))

    def in_waves(values: np.ndarray) -> np.ndarray:
        return _padded(values[order], capacity).reshape(-1, lanes)

    return {
        "job_row": in_waves(row),
        "job_begin": in_waves(np.maximum(job_chunk * chunk, begin[row])),
        "job_end": in_waves(np.minimum((job_chunk + rounds) * chunk, end[row])),
        "wave_rounds": in_waves(job_rounds).max(axis=1),
        "num_waves": np.asarray(-(-len(row) // lanes), np.int32),
        "row_parts": _padded(place, capacity),
        "row_first": _padded(row_first, num_seqs),
        "row_count": _padded(parts, num_seqs),
        "max_parts": np.asarray(parts.max(initial=0), np.int32),
    }


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


def _divide_prefill(
    starts: np.ndarray,
    context_ends: np.ndarray,
    num_seqs: int,
    num_tokens: int,
    block_size: int,
    window: int | None,
) -> dict[str, np.ndarray]:
    """Cut the chunks of the sequences after the decodes into tiles.

    `starts` are their first tokens and one more, `context_ends` their lengths.
    """
    tile, chunk = tile_tokens(num_tokens), whole_blocks(TILE_CHUNK_TOKENS, block_size)
    capacity = -(-num_tokens // tile) + num_seqs
    tiles = -(-np.diff(starts) // tile)
    seq = np.repeat(np.arange(len(tiles)), tiles)
    nth = np.arange(len(seq)) - (np.cumsum(tiles) - tiles)[seq]
    begin = starts[seq] + nth * tile
    end = np.minimum(begin + tile, starts[seq + 1])
    shift = context_ends[seq] - starts[seq + 1]
    oldest = np.maximum(begin + shift - window + 1, 0) if window else np.zeros_like(begin)
    fields = {
        "tile_seq": seq + (num_seqs - len(tiles)),
        "tile_start": np.minimum(begin, num_tokens - tile),
        "tile_begin": begin,
        "tile_end": end,
        "tile_shift": shift,
        "tile_chunk_begin": oldest // chunk,
        "tile_chunk_end": -(-(end + shift) // chunk),
    }
    padded = {name: _padded(values, capacity) for name, values in fields.items()}
    return padded | {"num_tiles": np.asarray(len(seq), np.int32)}


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
