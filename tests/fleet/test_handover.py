"""In which calls blocks move: few, and none writes what a later one has yet to read."""

import random

import pytest
from echo_kit import Listener, make_request, run_to_end
from fleet_kit import assert_as_alone, make_fleet
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.handover import Pair, calls
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups

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


@given(seed=st.integers(0, 1 << 30), per_call=st.integers(1, 5))
def test_nothing_is_overwritten_before_it_is_read(seed, per_call):
    """In both directions: there, and back in the opposite order."""
    pairs = bind(random.Random(seed), 40, 30)
    for ordered, to_wide in ((pairs, True), (pairs[::-1], False)):
        found = calls(ordered, WAYS, per_call)
        assert sorted(pair for call in found for one in call for pair in one) == sorted(ordered)
        written: set[tuple[int, int]] = set()
        for call in found:
            assert all(len(one) <= per_call for one in call)
            assert all(pair[0] == place for place, one in enumerate(call) for pair in one)
            mine = [pair for one in call for pair in one]
            narrow = {(place, block) for place, blocks, _ in mine for block in blocks}
            wide = {(place, number) for _, _, number in mine for place in range(WAYS)}
            assert not (narrow if to_wide else wide) & written
            written |= wide if to_wide else narrow


@pytest.mark.parametrize("per_call", [1, 3])
def test_places_that_have_the_same_to_move_fill_their_calls(per_call):
    """Eight blocks of a sequence on one place do not take eight calls of their own."""
    order = [(place, sequence) for sequence in range(6) for place in range(WAYS)]
    pairs: list[Pair] = [
        (place, (8 * sequence + i + 1,), 1000 + 100 * place + 8 * sequence + i)
        for place, sequence in order
        for i in range(8)
    ]
    assert len(calls(pairs, WAYS, per_call)) == 6 * 8 // per_call


@pytest.mark.parametrize("num_blocks", [13, 40])  # 12 are usable, of which one unit needs all
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("widths", [(1, 8), (8, 1)])
@pytest.mark.parametrize("num_kv_heads", [8, 1])  # of one, positions are split
def test_only_what_is_computed_is_moved(num_kv_heads, widths, num_steps, num_blocks):
    """A prompt of 21 tokens in chunks of 8, then decodes: 16 tokens fill a block of 8 units.

    Of a block that is filled in part so many narrow blocks cross as hold something; so it does in
    a pool where a block has to be given up before another is taken.
    """
    before, after = (equal_groups(8, width) for width in widths)
    budgets = {"max_num_batched_tokens": 8, "watermark": 0.0, "overlap": False}
    heads = {"num_kv_heads": num_kv_heads, "by_position": num_kv_heads == 1}
    engine = make_fleet(
        num_blocks=num_blocks, arrangement=before, max_model_len=25, **heads, **budgets
    )
    prompt = [n % 13 for n in range(21 if num_steps < 5 else 14)]
    request = make_request("a", prompt, max_tokens=25 - len(prompt), ignore_eos=True)
    engine.add_request(request)
    listener = Listener()
    for turn in range(num_steps):
        listener.hear(engine.step(float(turn)))
    (source,) = (lane for lane in engine.lanes if lane.scheduler.running)
    (sequence,) = source.scheduler.running
    computed = sequence.num_computed_tokens
    assert computed == {1: 8, 2: 16, 3: 21, 4: 22, 7: 19}[num_steps]
    engine.topology.find(Fleet).begin(Wish(after, "told"), float(num_steps))
    engine.topology.find(Fleet).turn(lambda most: [], 0, 1, float(num_steps))
    (turn,) = engine.topology.find(Fleet).history
    assert (turn.num_sequences, turn.num_recomputed) == (1, 0)
    assert sum(engine.topology.find(Fleet).stats.moved_blocks.values()) == -(-computed // 2)
    (target,) = (lane for lane in engine.lanes if lane.scheduler.running)
    size = target.scheduler.config.block_size
    assert len(sequence.block_table) == -(-len(sequence.token_ids) // size)
    run_to_end(engine, listener)
    assert_as_alone(engine, [request], listener)
