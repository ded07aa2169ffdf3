"""Which groups units can form, and how arrangements of them turn into each other."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.arch.presets import PRESETS
from shiftjax.parallel.arrangements import (
    Change,
    all_groups,
    bound,
    changes,
    check_arrangement,
    equal_groups,
    parse_arrangement,
    possible_widths,
    released,
)
from shiftjax.parallel.grid import Grid, Group, unit_order
from shiftjax.parallel.layout import Layout

UNITS = 8
WIDTHS = possible_widths(UNITS)


def arrangements() -> st.SearchStrategy:
    def make(seed: int):
        rng, found = random.Random(seed), equal_groups(UNITS, 1)
        for group in rng.sample(all_groups(UNITS, WIDTHS), rng.randrange(8)):
            found = (
                bound(found, group)
                if all(other.width <= group.width for other in found if other.overlaps(group))
                else found
            )
        return found

    return st.integers(0, 10_000).map(make)


def test_groups_of_eight_units():
    assert len(all_groups(UNITS, WIDTHS)) == 15
    assert all_groups(UNITS, (1, 8))[0] == Group(0, 8)
    assert possible_widths(6) == (1, 2) and possible_widths(1) == (1,)


def test_arrangements_are_written_as_widths():
    assert parse_arrangement("4+2+1+1", UNITS, WIDTHS) == (
        Group(0, 4),
        Group(4, 2),
        Group(6, 1),
        Group(7, 1),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("4+2", "has 6 units, there are 8"),
        ("1+4+2+1", "a group of 4 cannot begin at unit 1; put wide groups first"),
        ("5+3", "no groups of 5 units"),
        ("4+two", "is no arrangement"),
    ],
)
def test_what_is_no_arrangement_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_arrangement(text, UNITS, WIDTHS)


@given(arrangements(), arrangements())
def test_changes_lead_from_one_arrangement_to_another(old, new):
    check_arrangement(old, UNITS)
    now = set(old)
    seen: set[int] = set()
    for change in changes(old, new):
        units = {u for g in change.sources for u in range(g.first, g.first + g.width)}
        assert units == {u for g in change.targets for u in range(g.first, g.first + g.width)}
        assert not units & seen and min(len(change.sources), len(change.targets)) == 1
        assert all(group.width < change.wide.width for group in change.narrow)
        seen |= units
        now = now - {*change.sources} | {*change.targets}
    assert tuple(sorted(now)) == new


def test_binding_and_releasing_undo_each_other():
    start = equal_groups(UNITS, 2)
    wide = bound(start, Group(4, 4))
    assert wide == (Group(0, 2), Group(2, 2), Group(4, 4))
    assert released(wide, Group(4, 4), 2) == start
    assert changes(start, wide) == [Change((Group(4, 2), Group(6, 2)), (Group(4, 4),))]


@pytest.mark.parametrize(
    ("num_kv_heads", "tp", "units"), [(8, 1, 8), (4, 1, 8), (3, 1, 8), (8, 2, 4), (2, 2, 4)]
)
def test_a_devices_heads_lie_inside_those_it_has_in_every_narrower_group(num_kv_heads, tp, units):
    """Which is what the order of units is for; in natural order it does not hold."""
    model = replace(PRESETS["llama-70b"], num_heads=16, num_kv_heads=num_kv_heads)
    grid, widths = Grid(tp, units), possible_widths(units)
    layouts = {width: Layout(model, width, tp, units) for width in widths}

    def heads(group: Group) -> dict[int, set[int]]:
        layout = layouts[group.width]
        devices = grid.devices_of(group)
        return {device: set(layout.kv_heads_of(j)) for j, device in enumerate(devices)}

    for group in all_groups(units, widths):
        for inner in all_groups(units, widths):
            if inner.width < group.width and inner.overlaps(group):
                narrow = heads(inner)
                wide = {d: h for d, h in heads(group).items() if d in narrow}
                assert all(wide[device] <= narrow[device] for device in narrow)


def test_the_order_of_units_is_its_own_inverse():
    assert unit_order(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    for width in (1, 2, 4, 8, 16):
        order = unit_order(width)
        assert [order[i] for i in order] == list(range(width))
    assert unit_order(3) == [0, 1, 2]


def test_blocks_have_as_many_bytes_in_every_width():
    model = replace(PRESETS["llama-70b"], num_kv_heads=4)
    sizes = []
    for width in WIDTHS:
        layout = Layout(model, width, 1, UNITS)
        tokens = layout.block_tokens(16)
        sizes.append((tokens, layout.kv_heads_per_device, tokens * layout.kv_heads_per_device))
    assert sizes == [(16, 4, 64), (32, 2, 64), (64, 1, 64), (64, 1, 64)]
