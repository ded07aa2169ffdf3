"""The work of decode rows: every round once, equal shares, in the order that kernels count on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.decode_work import (
    DecodeConfig,
    DecodeWork,
    busy_share,
    divide_decode,
    most_jobs,
    num_workers,
)
from pallas_kernels.rows import Rows, rows_of
from pallas_kernels.window import Chunk

TILE = 64
LENGTHS = st.lists(st.integers(1, 700), max_size=9)
FIXED = st.sampled_from([None, 1, 3])
WINDOWS = st.sampled_from([None, 1, 64, 100, Chunk(64), Chunk(100)])


def make(
    lengths, padding=0, num_blocks=6, kv_heads=1, window=None, fixed_rounds=None
) -> DecodeWork:
    rows = Rows(np.arange(len(lengths), dtype=np.int32), np.array(lengths, np.int32))
    config = DecodeConfig(TILE, num_blocks, fixed_rounds=fixed_rounds)
    options = dict(kv_heads=kv_heads, window=window, config=config)
    return divide_decode(rows, len(lengths) + padding, **options)


def jobs_of(work: DecodeWork) -> list[tuple[int, int, int]]:
    count = work.worker_first[-1]
    return list(zip(*(x[:count].tolist() for x in work[1:4]), strict=True))


def test_rows_are_the_tokens_of_the_first_sequences():
    lens, starts = np.array([5, 9, 4, 0], np.int32), np.array([0, 1, 4, 5, 5], np.int32)
    rows = rows_of(lens, starts, 2)
    assert (rows.seq.tolist(), rows.length.tolist()) == ([0, 1, 1, 1], [5, 7, 8, 9])
    assert len(rows_of(lens, starts, 0).seq) == 0


@given(LENGTHS, st.integers(0, 3), st.integers(1, 12), WINDOWS, FIXED)
def test_every_round_is_worked_on_once(lengths, padding, num_blocks, window, fixed):
    work = make(lengths, padding, num_blocks, window=window, fixed_rounds=fixed)
    done = [(row, nth) for row, begin, end in jobs_of(work) for nth in range(begin, end)]
    if isinstance(window, Chunk):
        starts = [(n - 1) // window.tokens * window.tokens // TILE for n in lengths]
    else:
        starts = [max(0, n - (window or n)) // TILE for n in lengths]
    wanted = [
        (row, nth) for row, n in enumerate(lengths) for nth in range(starts[row], -(-n // TILE))
    ]
    assert done == wanted  # in the order of rows, too


@given(LENGTHS, st.integers(1, 12))
def test_shares_are_equal(lengths, num_blocks):
    work = make(lengths, num_blocks=num_blocks)
    sizes = np.array([end - begin for _, begin, end in jobs_of(work)], int)
    ends = np.concatenate([[0], np.cumsum(sizes)])[work.worker_first]
    assert np.ptp(np.diff(ends)) <= 1
    assert ends[0] == 0 and ends[-1] == sizes.sum()
    assert (sizes > 0).all()


@given(LENGTHS, st.integers(0, 3), st.integers(1, 12), FIXED)
def test_the_jobs_of_a_row_follow_each_other(lengths, padding, num_blocks, fixed):
    work = make(lengths, padding, num_blocks, fixed_rounds=fixed)
    rows = [row for row, _, _ in jobs_of(work)]
    for row in range(len(lengths) + padding):
        first, count = work.row_first[row], work.row_jobs[row]
        assert count == rows.count(row)
        assert rows[first : first + count] == [row] * count


@given(LENGTHS, st.integers(0, 3), st.integers(1, 12), FIXED)
def test_shapes_follow_from_the_bucket(lengths, padding, num_blocks, fixed):
    work = make(lengths, padding, num_blocks, fixed_rounds=fixed)
    empty = make([], len(lengths) + padding, num_blocks, fixed_rounds=fixed)
    work, empty = ([x for x in each if x is not None] for each in (work, empty))
    assert [x.shape for x in work] == [x.shape for x in empty]
    assert all(x.dtype == np.int32 for x in (*work, *empty))
    assert not any(x.any() for x in empty)


@pytest.mark.parametrize(("kv_heads", "workers"), [(1, 264), (2, 132), (8, 33), (5, 52), (300, 1)])
def test_workers_and_heads_fill_the_chip(kv_heads, workers):
    assert num_workers(264, kv_heads) == workers


def test_one_long_row_is_worked_on_by_all():
    work = make([TILE * 60], num_blocks=6)
    assert jobs_of(work) == [(0, 10 * i, 10 * i + 10) for i in range(6)]
    assert work.row_jobs[0] == 6


@pytest.mark.parametrize(("rounds", "jobs"), [(20, 20), (64, 32), (266, 66), (2048, 264)])
def test_a_row_alone_is_not_cut_finer_than_pays(rounds, jobs):
    """One round for a job that is combined at once with all others, at least four beyond that."""
    work = make([TILE * rounds], num_blocks=264)
    assert work.row_jobs[0] == jobs
    sizes = [end - begin for _, begin, end in jobs_of(work)]
    assert max(sizes) - min(sizes) <= 1


# ------------------------------------------------------------------------- fixed rounds


def cuts_of(work: DecodeWork, row: int) -> list[tuple[int, int]]:
    return [(begin, end) for of, begin, end in jobs_of(work) if of == row]


@given(st.lists(st.integers(1, 9000), min_size=2, max_size=9), st.integers(1, 12))
def test_where_a_row_is_cut_depends_on_itself_alone(lengths, num_blocks):
    together = make(lengths, num_blocks=num_blocks, fixed_rounds=2)
    for row, length in enumerate(lengths):
        alone = make([length], padding=8, num_blocks=num_blocks, fixed_rounds=2)
        assert cuts_of(together, row) == cuts_of(alone, 0)


def test_without_fixed_rounds_it_depends_on_the_others():
    assert cuts_of(make([700, 300]), 0) != cuts_of(make([700]), 0)


def test_a_long_row_has_longer_jobs_not_more():
    most = most_jobs(DecodeConfig(fixed_rounds=4), 8)
    work = make([TILE * 100, TILE * 9], kv_heads=8, fixed_rounds=4)
    assert most == 8
    assert work.row_jobs.tolist() == [8, 3]
    assert cuts_of(work, 0)[:2] == [(0, 13), (13, 26)]
    assert len(work.job_row) == 2 * most


# Lengths, KV heads of a device, how busy the blocks of an H100 are: equal shares, jobs of 4 rounds.
BUSY = {
    "64 of 2,048": ([2048] * 64, 1, 0.97, 0.97),
    "64 of 2,048, 8 KV heads": ([2048] * 64, 8, 0.99, 0.97),
    "256 of 1,024": ([1024] * 256, 1, 0.97, 0.97),
    "8 of 4,096": ([4096] * 8, 1, 0.97, 0.48),
    "1 of 4,096": ([4096], 1, 0.12, 0.06),
    "1 of 32,768": ([32768], 1, 0.48, 0.24),
    "1 of 131,072": ([131_072], 1, 0.97, 0.24),
    "64 of 128 to 8,192": (list(range(128, 8193, 128)), 1, 0.98, 0.88),
}


@pytest.mark.parametrize("name", BUSY)
def test_how_busy_the_blocks_are(name):
    """The table of docs/gpu.md: the price of fixed rounds is in its last column."""
    lengths, kv_heads, *expected = BUSY[name]
    works = [make(lengths, 0, 264, kv_heads, fixed_rounds=rounds) for rounds in (None, 4)]
    np.testing.assert_allclose([busy_share(work) for work in works], expected, atol=0.006)
