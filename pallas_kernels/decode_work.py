"""Who computes what in the decode rows of one step: divided on the host, for all layers. No JAX.

The contexts of all decode rows, cut into rounds of `kv_tile` tokens and laid end to end, are given
to the workers in equal, contiguous shares. A worker's share of one row is a job; where a row has
several, their results are put together afterwards.

    row      0 0 0 0 0 0 0 1 2 2 2 2          12 rounds
    worker   0 0 0 0 1 1 1 1 2 2 2 2          3 workers
    job      0 0 0 0 1 1 1 2 3 3 3 3          row 0 has two jobs

So every worker streams the same number of bytes, whatever the mix of lengths, and all of them run
at once: there is no second wave (the idea of Stream-K, Osama et al., arXiv 2301.03598).

Where a row is cut then depends on the others, and the order of its sums with it. With
`fixed_rounds` it depends on the row alone, and workers take whole jobs: a row gets the same bits in
every step (batch invariance), for shares that are less equal.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from pallas_kernels.rows import Rows
from pallas_kernels.window import Window, first_seen


class DecodeConfig(NamedTuple):
    """How the decode kernel uses the chip. Every choice gives the same result, but for rounding."""

    kv_tile: int = 64  # context tokens of a round: a multiple of 64; jobs begin at multiples of it
    num_blocks: int = 264  # thread blocks: two on each of the 132 multiprocessors of an H100, H200
    shared_memory_bytes: int = 113 * 1024  # of a thread block, so that two fit; a ring fills it
    fixed_rounds: int | None = None  # rounds of a job, whatever the other rows; None: equal shares


# Jobs whose results `decode_combine` has under way at once: more of a row cost it another turn,
# about as long as a worker takes for LEAST_ROUNDS rounds. So few rows are not cut finer than that.
JOBS_AT_ONCE = 32
LEAST_ROUNDS = 4
# Jobs of a row with fixed rounds, times KV heads: half of what fills the chip if it is alone, in
# 16 MB of results for 64 rows of 8 heads. Rows that are longer have longer jobs.
MOST_FIXED_JOBS = 64

# Heads that a thread block takes of latents (MLA): up to so many on the short side of the matrix
# instructions (`decode_kernel`), for which registers have room, or else on the long side
# (`latent_decode`).
FEW_HEADS = 16
MANY_HEADS = 64

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
    # the first of them that it sees, with a window; None: as the layer's window says
    row_low: Int32[Any, " rows"] | None = None


def groups_of(heads: int) -> int:
    """Return the groups of heads that thread blocks take of latents, as of a KV head each.

    As few as may be: each reads all latents.
    """
    most = min(heads, MANY_HEADS)
    return heads // next(size for size in range(most, 0, -1) if heads % size == 0)


def num_workers(num_blocks: int, kv_heads: int) -> int:
    """Return how many shares the rounds are cut into: each is worked on once for every KV head."""
    return max(1, num_blocks // kv_heads)


def most_jobs(config: DecodeConfig, kv_heads: int) -> int:
    """Return how many jobs one row can have."""
    if config.fixed_rounds is None:
        return num_workers(config.num_blocks, kv_heads)
    return max(1, MOST_FIXED_JOBS // kv_heads)


def divide_decode(
    rows: Rows,
    num_rows: int,
    *,
    kv_heads: int,
    window: Window | None = None,
    config: DecodeConfig = DEFAULT_CONFIG,
) -> DecodeWork:
    """Divide decode rows, of which a step of this bucket has `num_rows` at most.

    `kv_heads` are those of one device. Rounds before the window are left out. Work for a wider
    window, or none, is right for layers with a narrower one, too, only not balanced for them, but
    where rows say themselves what they see (`Rows.low`).
    """
    workers = num_workers(config.num_blocks, kv_heads)
    ends = np.asarray(rows.length, np.int64)
    begins = rows.low
    if begins is None:
        begins = np.maximum(first_seen(ends - 1, window), 0)
    first_round = begins // config.kv_tile
    rounds = -(-ends // config.kv_tile) - first_round
    starts = np.cumsum(rounds) - rounds  # where each row begins in the line of all rounds
    if config.fixed_rounds is None:
        cuts, worker_first = _equal_shares(rounds, starts, workers)
        capacity = num_rows + workers
    else:
        most = most_jobs(config, kv_heads)
        sizes = np.maximum(config.fixed_rounds, -(-rounds // most))
        cuts, worker_first = _whole_jobs(rounds, starts, sizes, workers)
        capacity = num_rows * most
    row = np.searchsorted(starts, cuts[:-1], side="right") - 1
    offset = first_round[row] - starts[row]
    row_first = np.searchsorted(cuts, starts)
    row_jobs = np.searchsorted(cuts, starts + rounds) - row_first
    return DecodeWork(
        worker_first=worker_first.astype(np.int32),
        job_row=_padded(row, capacity),
        job_begin=_padded(cuts[:-1] + offset, capacity),
        job_end=_padded(cuts[1:] + offset, capacity),
        row_first=_padded(row_first, num_rows),
        row_jobs=_padded(row_jobs, num_rows),
        row_seq=_padded(rows.seq, num_rows),
        row_length=_padded(rows.length, num_rows),
        row_low=None if rows.low is None else _padded(rows.low, num_rows),
    )


def _equal_shares(
    rounds: np.ndarray, starts: np.ndarray, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the line of all rounds where rows begin and where equal shares do.

    Returns the cuts, between which jobs lie, and the first job of each worker and the job count.
    """
    total = rounds.sum()
    least = min(LEAST_ROUNDS, -(-rounds.max(initial=1) // JOBS_AT_ONCE))
    shares = max(1, min(workers, total // least))
    bounds = np.minimum(np.arange(workers + 1), shares) * total // shares
    cuts = np.union1d(starts, bounds)
    return cuts, np.searchsorted(cuts, bounds)


def _whole_jobs(
    rounds: np.ndarray, starts: np.ndarray, sizes: np.ndarray, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut each row into jobs of its size, and give whole jobs to workers, in order, about equally.

    Returns the same as `_equal_shares`.
    """
    jobs = -(-rounds // sizes)
    row = np.repeat(np.arange(len(rounds)), jobs)
    nth = np.arange(len(row)) - (np.cumsum(jobs) - jobs)[row]
    total, nths = rounds.sum(), np.arange(workers + 1)
    cuts = np.append(starts[row] + nth * sizes[row], total)
    if len(row) <= workers:
        return cuts, np.minimum(nths, len(row))
    middles = cuts[:-1] + cuts[1:]  # twice: a job is its worker's in whose share its middle lies
    return cuts, np.searchsorted(middles, 2 * nths * total // workers)


def busy_share(work: DecodeWork) -> float:
    """Return the mean share of workers over the largest: how busy they are, at most; 0 to 1."""
    count = work.worker_first[-1]
    ends = np.cumsum(np.append(0, (work.job_end - work.job_begin)[:count]), dtype=np.int64)
    shares = np.diff(ends[work.worker_first])
    return float(shares.mean() / shares.max()) if count else 0.0


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
