"""Lengths and mode against every combination there is."""

from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.choice import Room, by_cost, choose, fill, fixed

steady = settings(deadline=None, derandomize=True, max_examples=200)

BUCKETS = (4, 8, 16)

rates = st.floats(0.01, 1.0)
drafts = st.lists(st.lists(rates, max_size=3), min_size=1, max_size=4).map(
    lambda found: [(f"s{i}", list(accumulate(p, mul))) for i, p in enumerate(found)]
)
budgets = st.sampled_from([9, 5, 3, 1, 0])
bases = st.sampled_from(range(1, 19))
rooms = st.builds(Room, bases, budgets, budgets, st.just(BUCKETS))


def every_choice(candidates, room):
    """(lengths by name, expected tokens) of all that fits."""
    names = [name for name, _ in candidates]
    for lengths in product(*(range(len(survivals) + 1) for _, survivals in candidates)):
        if sum(lengths) <= room.most:
            gain = sum(sum(s[:n]) for (_, s), n in zip(candidates, lengths, strict=True))
            yield {name: n for name, n in zip(names, lengths, strict=True) if n}, gain


def padded(table):
    """Seconds of a step by the bucket that holds it; larger than all of them: a long time."""
    return lambda tokens: next((table[b] for b in BUCKETS if b >= tokens), 99.0)


costs = st.fixed_dictionaries(
    {b: st.floats(0.5, 9.0).map(lambda seconds, b=b: seconds + b / 4) for b in BUCKETS}
)


@steady
@given(drafts, rooms, costs, costs, st.floats(0, 2))
def test_cost_finds_the_best_of_all_lengths_and_modes(candidates, room, base, shift, drafting):
    """Where a step runs in its quicker mode, no pair of lengths and mode is better."""
    modes = padded(base), padded(shift)

    def rate(lengths, gain, mode):
        cost = mode(room.base_tokens + sum(lengths.values()))
        return (room.base_tokens + gain) / (cost + (drafting if lengths else 0.0))

    def quicker(tokens):
        return min(mode(tokens) for mode in modes)

    chosen = by_cost(candidates, room, quicker, drafting)
    everything = list(every_choice(candidates, room))
    best = max(rate(*some, mode) for some in everything for mode in modes)
    gain = next(gain for lengths, gain in everything if lengths == chosen)
    assert rate(chosen, gain, quicker) == pytest.approx(best)
    assert rate(chosen, gain, quicker) >= rate({}, 0.0, quicker)


@steady
@given(drafts, rooms, st.none() | st.integers(0, 20))
def test_fill_takes_the_most_probable_tokens_that_cost_nothing(candidates, room, most_tokens):
    lengths = fill(candidates, room, most_tokens)
    num, base = sum(lengths.values()), room.base_tokens
    bucket = next((b for b in BUCKETS if b >= base), base)
    free = bucket - base
    if most_tokens is not None and base <= most_tokens:
        free = min(free, most_tokens - base)
    assert num == min(free, room.most, sum(len(survivals) for _, survivals in candidates))
    gains = [(some, gain) for some, gain in every_choice(candidates, room)]
    gain = next(gain for some, gain in gains if some == lengths)
    assert gain == pytest.approx(max(g for some, g in gains if sum(some.values()) == num))


def test_drafting_time_is_a_cost():
    room = Room(1, 9, 9, (1, 2))

    def seconds(tokens):
        return 1.0 if tokens < 2 else 1.2

    assert by_cost([("a", [0.5])], room, seconds) == {"a": 1}
    assert by_cost([("a", [0.5])], room, seconds, proposing_seconds=0.4) == {}


def test_the_fixed_rule_has_two_caps():
    candidates = [(i, [0.5, 0.5]) for i in range(4)]
    room = Room(4, 99, 99, (64,), num_running=4)
    assert fixed(candidates, room, max_seqs=2, off_seqs=0) == {0: 2, 1: 2}
    assert fixed(candidates, room, max_seqs=0, off_seqs=5) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert fixed(candidates, room, max_seqs=0, off_seqs=4) == {}
    assert fixed(candidates, room._replace(rows_left=3), 0, 0) == {0: 2, 1: 1}
    assert fixed(candidates, room._replace(tokens_left=1), 0, 0) == {0: 1}
    assert fixed(candidates, room._replace(buckets=(8,)), 0, 0) == {0: 2, 1: 2}


@pytest.mark.parametrize("rule", ["fill", "cost", "fixed"])
def test_the_setting_picks_the_rule(rule):
    chosen = {"fixed_drafts": True} if rule == "fixed" else {"draft_choice": rule}
    options = DraftOptions(speculation="suffix", draft_max_seqs=1, **chosen)
    candidates = [("a", [0.9, 0.1]), ("b", [0.8, 0.7])]
    room = Room(1, 9, 9, (3, 4), num_running=2)
    expected = {"fill": {"a": 1, "b": 1}, "cost": {"a": 1, "b": 2}, "fixed": {"a": 2}}
    found = choose(options, candidates, room, seconds=lambda tokens: 1.0)
    assert found == expected[rule]


def test_the_cost_rule_without_a_cost_model_fills():
    options = DraftOptions(speculation="suffix", draft_choice="cost")
    assert choose(options, [("a", [0.9] * 9)], Room(1, 9, 9, (3, 8))) == {"a": 2}


@pytest.mark.parametrize(
    "room", [Room(1, 0, 9, (8,)), Room(1, 9, 0, (8,)), Room(9, 9, 9, (8,)), Room(1, 9, 9, ())]
)
def test_without_room_there_are_no_drafts(room):
    for rule in ("fill", "cost", "fixed"):
        chosen = {"fixed_drafts": True} if rule == "fixed" else {"draft_choice": rule}
        options = DraftOptions(speculation="suffix", **chosen)
        own = room._replace(num_running=1)
        found = choose(options, [("a", [0.9])], own, seconds=lambda tokens: 1.0)
        assert found == {}
