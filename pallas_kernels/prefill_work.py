"""Which jobs the prefill chunks of one step are cut into: on the host, for all layers. No JAX.

A tile holds query tokens of one sequence; a job is a tile and a range of its context. A job and a
KV head are one piece of work. Most tiles are one job. Where that leaves the chip idle (few tiles
after a long context), `prefill_split` cuts their contexts, and a combining kernel puts the parts of
a tile together. No JAX.

tokens    d d d d c c c c c c c c c . . .      4 decodes, chunks of 5 and 4 tokens, 3 of padding
tiles             0 0 0 0 1 2 2 2 2 3 3 3      of 4 tokens at most: none crosses a sequence
spans     tile 0: 0 0 0 | 1 1 1 | 2 2          a long context in three jobs, cut at common places
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from pallas_kernels import prefill_split
from pallas_kernels.prefill_split import SPAN
from pallas_kernels.rows import Sequences
from pallas_kernels.window import Window, first_seen

WARPGROUP_ROWS = 64  # rows of one matrix instruction
COMPUTE_WARPGROUPS = 2
MOST_HEADS = 32  # query heads of a KV head: Mosaic finds no layout for copies of single rows


class PrefillConfig(NamedTuple):
    """How the prefill kernel uses the chip; the result is the same, but for rounding."""

    kv_tile: int | None = None  # context tokens of a round: 64, 128; None: as many as fit
    stages: int = 2  # rounds whose keys and values are in shared memory at a time
    num_blocks: int = 132  # thread blocks: one for each multiprocessor
    ping_pong: bool = True  # one warpgroup multiplies while the other exponentiates
    overlap: bool = False  # a warpgroup's next product begins before its softmax
    # Cut every context at multiples of so many spans of 128 tokens, whatever else is in the step,
    # so that a token's bits depend on its own context alone; 0: nowhere; None: where it pays.
    fixed_rounds: int | None = None


DEFAULT_CONFIG = PrefillConfig()


class Job(NamedTuple):
    """The columns of `PrefillWork.jobs`: a tile, and a range of its context."""

    seq: Any  # the sequence that the tile belongs to
    begin: Any  # its first token: an index into q
    end: Any  # one past its last token
    position: Any  # of the first token; of padding: below the context
    first: Any  # the spans of the context that the job attends to
    last: Any  # one past
    part: Any  # where its part of the result goes; -1: it has all of it


class Split(NamedTuple):
    """The columns of `PrefillWork.splits`: a tile of several jobs, whose parts are consecutive."""

    begin: Any
    end: Any
    first_part: Any
    parts: Any  # 0: there is no such tile


class PrefillWork(NamedTuple):
    """The prefill work of a step: int32 NumPy arrays from `divide_prefill`, JAX arrays in it.

    Shapes depend on the bucket only; rows beyond the real ones are zeros. The longest jobs come
    first, so that the last to finish are short.
    """

    jobs: Int32[Any, "jobs 7"]  # columns: `Job`
    splits: Int32[Any, "splits 4"]  # columns: `Split`; 2 * splits parts are the most there can be
    counts: Int32[Any, " 2"]  # jobs that are real; tokens of the bucket


def tokens_per_warpgroup(q_per_kv: int) -> int:
    """Return how many query tokens fit one matrix instruction, with `q_per_kv` heads each."""
    if not 1 <= q_per_kv <= MOST_HEADS:
        raise ValueError(f"{q_per_kv} query heads to a KV head: 1 to {MOST_HEADS} are supported")
    return WARPGROUP_ROWS // q_per_kv


def divide_prefill(
    sequences: Sequences,
    *,
    num_tokens: int,
    heads: tuple[int, int],
    window: Window | None = None,
    max_context: int | None = None,
    config: PrefillConfig = DEFAULT_CONFIG,
) -> PrefillWork:
    """Cut the chunks after the first `num_decodes` sequences, and the padding, into jobs.

    `num_tokens` is the bucket's; `heads` (of queries, of keys and values) are those of a device.
    The padding is a chunk that ends at position 0, so that it sees nothing and becomes zeros. Work
    for a wider window, or none, is right for layers with a narrower one, too. `max_context`, in
    tokens, bounds the parts where `config.fixed_rounds` cuts contexts; ValueError without it.
    """
    (seq_lens, query_start_loc, num_decodes, _), kv_heads = sequences, heads[1]
    tile = COMPUTE_WARPGROUPS * tokens_per_warpgroup(heads[0] // kv_heads)
    seq = np.append(np.arange(num_decodes, len(seq_lens)), 0)
    starts = np.append(query_start_loc[num_decodes:], num_tokens).astype(np.int64)
    positions = np.append(seq_lens[num_decodes:], 0) - np.diff(starts)
    tiles = -(-np.diff(starts) // tile)
    chunk = np.repeat(np.arange(len(tiles)), tiles)
    nth = np.arange(len(chunk)) - (np.cumsum(tiles) - tiles)[chunk]
    begin = starts[chunk] + nth * tile
    end = np.minimum(begin + tile, starts[chunk + 1])
    position = positions[chunk] + nth * tile
    oldest = np.maximum(first_seen(position, window), 0)
    last = -(-np.maximum(position + end - begin, 0) // SPAN)
    first = np.minimum(oldest // SPAN, last)

    capacity = num_tokens // tile + len(seq_lens) + 1
    if config.fixed_rounds is None:
        most = prefill_split.most_parts(num_tokens // tile, kv_heads, config.num_blocks)
        size = prefill_split.choose_size(first, last, kv_heads, most, config.num_blocks)
    else:
        size = config.fixed_rounds or None
        most = _fixed_parts(capacity, max_context, config.fixed_rounds)
    cut = prefill_split.cut(first, last, size)
    table = [x[cut.tile] for x in (seq[chunk], begin, end, position)]
    jobs = np.stack([*table, cut.first, cut.last, cut.part], axis=1)
    order = np.lexsort((cut.first, cut.first - cut.last))
    split = cut.parts > 1
    tables = begin[split], end[split], cut.first_part[split], cut.parts[split]
    return PrefillWork(
        jobs=_padded(jobs[order], capacity + most),
        splits=_padded(np.stack(tables, axis=1), -(-most // 2)),
        counts=np.array([len(jobs), num_tokens], np.int32),
    )


def _fixed_parts(capacity: int, max_context: int | None, size: int) -> int:
    """Return how many parts there can be where all contexts are cut at multiples of `size`."""
    if not size:
        return 0
    if max_context is None:
        raise ValueError("fixed_rounds needs max_context: it decides how many parts there can be")
    parts = -(-max_context // (SPAN * size))
    return capacity * parts if parts > 1 else 0


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros((size, values.shape[1]), np.int32)
    out[: len(values)] = values
    return out
