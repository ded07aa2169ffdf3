"""Every step that may be planned has a bucket, and none computes rows for nothing."""

import pytest

from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket, make_buckets
from shiftjax.parallel.layout import Layout


@pytest.mark.parametrize("sizes", [(8, 16, 32, 64, 128), (24, 100), (64, 512), (8,), (7, 200)])
@pytest.mark.parametrize("max_rows", [0, 12, 32, 100, 256])
@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (2, 2), (3, 1)])
def test_every_step_has_a_bucket(sizes, max_rows, sp, tp):
    """Up to `max_rows` tokens any may be a row, beyond that as many as sequences."""
    seqs = 6
    buckets = make_buckets(sizes, seqs, Layout(PRESETS["tiny"], sp, tp), max_rows)
    for tokens in range(1, sizes[-1] + 1):
        rows = min(tokens, seqs)
        if tokens <= max_rows:
            rows = tokens
        size = next(b.tokens for b in buckets if b.tokens >= tokens)
        bucket = next(b for b in buckets if b.holds(tokens, rows, min(tokens, seqs)))
        assert bucket.tokens == size, (tokens, buckets)


def test_large_steps_have_rows_for_their_sequences_only():
    layout = Layout(PRESETS["tiny"], 1, 1)
    buckets = make_buckets((8, 16, 32, 64, 128), 8, layout, max_rows=32)
    assert [bucket[:3] for bucket in buckets] == [
        (8, 8, 8),
        (16, 16, 8),
        (32, 32, 8),
        (64, 8, 8),
        (128, 8, 8),
    ]


def test_large_steps_without_drafts_have_rows_for_their_sequences_only():
    layout = Layout(PRESETS["tiny"], 1, 1)
    buckets = make_buckets((8, 64, 128), 8, layout, max_rows=128)
    sizes = [(8, 8, 8), (64, 8, 8), (64, 64, 8), (128, 8, 8), (128, 128, 8)]
    assert [bucket[:3] for bucket in buckets] == sizes


@pytest.mark.parametrize(
    ("sizes", "max_rows", "alone"),
    [
        ((8, 16, 32, 64, 128), 0, [8]),
        ((8, 16, 32, 64, 128), 32, [8, 16]),  # nothing larger than 32 has 32 rows
        ((8, 64, 128), 128, [8, 64]),
        ((8,), 0, []),
    ],
)
def test_a_bucket_of_rows_alone_has_a_larger_one_with_tiles(sizes, max_rows, alone):
    buckets = make_buckets(sizes, 8, Layout(PRESETS["tiny"], 1, 1), max_rows)
    assert [bucket.tokens for bucket in buckets if bucket.rows_alone] == alone
    for one in (bucket for bucket in buckets if bucket.rows_alone):
        size = one.tokens, one.rows, one.seqs
        assert one.rows == one.tokens
        assert any(two.holds(*size) for two in buckets if not two.rows_alone)


def test_a_bucket_holds_what_fits_in_every_respect():
    bucket = Bucket(64, 16, 8)
    assert bucket.holds(64, 16, 8)
    assert not any(bucket.holds(*size) for size in ((65, 16, 8), (64, 17, 8), (64, 16, 9)))
