"""Where the contexts of prefill tiles are cut, so that few tiles fill the chip. NumPy, no JAX.

A chunk of 512 tokens after 32,000 is 32 tiles on 132 multiprocessors: with their contexts in four
parts each, they are 128 jobs. The parts of all tiles begin at the same places of the context, so
that thread blocks that run at the same time read the same keys, and all but one of them from the
cache: with shares of exactly equal size (Stream-K) each would read others, more than the memory
gives. What is minimised is the time of the thread block that is busy longest, in rounds of one span
(Flash-Decoding, Dao et al., 2023, has the splits; FlashInfer, Ye et al., arXiv 2501.01005, chooses
their size on the host).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

SPAN = 128  # context tokens: jobs begin and end at multiples, and so does some round of each size
WAVES = 3  # parts of all KV heads together are at most so many for each thread block
BUSY_ENOUGH = 0.9  # tiles that fill so much of the chip's time are left whole
LEAST_SPANS = 4  # of a part
# In rounds of a span, estimated: 1.4 us at 60% of an H100's matrix units.
JOB_COST = 1.0  # the first keys' way, and the queries'
PART_COST = 2.0  # 64 KB that are written, and read again
COMBINE_COST = 3.0  # the other kernel's first bytes and last


class Cut(NamedTuple):
    """Tiles cut into jobs: arrays over jobs, then over tiles."""

    tile: Int[np.ndarray, " jobs"]
    first: Int[np.ndarray, " jobs"]  # spans
    last: Int[np.ndarray, " jobs"]
    part: Int[np.ndarray, " jobs"]  # -1: the only job of its tile
    parts: Int[np.ndarray, " tiles"]  # jobs of a tile
    first_part: Int[np.ndarray, " tiles"]  # where there are several


def most_parts(tiles: int, kv_heads: int, num_blocks: int) -> int:
    """Return how many parts of results, of each KV head, the steps of a bucket may have.

    One for every thread block, and up to `WAVES` where the `tiles` that the bucket's tokens fill
    leave a remainder. A part takes 128 * (head_dim + 1) * 4 bytes: at head_dim 128 no more than
    26 MB for 132 thread blocks, whatever the number of KV heads.
    """
    return min(WAVES * num_blocks, num_blocks + 4 * tiles * kv_heads) // kv_heads


def choose_size(
    first: Int[np.ndarray, " tiles"],
    last: Int[np.ndarray, " tiles"],
    kv_heads: int,
    most: int,
    num_blocks: int,
) -> int | None:
    """Return at which multiples of spans contexts are cut; None: nowhere.

    Tiles see the spans first..last; of each KV head there may be `most` parts.
    """
    spans = last - first
    total, longest = int(spans.sum()) * kv_heads, int(spans.max(initial=0))
    if longest < 2 * LEAST_SPANS:
        return None
    if total >= BUSY_ENOUGH * num_blocks * _longest(spans, kv_heads, num_blocks):
        return None
    best, least = None, _cost(cut(first, last, None), kv_heads, num_blocks)
    sizes = set()
    for waves in range(1, WAVES + 1):
        parts = longest * waves * num_blocks // total
        sizes |= {-(-longest // n) for n in (parts, parts + 1) if n > 1}
    for size in sorted(sizes, reverse=True):
        if size < LEAST_SPANS:
            break
        candidate = cut(first, last, size)
        if candidate.parts[candidate.parts > 1].sum() > most:
            continue
        if (cost := _cost(candidate, kv_heads, num_blocks)) < least:
            best, least = size, cost
    return best


def cut(first: Int[np.ndarray, " tiles"], last: Int[np.ndarray, " tiles"], size: int | None) -> Cut:
    """Cut the spans first..last of every tile at multiples of `size`; None: nowhere."""
    size = size or int(last.max(initial=0)) + 1
    begin = first // size
    parts = np.maximum(-(-last // size) - begin, 1)
    tile = np.repeat(np.arange(len(parts)), parts)
    nth = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    place = (begin[tile] + nth) * size
    kept = np.where(parts > 1, parts, 0)
    first_part = np.cumsum(kept) - kept
    return Cut(
        tile=tile,
        first=np.maximum(place, first[tile]),
        last=np.minimum(place + size, last[tile]),
        part=np.where(parts[tile] > 1, first_part[tile] + nth, -1),
        parts=parts,
        first_part=first_part,
    )


def busy(spans: Int[np.ndarray, " jobs"], kv_heads: int, num_blocks: int) -> float:
    """Return which part of the thread blocks' time is work, at most, given the jobs' lengths.

    Rounds alone count: what a job costs beside them is not in it.
    """
    longest = _longest(spans, kv_heads, num_blocks)
    return float(spans.sum()) * kv_heads / (num_blocks * longest) if longest else 1.0


def _cost(jobs: Cut, kv_heads: int, num_blocks: int) -> float:
    """Return the predicted time of a step's jobs, in rounds of a span."""
    is_part = jobs.part >= 0
    costs = (jobs.last - jobs.first) + JOB_COST + PART_COST * is_part
    return _longest(costs, kv_heads, num_blocks) + COMBINE_COST * bool(is_part.any())


def _longest(costs: np.ndarray, kv_heads: int, num_blocks: int) -> float:
    """Return the time of the thread block that is busy longest.

    Pieces of work go to the blocks forth, then back, longest first, as the kernel takes them.
    """
    pieces = np.repeat(np.sort(costs)[::-1], kv_heads)
    turns = np.zeros((-(-len(pieces) // num_blocks), num_blocks), costs.dtype)
    turns.flat[: len(pieces)] = pieces
    turns[1::2] = turns[1::2, ::-1]
    return float(turns.sum(axis=0).max(initial=0))
