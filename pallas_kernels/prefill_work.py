"""Which tiles the prefill chunks of one step are cut into: on the host, for all layers.

A tile holds query tokens of one sequence; a tile and a KV head are one piece of work. What a tile
sees of the context follows from positions, inside the kernel. No JAX.

tokens    d d d d c c c c c c c c c . . .      4 decodes, chunks of 5 and 4 tokens, 3 of padding
tiles             0 0 0 0 1 2 2 2 2 3 3 3      of 4 tokens at most: none crosses a sequence
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

WARPGROUP_ROWS = 64  # rows of one matrix instruction
COMPUTE_WARPGROUPS = 2
MOST_HEADS = 32  # query heads of a KV head: Mosaic finds no layout for copies of single rows


class PrefillConfig(NamedTuple):
    """How the prefill kernel uses the chip; the result is the same, but for rounding."""

    kv_tile: int | None = None  # context tokens of a round: 64, 128; None: 128 if that fits
    stages: int = 2  # rounds whose keys and values are in shared memory at a time
    num_blocks: int = 132  # thread blocks: one for each multiprocessor
    ping_pong: bool = True  # one warpgroup multiplies while the other exponentiates


DEFAULT_CONFIG = PrefillConfig()


class PrefillWork(NamedTuple):
    """The prefill work of a step: int32 NumPy arrays from `divide_prefill`, JAX arrays in it.

    Shapes depend on the bucket only; tiles beyond the real ones are zeros. Those that see most of
    the context come first, so that the last to finish are short.
    """

    tile_seq: Int32[Any, " tiles"]  # the sequence that a tile belongs to
    tile_begin: Int32[Any, " tiles"]  # its first token: an index into q
    tile_end: Int32[Any, " tiles"]  # one past its last token
    tile_position: Int32[Any, " tiles"]  # position of the first token; padding: below the context
    num_tiles: Int32[Any, " 1"]  # so many tiles are real


def tokens_per_warpgroup(q_per_kv: int) -> int:
    """Return how many query tokens fit one matrix instruction, with `q_per_kv` heads each."""
    if not 1 <= q_per_kv <= MOST_HEADS:
        raise ValueError(f"{q_per_kv} query heads to a KV head: 1 to {MOST_HEADS} are supported")
    return WARPGROUP_ROWS // q_per_kv


def divide_prefill(
    seq_lens: Int32[np.ndarray, " seqs"],
    query_start_loc: Int32[np.ndarray, " seqs_plus_1"],
    num_decodes: int,
    *,
    num_tokens: int,
    q_per_kv: int,
) -> PrefillWork:
    """Cut the chunks after the first `num_decodes` sequences, and the padding, into tiles.

    `num_tokens` is the bucket's; `q_per_kv` query heads share a KV head. The padding is a chunk
    that ends at position 0, so that it sees nothing and becomes zeros.
    """
    tile = COMPUTE_WARPGROUPS * tokens_per_warpgroup(q_per_kv)
    seq = np.append(np.arange(num_decodes, len(seq_lens)), 0)
    starts = np.append(query_start_loc[num_decodes:], num_tokens).astype(np.int64)
    positions = np.append(seq_lens[num_decodes:], 0) - np.diff(starts)
    tiles = -(-np.diff(starts) // tile)
    chunk = np.repeat(np.arange(len(tiles)), tiles)
    nth = np.arange(len(chunk)) - (np.cumsum(tiles) - tiles)[chunk]
    begin = starts[chunk] + nth * tile
    position = positions[chunk] + nth * tile
    order = np.argsort(-position, kind="stable")
    capacity = num_tokens // tile + len(seq_lens) + 1
    end = np.minimum(begin + tile, starts[chunk + 1])
    fields = (_padded(x[order], capacity) for x in (seq[chunk], begin, end, position))
    return PrefillWork(*fields, num_tiles=np.array([len(chunk)], np.int32))


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
