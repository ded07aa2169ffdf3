"""In which calls blocks move: few, and none writes what a later one has yet to read."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.control.handover import Pair, calls

WAYS = 4


def bind(rng: random.Random, num_sequences: int, num_blocks: int) -> list[Pair]:
    """Pairs in the order of a hand-over in a full pool: new blocks have just been given up."""
    free, pairs = set(range(num_blocks)), []
    held = [set(rng.sample(sorted(free), rng.randrange(num_blocks))) for _ in range(WAYS)]
    for _ in range(num_sequences):
        place = rng.randrange(WAYS)
        blocks = tuple(rng.sample(sorted(held[place]), min(len(held[place]), rng.randrange(1, 4))))
        held[place] -= set(blocks)
        common = sorted(free.difference(*held))
        if blocks and common:
            taken = rng.choice(common)
            free.discard(taken)
            pairs.append((place, blocks, taken))
    return pairs


@given(seed=st.integers(0, 1 << 30), chunk=st.integers(1, 5))
def test_nothing_is_overwritten_before_it_is_read(seed, chunk):
    """In both directions: there, and back in the opposite order."""
    pairs = bind(random.Random(seed), 40, 30)
    for ordered, to_wide in ((pairs, True), (pairs[::-1], False)):
        found = calls(ordered, WAYS, chunk)
        assert sorted(pair for call in found for one in call for pair in one) == sorted(ordered)
        written: set[tuple[int, int]] = set()
        for call in found:
            assert all(len(one) <= chunk for one in call)
            assert all(pair[0] == place for place, one in enumerate(call) for pair in one)
            mine = [pair for one in call for pair in one]
            narrow = {(place, block) for place, blocks, _ in mine for block in blocks}
            wide = {(place, number) for _, _, number in mine for place in range(WAYS)}
            assert not (narrow if to_wide else wide) & written
            written |= wide if to_wide else narrow


@pytest.mark.parametrize("chunk", [1, 3])
def test_places_that_have_the_same_to_move_fill_their_calls(chunk):
    """Eight blocks of a sequence on one place do not take eight calls of their own."""
    order = [(place, sequence) for sequence in range(6) for place in range(WAYS)]
    pairs: list[Pair] = [
        (place, (8 * sequence + i + 1,), 1000 + 100 * place + 8 * sequence + i)
        for place, sequence in order
        for i in range(8)
    ]
    assert len(calls(pairs, WAYS, chunk)) == 6 * 8 // chunk
