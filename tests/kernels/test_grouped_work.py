"""The tiles of a grouped product: every row of every expert once, none of two experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_work import Routed, divide_rows, most_tiles, place_pairs

EXPERTS, PAIRS, TILE = 6, 200, 16
SIZES = st.lists(st.integers(0, 33), min_size=EXPERTS, max_size=EXPERTS)
divide = jax.jit(divide_rows, static_argnums=(1, 2))


def tiles_of(sizes, pairs=PAIRS, tile=TILE):
    return [np.asarray(x) for x in divide(jnp.asarray(sizes, jnp.int32), pairs, tile)]


@settings(deadline=None)
@given(SIZES)
def test_every_row_is_in_one_tile_of_its_expert(sizes):
    ends, expert, first, rows, begin, siblings = tiles_of(sizes)
    count = ends[-1]
    covered = [
        (e, row)
        for e, begin, n in zip(expert[:count], first[:count], rows[:count], strict=True)
        for row in range(begin, begin + n)
    ]
    starts = np.cumsum([0, *sizes])
    assert covered == [(e, starts[e] + i) for e, n in enumerate(sizes) for i in range(n)]
    assert all(rows[:count] > 0) and all(rows[:count] <= TILE)
    assert not rows[count:].any() and not first[count:].any()
    assert expert.min() >= 0 and expert.max() < EXPERTS
    live = expert[:count].tolist()
    assert begin[:count].tolist() == [live.index(e) for e in live]
    assert siblings[:count].tolist() == [live.count(e) for e in live]


@jax.jit
def place(row, sizes):
    return place_pairs(Routed(row, sizes), divide_rows(sizes, PAIRS, TILE), TILE)


@settings(deadline=None)
@given(SIZES, st.integers(0, 99))
def test_every_own_pair_has_a_place_in_a_tile_of_its_expert(sizes, seed):
    row = np.random.default_rng(seed).permutation(PAIRS).astype(np.int32)
    sizes = np.asarray(sizes, np.int32)
    pair, places = (np.asarray(x) for x in place(row, sizes))
    own = row[: sizes.sum()]
    assert pair.reshape(-1)[places[own]].tolist() == own.tolist()
    expert = tiles_of(sizes)[1]
    assert expert[places[own] // TILE].tolist() == np.repeat(range(EXPERTS), sizes).tolist()
    assert not places[row[sizes.sum() :]].any()


@given(st.lists(st.integers(0, 99), min_size=1), st.integers(0, 40), st.integers(1, 64))
def test_there_is_room_for_all_tiles(sizes, spare, tile):
    assert sum(-(-n // tile) for n in sizes) <= most_tiles(sum(sizes) + spare, len(sizes), tile)


@pytest.mark.parametrize("sizes", [[1, 1, 17], [1, 1, 1], [33], [2, 0, 0]])
def test_there_is_no_more_room_than_some_sizes_need(sizes):
    most = most_tiles(sum(sizes), len(sizes), TILE)
    busy = min(sum(sizes), len(sizes))
    assert most == sum(-(-n // TILE) for n in [1] * (busy - 1) + [sum(sizes) - busy + 1])


def test_the_drawing_of_the_module_is_right():
    ends, expert, first, rows, *_ = (x.tolist() for x in tiles_of([2, 0, 5], 10, 4))
    assert (ends, expert[:3], first[:3], rows[:3]) == ([1, 1, 3], [0, 2, 2], [0, 2, 6], [2, 4, 1])
