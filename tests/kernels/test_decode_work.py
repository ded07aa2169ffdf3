"""The work of decode rows: every round once, equal shares, in the order that kernels count on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.decode_work import DecodeConfig, DecodeWork, divide_decode, num_workers
from pallas_kernels.rows import Rows, rows_of

TILE = 64
LENGTHS = st.lists(st.integers(1, 700), max_size=9)


def make(lengths, padding=0, num_blocks=6, kv_heads=1, window=None) -> DecodeWork:
    rows = Rows(np.arange(len(lengths), dtype=np.int32), np.array(lengths, np.int32))
    config = DecodeConfig(TILE, num_blocks)
    options = dict(kv_heads=kv_heads, sliding_window=window, config=config)
    return divide_decode(rows, len(lengths) + padding, **options)


def jobs_of(work: DecodeWork) -> list[tuple[int, int, int]]:
    count = work.worker_first[-1]
    return list(zip(*(x[:count].tolist() for x in work[1:4]), strict=True))


def test_rows_are_the_tokens_of_the_first_sequences():
    lens, starts = np.array([5, 9, 4, 0], np.int32), np.array([0, 1, 4, 5, 5], np.int32)
    rows = rows_of(lens, starts, 2)
    assert (rows.seq.tolist(), rows.length.tolist()) == ([0, 1, 1, 1], [5, 7, 8, 9])
    assert len(rows_of(lens, starts, 0).seq) == 0


@given(LENGTHS, st.integers(0, 3), st.integers(1, 12), st.sampled_from([None, 1, 64, 100]))
def test_every_round_is_worked_on_once(lengths, padding, num_blocks, window):
    work = make(lengths, padding, num_blocks, window=window)
    done = [(row, nth) for row, begin, end in jobs_of(work) for nth in range(begin, end)]
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


@given(LENGTHS, st.integers(0, 3), st.integers(1, 12))
def test_the_jobs_of_a_row_follow_each_other(lengths, padding, num_blocks):
    work = make(lengths, padding, num_blocks)
    rows = [row for row, _, _ in jobs_of(work)]
    for row in range(len(lengths) + padding):
        first, count = work.row_first[row], work.row_jobs[row]
        assert count == rows.count(row)
        assert rows[first : first + count] == [row] * count


@given(LENGTHS, st.integers(0, 3), st.integers(1, 12))
def test_shapes_follow_from_the_bucket(lengths, padding, num_blocks):
    work = make(lengths, padding, num_blocks)
    empty = make([], len(lengths) + padding, num_blocks)
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
