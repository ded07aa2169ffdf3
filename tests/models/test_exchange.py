"""The exchanges, on virtual devices, against what they mean for whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import FACTORISATIONS, layout
from jax.sharding import PartitionSpec as P
from spent import thorough

from shiftjax.device.mesh import make_mesh, mesh_of
from shiftjax.models.exchange import LIMB_BITS, LIMBS, Parallel
from shiftjax.parallel.grid import ALL_AXES, TOKEN_AXES, WEIGHT_AXES, Group, Mode
from shiftjax.parallel.layout import Layout

TOKENS, HEAD_DIM = 72, 8  # 72 tokens split evenly over every SP from 1 to 9


ALL_MODES = [  # with SP = 4, 6, 8 and 9 there are modes between base and shift
    (sp, tp, mode) for sp, tp in FACTORISATIONS for mode in Group(0, sp).modes
]


def run(it, mode, function, in_specs, out_specs, *args):
    mesh = mesh_of(make_mesh(jax.devices()[: it.num_devices], it.sp, it.tp), mode)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(mapped)(*args)


@pytest.mark.parametrize(("sp", "tp", "mode"), ALL_MODES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), *thorough((8, 2), (12, 6))])
def test_scatter_gives_each_device_its_heads_of_all_tokens(sp, tp, mode, heads, kv_heads):
    it = layout(sp, tp, heads, kv_heads)
    parallel = Parallel(it, mode)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((TOKENS, it.num_heads, HEAD_DIM), np.float32)
    kv = rng.standard_normal((2, TOKENS, it.num_kv_heads, HEAD_DIM), np.float32)
    kv[:, :, it.model.num_kv_heads :] = 0  # padded heads hold zeros
    # -1 rows (padding) index the last head, which is zero whenever there is padding.
    k, v = kv[:, :, it.source_rows("kv_heads", mode)]
    token_split, head_split = P(TOKEN_AXES, WEIGHT_AXES), P(None, ALL_AXES)
    got = run(it, mode, parallel.scatter_heads, (token_split,) * 3, (head_split,) * 3, q, k, v)
    cached = [head for j in range(it.num_devices) for head in it.kv_heads_of(j)]
    np.testing.assert_array_equal(got[0], q)
    np.testing.assert_array_equal(got[1], kv[0][:, cached])
    np.testing.assert_array_equal(got[2], kv[1][:, cached])
    back = run(it, mode, parallel.gather_heads, (head_split,), token_split, q)
    np.testing.assert_array_equal(back, q)


@pytest.mark.parametrize(("sp", "tp", "mode"), [one for one in ALL_MODES if one[2].sp > 1])
def test_codes_and_their_scales_return_to_the_tokens_together(sp, tp, mode):
    """Bit by bit, of any code: two blocks of eight inputs on each device."""
    it = layout(sp, tp, 9, 3)
    parallel = Parallel(it, mode)
    rng = np.random.default_rng(0)
    octets = rng.integers(0, 256, (TOKENS, it.num_devices * 16), np.uint8)
    codes = octets.view(jnp.float8_e4m3fn)
    scale = rng.standard_normal((it.num_devices * 2, TOKENS), np.float32)
    before = P(None, ALL_AXES), P(ALL_AXES)
    after = P(TOKEN_AXES, WEIGHT_AXES), P(WEIGHT_AXES, TOKEN_AXES)
    got = run(it, mode, parallel.gather_codes, before, after, codes, scale)
    np.testing.assert_array_equal(np.asarray(got[0]).view(np.uint8), octets)
    np.testing.assert_array_equal(got[1], scale)


@pytest.mark.parametrize(("sp", "tp", "mode"), ALL_MODES)
def test_sampled_rows_and_parts_of_the_vocabulary_are_where_they_belong(sp, tp, mode):
    it = layout(sp, tp, 9, 3)
    parallel = Parallel(it, mode)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((TOKENS, 4), np.float32)
    rows = rng.integers(0, TOKENS, TOKENS).astype(np.int32)
    vocab = rng.standard_normal((TOKENS, it.num_devices * 5), np.float32)
    split = P(TOKEN_AXES)
    taken = run(it, mode, parallel.take_rows, (split, P()), P(), hidden, rows)
    np.testing.assert_array_equal(taken, hidden[rows])

    def places(own):
        return parallel.of_all_devices(own), parallel.total(parallel.place + 1)

    parts, total = run(it, mode, places, (P(None, ALL_AXES),), P(), vocab)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), vocab)
    assert total == it.num_devices * (it.num_devices + 1) // 2


@pytest.mark.parametrize("mode", Group(0, 4).modes)
def test_reduce_sums_over_the_devices_that_split_the_weights(mode):
    it = layout(4, 2, 8, 8)
    parallel = Parallel(it, mode)
    split = P(TOKEN_AXES)
    x = np.arange(TOKENS * 4, dtype=np.float32).reshape(TOKENS, 4)
    total = run(it, mode, parallel.reduce, (split,), split, jnp.asarray(x))
    np.testing.assert_array_equal(total, x * (8 // mode.sp))


class Unevenly(Layout):
    """Three devices that hold 8 KV heads as 3, 3 and 2; shards are alike, so one is there twice."""

    def kv_heads_of_ranks(self, mode: Mode) -> list[list[int]]:
        return [[0, 1, 2], [3, 4, 5], [5, 6, 7]]


UNEVEN = {
    "three ranks": (Unevenly(layout(1, 3, 24, 8).model, 1, 3), Mode(1, 1)),
    "between modes": (layout(6, 1, 6, 3), Mode(6, 3)),  # ranks hold heads 0 and 1, 1 and 2
}


@pytest.mark.parametrize("case", UNEVEN)
def test_squares_of_heads_that_some_devices_share_count_once(case):
    it, mode = UNEVEN[case]
    parallel, ranks = Parallel(it, mode), np.array(it.kv_heads_of_ranks(mode))
    copies = np.bincount(ranks.reshape(-1))
    assert set(copies) == {1, 2}
    rng = np.random.default_rng(2)
    heads = rng.standard_normal((TOKENS, len(copies), HEAD_DIM)).astype(np.float32)
    heads *= 10.0 ** rng.integers(-6, 6, (TOKENS, 1, 1)).astype(np.float32)
    heads[0] = 0
    split, out = P(TOKEN_AXES, WEIGHT_AXES), P(TOKEN_AXES)

    def squares(x: jax.Array) -> jax.Array:
        return parallel.exact_squares(x, parallel.kv_head_shares())

    got = run(it, mode, squares, (split,), out, heads[:, ranks.reshape(-1)])
    np.testing.assert_allclose(got, squares_in_integers(heads), rtol=3e-7)
    alone = Parallel(layout(1, 1, 24, len(copies)), Mode(1, 1))
    whole = jax.jit(lambda x: alone.exact_squares(x, alone.kv_head_shares()))(heads)
    np.testing.assert_array_equal(got, whole)


def squares_in_integers(heads: np.ndarray) -> np.ndarray:
    """The sum of squares of each token as digits of integers, of which each head's count once."""
    largest = np.abs(heads).max((1, 2))
    unit = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1))) + 1)
    rest = np.square(heads / unit[:, None, None]).astype(np.float64)  # rounded to float32 before
    digits = []
    for _ in range(LIMBS):
        rest = rest * 2**LIMB_BITS
        digits.append(np.floor(rest).astype(np.int64).sum((1, 2)))
        rest -= np.floor(rest)
    total = np.zeros(len(heads), np.float32)
    for place in reversed(range(LIMBS)):
        total += np.float32(2.0 ** (-LIMB_BITS * (place + 1))) * digits[place].astype(np.float32)
    return total * np.square(unit)
