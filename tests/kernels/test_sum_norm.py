"""The norm after a sum, in the Mosaic interpreter, without other devices: it has no switch.

How devices meet is in `test_sum_protocol.py`, what the compiler makes of it in
`tests/compile/test_sum_compile.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import watched_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.norm_codes import NormKind
from pallas_kernels.sum_norm import sum_norm, wrong_sum
from shiftjax.models.layers import rms_norm
from shiftjax.models.products import quantise_blocks

ROWS = 2
CASES = {
    "numbers": (1024, NormKind(1e-5), False),
    "codes": (1024, NormKind(1e-5, codes=True), False),
    "codes, scale, offset, tiles of 4 blocks, the second norm": (
        1536, NormKind(1e-3, offset=True, in_float32=True, scale=0.22, codes=True), True
    ),
}  # fmt: skip


def draw(width: int, *shape: int) -> jax.Array:
    rng = np.random.default_rng(sum(shape) + width)
    return jnp.asarray(rng.standard_normal((*shape, width)), jnp.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_layers_compute_to_the_bit(name):
    width, norm, is_second = CASES[name]
    partial, x = draw(2 * width, ROWS)[:, :width], draw(width, ROWS)
    weight, given = draw(width), (draw(width), None)
    if is_second:
        given = jnp.concatenate([weight + 1, weight]), jnp.int32(1)
    how = plgpu.InterpretGPUParams(detect_races=True)
    with watched_races() as races:
        got = sum_norm(partial, x, given, norm, None, how)
    added = partial
    if norm.scale != 1:
        added = (added.astype(jnp.float32) * norm.scale).astype(x.dtype)
    total = x + added
    whole = 1.0 + weight.astype(jnp.float32) if norm.offset else weight
    normed = rms_norm(total, whole, norm.eps, in_float32=norm.in_float32)
    expected = total, *(quantise_blocks(normed) if norm.codes else (normed,))
    assert races and not any(each.races_found for each in races)
    for one, right in zip(got, expected, strict=True):
        assert one.dtype == right.dtype
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (one, right)))


def test_sums_without_a_kernel_are_named():
    assert wrong_sum(64, 8192, jnp.bfloat16) is None
    assert wrong_sum(8, 3584, jnp.bfloat16) is None
    assert "not bfloat16" in wrong_sum(8, 8192, jnp.float32)
    assert "more than 64" in wrong_sum(65, 8192, jnp.bfloat16)
    assert "2880 is not a multiple" in wrong_sum(8, 2880, jnp.bfloat16)
    assert "registers" in wrong_sum(8, 32768, jnp.bfloat16)
    with pytest.raises(ValueError, match="sum_norm: activations are float32"):
        sum_norm(*(jnp.zeros((1, 512)),) * 2, (jnp.zeros(512), None), NormKind(1e-5), None)
