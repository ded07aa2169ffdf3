"""Products with matrices of four bits, held against numbers that NumPy makes of the same codes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_work import ExpertWeights, sort_pairs
from shiftjax.models import four_bits
from shiftjax.models.four_bits import packed_product, tiled_product
from shiftjax.models.products import Matrix, project_in, project_out
from shiftjax.models.tiles import tile_loop

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def drawn(kind: str, shape: tuple[int, ...], group: int, seed: int = 0):
    """Codes `[.., out, in / 2]`, scales and zeros `[.., out, groups]`, and the numbers, float32."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    four = np.stack([codes % 16, codes // 16], axis=-1).reshape(shape)
    groups = *shape[:-1], shape[-1] // group
    if kind == "mxfp4":
        scales = rng.integers(118, 132, groups).astype(np.uint8)
        values = np.where(four < 8, 1, -1) * E2M1[four % 8]
        units = np.exp2(scales.astype(np.float32) - 127)
        return codes, scales, None, (values * units.repeat(group, -1)).astype(np.float32)
    scales = rng.uniform(0.01, 0.1, groups).astype(np.float32)
    zeros = rng.integers(0, 17, groups).astype(np.uint8) if kind == "zeros" else None
    zero = np.full(groups, 8) if zeros is None else zeros
    values = four.astype(np.float32) - zero.repeat(group, -1).astype(np.float32)
    return codes, scales, zeros, values * scales.repeat(group, -1)


def given(*arrays):
    return [None if each is None else jnp.asarray(each) for each in arrays]


@jax.jit
def tiled(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """The product of the same tiles of plain float32 numbers: the same order of sums."""
    ordered = jnp.concatenate([numbers[:, ::2], numbers[:, 1::2]], axis=1)
    tile_of = functools.partial(jax.lax.dynamic_slice_in_dim, ordered)
    return tiled_product(x, len(numbers), tile_of)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("kind", ["mxfp4", "int4", "zeros"])
def test_products_are_those_of_the_numbers_to_the_bit(kind, num_tokens, monkeypatch):
    monkeypatch.setattr(four_bits, "TILE_NUMBERS", 4 * 96)  # tiles of 4 outputs, and 3 left
    *packed, numbers = drawn(kind, (11, 96), 32)
    x = np.random.default_rng(1).standard_normal((num_tokens, 96)).astype(np.float32)
    found = np.asarray(jax.jit(packed_product)(jnp.asarray(x), *given(*packed)))
    assert found.tobytes() == np.asarray(tiled(x, numbers)).tobytes()
    np.testing.assert_allclose(found, x.astype(np.float64) @ numbers.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mxfp4", "int4", "zeros"])
def test_only_the_number_is_rounded_to_the_type_of_activations(kind):
    *packed, numbers = drawn(kind, (7, 64), 32)
    x = np.eye(64, dtype=ml_dtypes.bfloat16)
    found = np.asarray(packed_product(jnp.asarray(x), *given(*packed)))
    rounded = numbers.astype(ml_dtypes.bfloat16)
    assert np.array_equal(found.T, rounded.astype(np.float32))
    assert kind != "mxfp4" or np.array_equal(rounded.astype(np.float32), numbers)


@pytest.mark.parametrize("kind", ["mxfp4", "int4", "zeros"])
def test_blocks_of_inputs_are_added(kind):
    codes, scales, zeros, numbers = drawn(kind, (2, 10, 64), 32)
    scales, zeros = (None if x is None else x.swapaxes(1, 2) for x in (scales, zeros))
    x = np.random.default_rng(1).standard_normal((3, 128)).astype(np.float32)
    codes, scales, zeros = given(codes, scales, zeros)
    found = project_in(jnp.asarray(x), Matrix(codes, scales, zero=zeros))
    expected = x.astype(np.float64) @ np.concatenate(list(numbers), axis=1).T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    first = project_out(jnp.asarray(x[:, :64]), Matrix(codes[0], scales[0].T, zero=_first(zeros)))
    np.testing.assert_allclose(first, x[:, :64] @ numbers[0].T, rtol=1e-4, atol=1e-4)


def _first(zeros):
    return None if zeros is None else zeros[0].T


@pytest.mark.parametrize("kind", ["mxfp4", "int4", "zeros"])
def test_experts_are_those_of_the_numbers(kind):
    shapes = {"gate": (3, 40, 64), "up": (3, 40, 64), "down": (3, 64, 40)}
    groups = {"gate": 32, "up": 16, "down": 8}
    packed, plain = {}, {}
    for seed, (name, shape) in enumerate(shapes.items()):
        codes, scales, zeros, plain[name] = drawn(kind, shape, groups[name], seed)
        scales, zeros = (None if x is None else x.swapaxes(1, 2) for x in (scales, zeros))
        parts = zip(("", "_scale", "_zero"), given(codes, scales, zeros), strict=True)
        packed |= {f"{name}{suffix}": each for suffix, each in parts}
    x = np.random.default_rng(1).standard_normal((20, 64)).astype(np.float32)
    chosen = np.random.default_rng(2).integers(0, 3, (20, 2))
    routed, gains = sort_pairs(chosen, 3), jnp.full((20, 2), 0.5, jnp.float32)
    found = tile_loop(jnp.asarray(x), ExpertWeights(**packed), routed, gains)
    plain = {name: jnp.asarray(each) for name, each in plain.items()}
    expected = tile_loop(jnp.asarray(x), ExpertWeights(**plain), routed, gains)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3)
