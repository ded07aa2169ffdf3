"""Sums in two shots, in the Mosaic interpreter: each device's rows, as if it were alone.

The switch is not there: what is given as partial is the sum. How devices meet is in
`test_rows_protocol.py`, what the compiler makes of it in `tests/compile/test_sum_compile.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import watched_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import sum_rows, sum_sizes
from pallas_kernels.norm_codes import NormKind
from pallas_kernels.sum_rows import Alone, sum_norm_rows, sum_whole
from pallas_kernels.sum_sizes import blocks_of, shots, wrong_rows
from shiftjax.models.layers import rms_norm
from shiftjax.models.products import quantise_blocks

DEVICES = 2
CASES = {
    "numbers": (4, 1024, NormKind(1e-5), False),
    "codes, scale, offset, tiles of 4 blocks, the second norm": (
        4, 1536, NormKind(1e-3, offset=True, in_float32=True, scale=0.22, codes=True), True
    ),
}  # fmt: skip


def draw(width: int, *shape: int) -> jax.Array:
    rng = np.random.default_rng(sum(shape) + width)
    return jnp.asarray(rng.standard_normal((*shape, width)), jnp.bfloat16)


def added_up(partial: jax.Array, x: jax.Array, norm: NormKind) -> jax.Array:
    if norm.scale != 1:
        partial = (partial.astype(jnp.float32) * norm.scale).astype(x.dtype)
    return x + partial


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_devices_compute_their_rows_to_the_bit(name, blocks, monkeypatch):
    """With one thread block for two rows, and with one for each."""
    monkeypatch.setattr(sum_rows, "blocks_of", lambda rows, devices: blocks)
    rows, width, norm, is_second = CASES[name]
    partial, x, own = draw(2 * width, rows)[:, :width], draw(width, rows), rows // DEVICES
    weight, given = draw(width), (draw(width), None)
    if is_second:
        given = jnp.concatenate([weight + 1, weight]), jnp.int32(1)
    total = added_up(partial, x, norm)
    whole = 1.0 + weight.astype(jnp.float32) if norm.offset else weight
    normed = rms_norm(total, whole, norm.eps, in_float32=norm.in_float32)
    codes, scales = quantise_blocks(normed) if norm.codes else (normed, None)
    how = plgpu.InterpretGPUParams(detect_races=True)
    for rank in range(DEVICES):
        mine, alone = slice(rank * own, (rank + 1) * own), Alone(rank, DEVICES)
        with watched_races() as races:
            got = sum_norm_rows(partial, x[mine], given, norm, alone, how)
        assert races and not any(each.races_found for each in races)
        expected = [total[mine], codes[mine], *(() if scales is None else (scales[:, mine],))]
        found = [got[0], got[1][mine], *(each[:, mine] for each in got[2:])]
        for one, right in zip(found, expected, strict=True):
            assert one.dtype == right.dtype
            np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (one, right)))


def test_the_last_sum_has_no_norm():
    partial, x, norm = draw(2048, 4)[:, :1024], draw(1024, 4), NormKind(1e-5, scale=0.5)
    how = plgpu.InterpretGPUParams(detect_races=True)
    got = sum_whole(partial, x[2:], norm, Alone(1, DEVICES), how)
    np.testing.assert_array_equal(got[2:], added_up(partial, x, norm)[2:])


def test_the_smallest_sums_take_one_shot_and_the_others_two():
    assert [shots(rows, 8, 8192) for rows in (4, 5, 8, 12, 8192, 16384)] == [1, 1, 2, 1, 2, 0]
    assert shots(64, 8, 8192, splits_rows=False) == 0
    assert shots(16, 8, 8192, splits_rows=False) == 1  # 2 MiB are sent
    assert shots(8, 1, 8192) == shots(8, 8, 2880) == shots(8, 8, 32768) == 0
    assert shots(8, 4, 8192) == 0  # devices that are few read each other's memory
    assert [shots(rows, 6, 8192) for rows in (5, 6)] == [1, 2]


def test_thread_blocks_share_rows_evenly():
    assert [blocks_of(rows, 8) for rows in (8, 512, 1024, 2048, 8192, 8 * 129)] == [
        *(1, 64, 128, 128, 128),
        43,
    ]
    assert sum_sizes.MOST_BLOCKS <= 132  # multiprocessors of Hopper: all must be at work at once


def test_sums_without_a_kernel_are_named():
    assert "12 rows are not as many for each of 8" in wrong_rows(12, 8, 8192)
    assert "more than 8192" in wrong_rows(16384, 8, 8192)
    with pytest.raises(ValueError, match="sum_norm_rows: activations are float32"):
        zeros = jnp.zeros((2, 512))
        sum_norm_rows(zeros, zeros[:1], (zeros[0], None), NormKind(1e-5), Alone(0, 2))
