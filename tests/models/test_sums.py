"""Sums over devices by each row of `numerics`."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives, counted
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shiftjax.arch.numerics import NUMERICS
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.collectives import Carried, parts_collectives
from shiftjax.models.layers import unit_norm
from shiftjax.models.sums import SUMS, Ways, tree_sum
from shiftjax.parallel.layout import Layout

LEAVES, ROWS, WIDTH = 8, 6, 16
STRICT = [name for name, each in NUMERICS.items() if each.is_strict]


def leaves_of(seed: int, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, 3, (LEAVES, ROWS, 1)))
    return (scale * sizes * rng.standard_normal((LEAVES, ROWS, WIDTH))).astype(np.float32)


def summer(name: str, num: int, dtype=jnp.bfloat16):
    """What sums over so many devices, each of which has its part of the leaves."""
    mesh, ways = Mesh(jax.devices()[:num], ("x",)), Ways(("x",), num, LEAVES)

    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    def run(own: jax.Array) -> jax.Array:
        return SUMS[name].over(SUMS[name].own(list(own)), ways, dtype)

    return jax.jit(run)


def summed(name: str, leaves: np.ndarray, num: int, dtype=jnp.bfloat16) -> np.ndarray:
    """The sum over so many devices."""
    return np.asarray(summer(name, num, dtype)(leaves))


@pytest.mark.parametrize("name", NUMERICS)
def test_a_sum_moves_what_the_costs_count(name):
    """In float32, because XLA:CPU widens what is exchanged of 16 bits."""
    model = replace(PRESETS["tiny"], hidden_size=WIDTH)
    layout, tokens, dtype = Layout(model, 1, LEAVES), 2 * LEAVES, np.dtype(np.float32)
    moves = parts_collectives(
        layout, layout.shift, tokens, model.parts[0], Carried(dtype.itemsize, sums=name)
    )
    leaves = jax.ShapeDtypeStruct((LEAVES, tokens, WIDTH), dtype)
    text = summer(name, LEAVES, dtype).lower(leaves).compile().as_text()
    assert counted(moves) == Counter({key: 2 * n for key, n in collectives(text).items()})


def test_every_row_has_its_sum():
    assert SUMS.keys() == NUMERICS.keys()


def test_a_tree_adds_neighbours():
    parts = [jnp.asarray(x, jnp.float32) for x in (1e8, 1, -1e8, 1)]
    assert tree_sum(parts) == (parts[0] + parts[1]) + (parts[2] + parts[3])


@pytest.mark.parametrize("name", STRICT)
def test_a_strict_sum_has_the_same_bits_on_any_number_of_devices(name):
    for seed in range(3):
        leaves = leaves_of(seed)
        first, *others = (summed(name, leaves, num, jnp.float32) for num in (8, 4, 2, 1))
        assert all(np.array_equal(first, other) for other in others)
        np.testing.assert_allclose(first, leaves.sum(0), rtol=1e-5, atol=1e-5 * abs(leaves).max())


def test_the_others_sum_what_devices_have():
    leaves = leaves_of(0)
    for name in ("fast", "float32"):
        found = summed(name, leaves, 8, jnp.float32)
        np.testing.assert_allclose(found, leaves.sum(0), rtol=1e-5, atol=1e-4)


def test_a_sum_is_rounded_once():
    """Rounded before they are added, none of the ones would count."""
    leaves = np.zeros((LEAVES, ROWS, WIDTH), np.float32)
    leaves[0], leaves[1:] = 256, 0.5
    for name in ("float32", *STRICT):
        assert (summed(name, leaves, 8).astype(np.float32) == 260).all(), name


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(name, bad):
    leaves = leaves_of(0)
    leaves[3, 2, 5] = bad
    found = summed(name, leaves, 8).astype(np.float32)
    assert not np.isfinite(found[2]).all()
    assert np.isfinite(np.delete(found, 2, axis=0)).all()


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e30])
def test_integers_keep_what_bfloat16_keeps_whatever_the_size(scale):
    leaves = leaves_of(5, scale)[:, :1]
    found = summed("integer", leaves, 1, jnp.float32)
    most = abs(leaves).max()
    assert abs(found - leaves.astype(np.float64).sum(0)).max() <= LEAVES * most * 2.0**-26


@pytest.mark.parametrize("width", [64, 80, 576])
def test_norms_have_the_bits_of_each_row_however_many_there_are(width):
    """XLA:CPU takes the mean of a row in an order that depends on how many rows there are."""
    x = np.random.default_rng(0).standard_normal((64, width)).astype(np.float32)
    norm = jax.jit(partial(unit_norm, eps=1e-5))
    parts = [norm(x[i : i + 16]) for i in range(0, len(x), 16)]
    np.testing.assert_array_equal(np.concatenate(parts), norm(x))
