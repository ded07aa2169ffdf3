"""Who computes what in the decode rows of one step: divided on the host, for all layers. No JAX.

The contexts of all decode rows, cut into rounds of `kv_tile` tokens and laid end to end, are given
to the workers in equal, contiguous shares. A worker's share of one row is a job; where a row has
several, their results are put together afterwards.

    row      0 0 0 0 0 0 0 1 2 2 2 2          12 rounds
    worker   0 0 0 0 1 1 1 1 2 2 2 2          3 workers
    job      0 0 0 0 1 1 1 2 3 3 3 3          row 0 has two jobs

So every worker streams the same number of bytes, whatever the mix of lengths, and all of them run
at once: there is no second wave (the idea of Stream-K, Osama et al., arXiv 2301.03598).
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from pallas_kernels.rows import Rows


class DecodeConfig(NamedTuple):
    """How the decode kernel uses the chip. Every choice gives the same result, but for rounding."""

    kv_tile: int = 64  # context tokens of a round: a multiple of 64; jobs begin at multiples of it
    num_blocks: int = 264  # thread blocks: two on each of the 132 multiprocessors of an H100, H200
    shared_memory_bytes: int = 113 * 1024  # of a thread block, so that two fit; a ring fills it


DEFAULT_CONFIG = DecodeConfig()


class DecodeWork(NamedTuple):
    """The decode work of a step: int32 NumPy arrays from `divide_decode`, JAX arrays in it.

    Shapes depend on the bucket only. The jobs of a worker are consecutive, and so are those of a
    row. What is beyond the real jobs is zeros and belongs to nobody.
    """

    worker_first: Int32[Any, " workers_plus_1"]  # the first job of each worker, and the job count
    job_row: Int32[Any, " jobs"]  # the decode row (its query) that a job belongs to
    job_begin: Int32[Any, " jobs"]  # its first round; round r is positions from r * kv_tile
    job_end: Int32[Any, " jobs"]  # one past its last round
    row_first: Int32[Any, " rows"]  # the first job of a row
    row_jobs: Int32[Any, " rows"]  # how many it has: 0 for what is not a decode row
    row_seq: Int32[Any, " rows"]  # the sequence whose block table a row reads
    row_length: Int32[Any, " rows"]  # the context tokens that it sees


def num_workers(num_blocks: int, kv_heads: int) -> int:
    """Return how many shares the rounds are cut into: each is worked on once for every KV head."""
    return max(1, num_blocks // kv_heads)


def divide_decode(
    rows: Rows,
    num_rows: int,
    *,
    kv_heads: int,
    sliding_window: int | None = None,
    config: DecodeConfig = DEFAULT_CONFIG,
) -> DecodeWork:
    """Divide decode rows, of which a step of this bucket has `num_rows` at most.

    `kv_heads` are those of one device. Rounds before the window are left out. Work for a wider
    window, or none, is right for layers with a narrower one, too, only not balanced for them.
    """
    workers = num_workers(config.num_blocks, kv_heads)
    ends = np.asarray(rows.length, np.int64)
    begins = np.maximum(ends - sliding_window, 0) if sliding_window else np.zeros_like(ends)
    first_round = begins // config.kv_tile
    rounds = -(-ends // config.kv_tile) - first_round
    starts = np.cumsum(rounds) - rounds  # where each row begins in the line of all rounds
    shares = np.arange(workers + 1) * rounds.sum() // workers
    cuts = np.union1d(starts, shares)  # jobs lie between neighbouring cuts
    row = np.searchsorted(starts, cuts[:-1], side="right") - 1
    offset = first_round[row] - starts[row]
    row_first = np.searchsorted(cuts, starts)
    row_jobs = np.searchsorted(cuts, starts + rounds) - row_first
    return DecodeWork(
        worker_first=np.searchsorted(cuts, shares).astype(np.int32),
        job_row=_padded(row, num_rows + workers),
        job_begin=_padded(cuts[:-1] + offset, num_rows + workers),
        job_end=_padded(cuts[1:] + offset, num_rows + workers),
        row_first=_padded(row_first, num_rows),
        row_jobs=_padded(row_jobs, num_rows),
        row_seq=_padded(rows.seq, num_rows),
        row_length=_padded(rows.length, num_rows),
    )


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
