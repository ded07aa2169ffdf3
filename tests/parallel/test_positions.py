"""Every position has one owner, and what a device has of a sequence has no holes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.arch.presets import PRESETS
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import Positions, gathered_tokens, span_blocks


@st.composite
def splits(draw: st.DrawFn) -> Positions:
    """Of a group alone, or of one of a fleet."""
    block, alone = draw(st.sampled_from([1, 2, 3, 4, 8, 16])), draw(st.booleans())
    times = 1 if alone else 2 ** draw(st.integers(0, 4))
    return Positions(draw(st.integers(1, 16 // times)) * times, block, times)


SPLITS = splits()
MANY = settings(max_examples=200, deadline=None)


@MANY
@given(SPLITS, st.integers(0, 2000))
def test_every_position_is_counted_at_one_place(split, num):
    owners = split.owner(np.arange(num))
    counts = [int(split.count(num, place)) for place in range(split.ways)]
    assert counts == [int((owners == place).sum()) for place in range(split.ways)]
    assert sum(counts) == num
    by_run = [counts[split.place(run)] for run in range(split.ways)]
    assert by_run == sorted(counts, reverse=True) and by_run[0] == counts[0]  # place 0 has most,
    assert counts[0] - min(counts) <= split.block  # and no place much more than another
    assert [split.run(split.place(run)) for run in range(split.ways)] == list(range(split.ways))


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


def held(layout: Layout, tokens: int, unit_block: int) -> list[list[frozenset]]:
    """Of each place its blocks of a sequence, each as (token, head)."""
    size = layout.block_tokens(unit_block)
    positions = layout.positions(size) or Positions(1, size)
    owners, found = positions.owner(np.arange(tokens)), []
    for place in range(layout.num_devices):
        mine, heads = np.flatnonzero(owners == place % positions.ways), layout.kv_heads_of(place)
        blocks = np.split(mine, len(mine) // positions.block)
        found.append([frozenset((t, h) for t in block for h in heads) for block in blocks])
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("widths", [(1, 2, 4, 8), (2, 8), (1, 4)])
def test_groups_of_a_fleet_move_whole_blocks_among_few_devices(tp, num_kv_heads, widths):
    """A narrow place's are those of the wide places that it becomes, and each gets whole ones."""
    heads = {"num_heads": 32, "num_kv_heads": num_kv_heads}
    model, unit = replace(PRESETS["tiny"], **heads), 4 * max(1, tp // num_kv_heads)
    layouts = [Layout(model, w, tp, widths[-1], by_position=True) for w in widths]
    tokens = 3 * max(layout.block_tokens(unit) for layout in layouts)
    places = [held(layout, tokens, unit) for layout in layouts]
    for (few, thin), (many, thick) in itertools.combinations(zip(layouts, places, strict=True), 2):
        ways, own = many.sp // few.sp, few.kv_heads_per_device == many.kv_heads_per_device
        for place, blocks in enumerate(thin):
            mine = thick[place * ways : place * ways + ways]
            assert frozenset().union(*blocks) == frozenset().union(*itertools.chain(*mine))
            assert sum(map(len, blocks)) == sum(map(len, itertools.chain(*mine)))  # and no copies
            if own:
                assert set(blocks) == set(itertools.chain(*mine))
            assert len({len(each) for each in itertools.chain(blocks, *mine)}) == 1


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


@pytest.mark.parametrize(
    ("stripe", "tokens", "gathered"),
    [(64, 4096, 4096), (96, 4096, 3840), (24, 100, 96), (512, 128, 512)],
)
def test_what_is_gathered_is_whole_spans_where_there_is_room(stripe, tokens, gathered):
    """Of 128 tokens; else whole stripes, and one at least."""
    assert gathered_tokens(stripe, tokens) == gathered
    assert stripe * span_blocks(stripe) % 128 == 0
