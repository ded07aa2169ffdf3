"""The tiles of any step: every token of a chunk, and of the padding, is owned once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.prefill_plan import plan_prefill, tokens_per_warpgroup

CHUNKS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 500)), max_size=6)


@given(CHUNKS, st.integers(0, 4), st.integers(0, 3), st.integers(0, 50), st.integers(1, 32))
def test_tiles_are_a_partition(chunks, decodes, padding_seqs, padding, group):
    new = np.array([1] * decodes + [n for n, _ in chunks] + [0] * padding_seqs, np.int32)
    before = np.array([9] * decodes + [c for _, c in chunks] + [0] * padding_seqs, np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    tokens = int(starts[-1]) + padding
    plan = plan_prefill(new + before, starts, decodes, num_tokens=tokens, group=group)
    tile = 2 * tokens_per_warpgroup(group)
    assert len({len(x) for x in plan[:4]}) == 1
    assert len(plan.tile_seq) == tokens // tile + len(new) + 1  # of the bucket alone
    seq, begin, end, position = (x[: plan.num_tiles[0]] for x in plan[:4])
    owned = np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)] or [[]])
    assert sorted(owned) == list(range(decodes, tokens))
    assert (end - begin <= tile).all()
    real = begin < starts[-1]
    of = seq[real]
    assert (starts[of] <= begin[real]).all()
    assert (end[real] <= starts[of + 1]).all()
    assert (position[real] == before[of] + begin[real] - starts[of]).all()
    assert (position + end - begin <= 0)[~real].all()  # padding sees nothing
    assert (np.diff(position) <= 0).all()  # those that see most come first
    assert not any(x[plan.num_tiles[0] :].any() for x in plan[:4])
