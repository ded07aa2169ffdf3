"""The jobs of any step: every token, of a chunk or of padding, sees all of its context once."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.prefill_split import SPAN, WAVES, busy
from pallas_kernels.prefill_work import (
    Job,
    PrefillConfig,
    PrefillWork,
    Split,
    divide_prefill,
    tokens_per_warpgroup,
)
from pallas_kernels.rows import Sequences
from pallas_kernels.window import Chunk, Window

CHUNKS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 3000)), max_size=6)
ROUNDS = st.sampled_from([None, 0, 1, 3])
WINDOWS = st.sampled_from([None, 1, 200, 1000, Chunk(1), Chunk(96), Chunk(1000)])


def divide(chunks, decodes=0, padding_seqs=0, padding=0, q_per_kv=8, kv_heads=1, **options: Any):
    """Divide chunks of (new tokens, tokens before them)."""
    new = np.array([1] * decodes + [n for n, _ in chunks] + [0] * padding_seqs, np.int32)
    before = np.array([9] * decodes + [c for _, c in chunks] + [0] * padding_seqs, np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    options = {"num_tokens": int(starts[-1]) + padding, "max_context": 4096, **options}
    sequences, heads = Sequences(new + before, starts, decodes), (q_per_kv * kv_heads, kv_heads)
    return divide_prefill(sequences, heads=heads, **options), before, starts


def seen_by(position: int, window: Window | None) -> list[int]:
    """The positions that a token sees, by definition; none of padding, which is below 0."""
    past = range(position + 1)
    if isinstance(window, Chunk):
        return [key for key in past if key // window.tokens == position // window.tokens]
    return [key for key in past if window is None or position - key < window]


def jobs_of(work: PrefillWork) -> Job:
    return Job(*work.jobs[: work.counts[0]].T)


@given(
    CHUNKS,
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(0, 50),
    st.integers(1, 32),
    st.sampled_from([1, 2, 5, 8]),
    WINDOWS,
    ROUNDS,
)
def test_every_token_sees_its_context_once(
    chunks, decodes, padding_seqs, padding, q_per_kv, kv_heads, window, rounds
):
    config = PrefillConfig(num_blocks=6, fixed_rounds=rounds)
    work, before, starts = divide(
        chunks, decodes, padding_seqs, padding, q_per_kv, kv_heads, window=window,
        config=config,
    )  # fmt: skip
    tile, jobs = 2 * tokens_per_warpgroup(q_per_kv), jobs_of(work)
    tokens = int(starts[-1]) + padding
    tiles = {}
    for job in zip(*jobs, strict=True):
        tiles.setdefault(job[:4], []).append(Job(*map(int, job)))
    owned = [token for _, begin, end, _ in tiles for token in range(begin, end)]
    assert sorted(owned) == list(range(decodes, tokens))
    for (seq, begin, end, position), parts in tiles.items():
        assert end - begin <= tile
        parts.sort(key=lambda job: job.first)
        oldest = min(seen_by(position, window), default=0)
        last = -(-max(position + end - begin, 0) // SPAN)
        assert parts[0].first == min(oldest // SPAN, last) and parts[-1].last == last
        assert all(a.last == b.first for a, b in itertools.pairwise(parts))
        if begin < starts[-1]:
            assert starts[seq] <= begin and end <= starts[seq + 1]
            assert position == before[seq] + begin - starts[seq]
        else:
            assert position + end - begin <= 0  # padding sees nothing
        first_part = parts[0].part
        assert [job.part for job in parts] == [first_part + i for i in range(len(parts))]
        assert (first_part == -1) == (len(parts) == 1)
        if len(parts) > 1:
            assert [begin, end, first_part, len(parts)] in work.splits.tolist()
    lengths = jobs.last - jobs.first
    assert (np.diff(lengths) <= 0).all()  # the longest come first
    used = jobs.part[jobs.part >= 0]
    assert sorted(used) == list(range(len(used)))  # no part is written twice
    assert Split(*work.splits.T).parts.sum() == len(used) <= 2 * len(work.splits)
    assert not work.jobs[work.counts[0] :].any()


@given(CHUNKS, st.integers(0, 4), st.integers(0, 3), st.sampled_from([1, 8]), ROUNDS)
def test_shapes_follow_from_the_bucket(chunks, decodes, padding_seqs, kv_heads, rounds):
    config = PrefillConfig(num_blocks=6, fixed_rounds=rounds)
    options = {"kv_heads": kv_heads, "config": config, "num_tokens": 1300}
    work, *_ = divide(chunks, decodes, padding_seqs, **options)
    empty, *_ = divide([], 0, len(chunks) + decodes + padding_seqs, **options)
    assert [x.shape for x in work] == [x.shape for x in empty]
    assert all(x.dtype == np.int32 for x in (*work, *empty))


@given(CHUNKS, st.integers(1, 8), st.integers(1, 300))
def test_parts_fit_the_memory_that_is_promised(chunks, kv_heads, num_blocks):
    work, *_ = divide(chunks, kv_heads=kv_heads, config=PrefillConfig(num_blocks=num_blocks))
    assert 2 * len(work.splits) * kv_heads <= WAVES * num_blocks + kv_heads


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 40), st.integers(0, 900)), max_size=3))
def test_fixed_rounds_cut_a_tile_alike_in_any_company(rounds, others):
    config = PrefillConfig(num_blocks=6, fixed_rounds=rounds)
    ranges = []
    for chunks in [(20, 700)], [(20, 700), *others]:
        work, *_ = divide(chunks, padding_seqs=4 - len(chunks), num_tokens=200, config=config)
        jobs = zip(*jobs_of(work), strict=True)
        ranges.append(sorted(job[:2] + job[3:6] for job in jobs if job[:2] == (0, 0)))
    assert ranges[0][0][3:] == (0, rounds) and ranges[0] == ranges[1]


def test_fixed_rounds_need_the_longest_context():
    config = PrefillConfig(fixed_rounds=4)
    with pytest.raises(ValueError, match="fixed_rounds needs max_context"):
        divide([(8, 0)], config=config, max_context=None)
    assert not divide([(8, 500)], config=config, max_context=512)[0].splits.size


# 8 query heads and 1 KV head of a GPU (a 70B of TP = 8): part of 132 thread blocks that work, at
# most, with contexts whole, and as they are split. `docs/gpu.md` has the table.
BUSY = {
    ((8192, 0),): (0.99, 0.99),
    ((2048, 0),): (0.52, 0.92),
    ((1024, 0),): (0.27, 0.27),
    ((2048, 16384),): (0.92, 0.92),
    ((1536, 8192),): (0.67, 0.90),
    ((512, 32768),): (0.24, 0.96),
    ((256, 131072),): (0.12, 0.96),
}


@pytest.mark.parametrize("chunks", BUSY)
def test_few_tiles_fill_the_chip(chunks):
    found = []
    for config in PrefillConfig(fixed_rounds=0), PrefillConfig():
        jobs = jobs_of(divide(chunks, config=config)[0])
        found.append(busy(jobs.last - jobs.first, 1, config.num_blocks))
    assert np.allclose(found, BUSY[chunks], atol=0.006)


def test_the_blocks_time_is_that_of_the_busiest():
    assert busy(np.array([4, 3, 2, 1]), 1, 2) == 1  # 4 and 1, 3 and 2
    assert busy(np.array([4, 4, 4]), 1, 2) == 0.75
    assert busy(np.array([4]), 3, 2) == 0.75  # three KV heads
    assert busy(np.array([], int), 1, 2) == 1
