"""Attention over pools of e4m3 codes: what is written, and that it is read by the same rule."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from oracle import numpy_fp8
from test_attention import STEPS, expected, make_case, row_errors, tolerance

from shiftjax.models.attention import LoopOptions, ragged_paged_attention, write_kv

E4M3 = ml_dtypes.float8_e4m3fn
ROWS = (5, 2, 4)  # tokens, KV heads, width
SLOTS = np.array([9, 4, 7, 14, 5], np.int32)  # of blocks of 4; block 0 is the null block
NUMBERS = arrays.arrays(np.float32, (2, *ROWS), elements=st.floats(width=32))
SCALES = arrays.arrays(np.float32, (2, 2), elements=st.floats(2**-12, 2**12, width=32))
TYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
write = jax.jit(write_kv)


def written(k, v, scales, held=E4M3):
    """The pools after a write into pools of NaN, and what lies in the slots: K and V of tokens."""
    pool = (np.full((4, 2, 4, 4), np.nan, E4M3).view(held),) * 2
    pools = [np.array(x).view(E4M3) for x in write(pool, k, v, SLOTS, scales)]
    return pools, [x[SLOTS // 4, :, SLOTS % 4] for x in pools]


@settings(deadline=None)
@given(NUMBERS, SCALES, st.sampled_from(TYPES), st.sampled_from([E4M3, np.uint8]))
def test_codes_are_those_of_another_implementation(numbers, scales, dtype, held):
    with np.errstate(over="ignore"):
        numbers = numbers.astype(dtype)
    pools, got = written(*numbers, scales, held)
    for x, codes, scale in zip(numbers, got, scales, strict=True):
        wanted = numpy_fp8.saturated(x, scale[:, None])
        np.testing.assert_array_equal(codes.view(np.uint8), wanted.view(np.uint8))
    for pool in pools:
        pool[SLOTS // 4, :, SLOTS % 4] = np.nan
        assert np.isnan(pool).all()


def test_without_scales_codes_are_in_units_of_one():
    numbers = np.random.default_rng(0).standard_normal((2, *ROWS)).astype(np.float32)
    ones = np.ones((2, 2), np.float32)
    for pool, same in zip(written(*numbers, None)[0], written(*numbers, ones)[0], strict=True):
        np.testing.assert_array_equal(pool.view(np.uint8), same.view(np.uint8))


def test_what_is_too_large_becomes_the_largest_code_and_nan_stays():
    k = np.zeros(ROWS, np.float32)
    k[:4, 0, 0] = 225, -1e9, np.inf, np.nan
    _, (codes, _) = written(k, k, np.float32([[0.5, 0.5], [1, 1]]))
    assert codes[:3, 0, 0].astype(float).tolist() == [448, -448, 448]
    assert np.isnan(codes[3, 0, 0]) and np.isnan(codes).sum() == 1


@pytest.mark.parametrize(
    ("dtype", "window", "held"), [("float32", 20, np.uint8), ("bfloat16", None, E4M3)]
)
def test_attention_reads_codes_times_the_scales_of_their_heads(dtype, window, held):
    """The definition, of the numbers that the codes stand for; all other slots hold NaN."""
    case = make_case(*STEPS["decodes and prompts"], dtype=dtype, window=window)
    pool = tuple(x.astype(E4M3) for x in case.pool)
    scales = np.float32([[0.5, 1.7], [3.0, 0.6]])
    options = LoopOptions(0.25, window=window, kv_scales=jnp.asarray(scales))
    attend = partial(ragged_paged_attention, options=options)
    tables, work = case.metadata.block_tables, case.metadata.work
    in_bytes = tuple(np.asarray(x).view(held) for x in pool)
    out = jax.jit(attend)(case.q, in_bytes, tables, work)
    numbers = [
        np.asarray(x, np.float64) * s[:, None, None] for x, s in zip(pool, scales, strict=True)
    ]
    wanted = expected(case, window, k_pool=numbers[0], v_pool=numbers[1])
    assert (row_errors(case, np.asarray(out, np.float64), wanted) <= tolerance(case)).all()
    assert not np.asarray(out[case.metadata.query_start_loc[-1] :]).any()


def test_a_pool_on_a_cpu_is_neither_widened_nor_copied():
    """Codes as bytes: the control is a pool of fp8 itself, of which XLA makes float16 and back."""

    def step(pool, q, k, tables, work, slots):
        pool = write_kv(pool, k, k, slots)
        return pool, ragged_paged_attention(q, pool, tables, work, LoopOptions(0.25))

    case = make_case([1] * 4, [400] * 4, 8, 8, min_blocks=4000)
    k, of = jnp.ones((8, 2, 16), jnp.float32), case.metadata
    arrays = case.q, k, of.block_tables, of.work, of.slot_mapping
    for held, is_moved in ((np.uint8, False), (E4M3, True)):
        pool = (jax.ShapeDtypeStruct(case.pool[0].shape, held),) * 2
        compiled = jax.jit(step, donate_argnums=0).lower(pool, *arrays).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        assert (temporary > pool[0].size) == is_moved
