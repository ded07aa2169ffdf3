"""Every position has one owner, and what a device has of a sequence has no holes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.arch.presets import PRESETS
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import Positions

SPLITS = st.builds(Positions, st.integers(1, 16), st.sampled_from([1, 2, 3, 4, 8, 16]))
MANY = settings(max_examples=200, deadline=None)


@MANY
@given(SPLITS, st.integers(0, 2000))
def test_every_position_is_counted_at_one_place(split, num):
    owners = split.owner(np.arange(num))
    counts = [int(split.count(num, place)) for place in range(split.ways)]
    assert counts == [int((owners == place).sum()) for place in range(split.ways)]
    assert sum(counts) == num
    assert counts == sorted(counts, reverse=True)  # place 0 has most,
    assert counts[0] - counts[-1] <= split.block  # and no place much more than another


@MANY
@given(SPLITS, st.integers(1, 2000))
def test_slots_of_a_place_are_its_positions_one_after_the_other(split, num):
    positions = np.arange(num)
    for place in range(split.ways):
        slots, mine = split.own_slots(positions, place), split.owner(positions) == place
        assert (slots[mine] == np.arange(mine.sum())).all()
        assert (slots[~mine] == 0).all()


@MANY
@given(SPLITS, st.lists(st.integers(1, 99), min_size=1, max_size=9), st.data())
def test_a_block_of_a_table_is_the_same_block_at_every_place(split, table, data):
    position = data.draw(st.integers(0, len(table) * split.stripe - 1))
    block, offset = table[position // split.stripe], position % split.stripe
    slot = split.own_slots(block * split.stripe + offset, split.owner(position))
    assert slot // split.block == block
    own = split.count(position, split.owner(position))  # where the place has it in its own table
    assert (own // split.block, own % split.block) == (
        position // split.stripe,
        slot % split.block,
    )


@MANY
@given(SPLITS, st.integers(0, 500), st.integers(0, 500))
def test_what_lies_between_two_positions_lies_between_two_counts(split, low, high):
    low, high = sorted((low, high))
    owners = split.owner(np.arange(low, high))
    for place in range(split.ways):
        own = split.count(high, place) - split.count(low, place)
        assert own == (owners == place).sum()


@pytest.mark.parametrize(
    ("sp", "tp", "ways"), [(1, 1, 1), (1, 4, 1), (2, 4, 2), (4, 4, 4), (8, 1, 2)]
)
def test_devices_split_as_many_ways_as_there_would_be_copies(sp, tp, ways):
    layout = Layout(PRESETS["tiny"], sp, tp, by_position=True)
    assert layout.model.num_kv_heads == 4
    assert (layout.copies, layout.position_ways) == (ways, ways)
    positions = layout.positions(16)
    assert positions == (Positions(ways, 16 // ways) if ways > 1 else None)
    heads = [layout.kv_heads_of(device) for device in range(sp * tp)]
    for first in range(0, sp * tp, ways):  # those that split positions have the same heads
        assert heads[first : first + ways] == [heads[first]] * ways


def test_what_cannot_be_split_evenly_is_refused():
    layout = Layout(PRESETS["tiny"], 4, 4, by_position=True)
    with pytest.raises(ValueError, match="4 devices cannot split blocks of 6 tokens"):
        layout.positions(6)
