"""The tiles of any step: every token of a chunk, and of the padding, is owned once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.prefill_work import divide_prefill, tokens_per_warpgroup

CHUNKS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 500)), max_size=6)


@given(CHUNKS, st.integers(0, 4), st.integers(0, 3), st.integers(0, 50), st.integers(1, 32))
def test_tiles_are_a_partition(chunks, decodes, padding_seqs, padding, q_per_kv):
    new = np.array([1] * decodes + [n for n, _ in chunks] + [0] * padding_seqs, np.int32)
    before = np.array([9] * decodes + [c for _, c in chunks] + [0] * padding_seqs, np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    tokens = int(starts[-1]) + padding
    work = divide_prefill(new + before, starts, decodes, num_tokens=tokens, q_per_kv=q_per_kv)
    tile = 2 * tokens_per_warpgroup(q_per_kv)
    assert len({len(x) for x in work[:4]}) == 1
    assert len(work.tile_seq) == tokens // tile + len(new) + 1  # of the bucket alone
    seq, begin, end, position = (x[: work.num_tiles[0]] for x in work[:4])
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
    assert not any(x[work.num_tiles[0] :].any() for x in work[:4])
