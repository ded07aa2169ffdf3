"""The exchanges, on virtual devices, against what they mean for whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import FACTORISATIONS, layout
from jax.sharding import PartitionSpec as P

from shiftjax.device.mesh import make_mesh
from shiftjax.models.exchange import Parallel
from shiftjax.parallel.mode import KV_AXES, Mode

TOKENS, HEAD_DIM = 72, 8  # 72 tokens split evenly over every SP from 1 to 9


def run(it, function, in_specs, out_specs, *args):
    mesh = make_mesh(jax.devices()[: it.num_devices], it.sp, it.tp)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(mapped)(*args)


def stored_kv(it, kv):
    """Lay KV heads out as BASE stores them: `tokens tp*width head_dim`."""
    return kv[:, it.source_rows("kv_heads", Mode.BASE)]


@pytest.mark.parametrize(("sp", "tp"), FACTORISATIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (9, 3), (12, 6)])
def test_scatter_gives_each_device_its_heads_of_all_tokens(sp, tp, heads, kv_heads):
    it = layout(sp, tp, heads, kv_heads)
    parallel = Parallel(it, Mode.BASE)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((TOKENS, it.num_heads, HEAD_DIM), np.float32)
    kv = rng.standard_normal((2, TOKENS, it.num_kv_heads, HEAD_DIM), np.float32)
    kv[:, :, it.model.num_kv_heads :] = 0  # padded heads hold zeros
    # -1 rows (padding) index the last head, which is zero whenever there is padding.
    k, v = stored_kv(it, kv[0]), stored_kv(it, kv[1])
    token_split, head_split = P("sp", "tp"), P(None, KV_AXES)
    got = run(it, parallel.scatter_heads, (token_split,) * 3, (head_split,) * 3, q, k, v)
    cached = it.stored_kv_heads(Mode.SHIFT)
    np.testing.assert_array_equal(got[0], q)
    np.testing.assert_array_equal(got[1], kv[0][:, cached])
    np.testing.assert_array_equal(got[2], kv[1][:, cached])
    back = run(it, parallel.gather_heads, (head_split,), token_split, q)
    np.testing.assert_array_equal(back, q)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("sp", "tp"), FACTORISATIONS)
def test_sampled_rows_and_logits_end_on_their_devices(sp, tp, mode):
    it = layout(sp, tp, 9, 3)
    parallel = Parallel(it, mode)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((TOKENS, 4), np.float32)
    rows = rng.integers(0, TOKENS, TOKENS).astype(np.int32)
    vocab = rng.standard_normal((TOKENS, it.num_devices * 5), np.float32)
    split = P("sp") if parallel.splits_tokens else P()
    taken = run(it, parallel.take_rows, (split, P()), P(), hidden, rows)
    np.testing.assert_array_equal(taken, hidden[rows])
    by_rows = run(it, parallel.rows_from_vocab, (P(None, KV_AXES),), P(KV_AXES), vocab)
    np.testing.assert_array_equal(by_rows, vocab)
    everywhere = run(it, parallel.all_rows, (P(KV_AXES),), P(), vocab)
    np.testing.assert_array_equal(everywhere, vocab)


@pytest.mark.parametrize("mode", list(Mode))
def test_reduce_sums_over_the_devices_that_split_the_weights(mode):
    it = layout(4, 2, 8, 8)
    parallel = Parallel(it, mode)
    split = P("sp") if mode is Mode.BASE else P()
    x = np.arange(TOKENS * 4, dtype=np.float32).reshape(TOKENS, 4)
    total = run(it, parallel.reduce, (split,), split, jnp.asarray(x))
    np.testing.assert_array_equal(total, x * (2 if mode is Mode.BASE else 8))
