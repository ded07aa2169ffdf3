"""Sinks and soft caps in the loops, against a softmax over everything at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import make_case

from shiftjax.models.attention import LoopOptions, ragged_paged_attention
from shiftjax.models.attention_work import CPU_SIZES, GPU_SIZES

# Rows whose contexts are cut into parts, and tiles of chunks that begin inside of a context.
STEPS = {
    "rows in parts": ([1] * 4, [700, 3, 130, 1], 8, 4),
    "rows and tiles": ([1, 1, 40, 9], [90, 5, 200, 9], 64, 4),
}


@partial(jax.jit, static_argnames=("soft_cap", "window", "sizes"))
def attend(q, pool, metadata, sinks, soft_cap, window, sizes):
    options = LoopOptions(q.shape[-1] ** -0.5, soft_cap, window, sinks=sinks, sizes=sizes)
    return ragged_paged_attention(q, pool, metadata.block_tables, metadata.work, options)


def expected(case, sinks, soft_cap, window):
    """One softmax a token and head, in float64: the sink is a score, and its value is zero."""
    of, q = case.metadata, np.asarray(case.q, np.float64)
    out, q_per_kv = np.zeros_like(q), q.shape[1] // case.pool[0].shape[1]
    for seq, length in enumerate(of.seq_lens):
        first, last = of.query_start_loc[seq : seq + 2]
        block, offset = np.divmod(np.arange(length), case.pool[0].shape[2])
        slots = of.block_tables[seq, block], slice(None), offset
        k, v = (np.asarray(x, np.float64)[slots] for x in case.pool)
        for token in range(first, last):
            seen = length - (last - token) + 1
            keys = slice(max(0, seen - window) if window else 0, seen)
            for head in range(q.shape[1]):
                scores = k[keys, head // q_per_kv] @ q[token, head] * q.shape[2] ** -0.5
                scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(np.append(scores, sinks[head]) - scores.max())
                weights /= weights.sum()
                out[token, head] = weights[:-1] @ v[keys, head // q_per_kv]
    return out


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("sizes", [CPU_SIZES, GPU_SIZES], ids=["cpu", "gpu"])
def test_sinks_take_part_once_in_however_many_parts(name, window, sizes):
    case = make_case(*STEPS[name], max_len=1024, window=window, sizes=sizes)
    sinks = np.linspace(-2, 6, case.q.shape[1]).astype(np.float32)
    out = attend(*case, jnp.asarray(sinks), 3.0, window, sizes)
    want = expected(case, sinks, 3.0, window)
    np.testing.assert_allclose(out, want, atol=2e-5)
    without = attend(*case, None, 3.0, window, sizes)
    assert np.abs(without - want).max() > 0.1
    assert not np.asarray(out)[case.metadata.query_start_loc[-1] :].any()
