"""The plan of decode rows: every round once, equal shares, in the order that kernels count on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.decode_plan import DecodeConfig, DecodePlan, num_workers, plan_decode

TILE = 64
LENGTHS = st.lists(st.integers(1, 700), max_size=9)


def make(lengths, padding=0, num_blocks=6, kv_heads=1, window=None) -> DecodePlan:
    seq_lens = np.array([*lengths, *[500] * padding], np.int32)
    config = DecodeConfig(TILE, num_blocks)
    options = dict(kv_heads=kv_heads, sliding_window=window, config=config)
    return plan_decode(seq_lens, len(lengths), **options)


def jobs_of(plan: DecodePlan) -> list[tuple[int, int, int]]:
    count = plan.worker_first[-1]
    return list(zip(*(x[:count].tolist() for x in plan[1:4]), strict=True))


@given(LENGTHS, st.integers(0, 3), st.integers(1, 12), st.sampled_from([None, 1, 64, 100]))
def test_every_round_is_worked_on_once(lengths, padding, num_blocks, window):
    plan = make(lengths, padding, num_blocks, window=window)
    done = [(row, nth) for row, begin, end in jobs_of(plan) for nth in range(begin, end)]
    starts = [max(0, n - (window or n)) // TILE for n in lengths]
    wanted = [
        (row, nth) for row, n in enumerate(lengths) for nth in range(starts[row], -(-n // TILE))
    ]
    assert done == wanted  # in the order of rows, too


@given(LENGTHS, st.integers(1, 12))
def test_shares_are_equal(lengths, num_blocks):
    plan = make(lengths, num_blocks=num_blocks)
    sizes = np.array([end - begin for _, begin, end in jobs_of(plan)], int)
    ends = np.concatenate([[0], np.cumsum(sizes)])[plan.worker_first]
    assert np.ptp(np.diff(ends)) <= 1
    assert ends[0] == 0 and ends[-1] == sizes.sum()
    assert (sizes > 0).all()


@given(LENGTHS, st.integers(0, 3), st.integers(1, 12))
def test_the_jobs_of_a_row_follow_each_other(lengths, padding, num_blocks):
    plan = make(lengths, padding, num_blocks)
    rows = [row for row, _, _ in jobs_of(plan)]
    for row in range(len(lengths) + padding):
        first, count = plan.row_first[row], plan.row_jobs[row]
        assert count == rows.count(row)
        assert rows[first : first + count] == [row] * count


@given(LENGTHS, st.integers(0, 3), st.integers(1, 12))
def test_shapes_follow_from_the_bucket(lengths, padding, num_blocks):
    plan = make(lengths, padding, num_blocks)
    empty = make([], len(lengths) + padding, num_blocks)
    assert [x.shape for x in plan] == [x.shape for x in empty]
    assert all(x.dtype == np.int32 for x in (*plan, *empty))
    assert not any(x.any() for x in empty)


@pytest.mark.parametrize(("kv_heads", "workers"), [(1, 264), (2, 132), (8, 33), (5, 52), (300, 1)])
def test_workers_and_heads_fill_the_chip(kv_heads, workers):
    assert num_workers(264, kv_heads) == workers


def test_one_long_row_is_worked_on_by_all():
    plan = make([TILE * 60], num_blocks=6)
    assert jobs_of(plan) == [(0, 10 * i, 10 * i + 10) for i in range(6)]
    assert plan.row_jobs[0] == 6
