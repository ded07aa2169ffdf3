"""Prefixes that narrow groups have cached are found in the wide group that they are bound to."""

import itertools

import pytest
from echo_kit import Listener, assert_quiescent, make_request
from echo_pools import Told
from fleet_kit import assert_as_alone, make_fleet

from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.prefixes import MOST_FILLED
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups
from shiftjax.parallel.grid import Group

UNITS = 4
PROMPT = [(5 * i) % 13 for i in range(33)]


def ask(engine, name: str, prompt: list[int], listener: Listener, max_tokens: int = 3):
    """Serve a request to its end."""
    request = make_request(name, prompt, float(name), max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(request)
    while engine.has_work():
        listener.hear(engine.step(float(name)))
        engine.check()
    return request


def bind(engine, width: int, now: float) -> None:
    """Have groups of a width; what steps say meanwhile is nobody's."""
    fleet, wanted = engine.topology.find(Fleet), equal_groups(UNITS, width)
    fleet.policy.wishes = [Wish(wanted, "told", "move")]
    for _ in range(8):
        if fleet.arrangement != wanted:
            engine.step(now)
            engine.check()
    assert fleet.arrangement == wanted


def fleet_of(num_blocks: int = 60, **options):
    """One narrow group with work at a time, so that requests meet."""
    policy = Told()
    return make_fleet(units=UNITS, num_blocks=num_blocks, policy=policy, **options)


def hits(engine) -> tuple[int, int]:
    """(tokens that were found, sequences whose prefix another width has) of all groups."""
    tables = [lane.scheduler.tables for lane in engine.topology.find(Fleet).lanes.values()]
    found = sum(each.num_prefix_hit_tokens for each in tables)
    return found, sum(each.num_prefix_hits_elsewhere for each in tables)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_a_prefix_that_was_found_again_is_found_in_a_wide_group(width, by_position):
    engine, listener = fleet_of(by_position=by_position), Listener()
    # The least loaded group is always the first one, as nothing else runs.
    requests = [ask(engine, str(n), [*PROMPT, n], listener) for n in range(2)]
    before, _ = hits(engine)
    assert before >= 30
    bind(engine, width, 2.0)
    fleet = engine.topology.find(Fleet)
    adopted = fleet.stats.num_adopted_blocks
    wide_size = next(
        lane.scheduler.config.block_size
        for lane in fleet.lanes.values()
        if lane.group.width == width
    )
    assert adopted == 32 // wide_size > 0
    requests.append(ask(engine, "3", [*PROMPT, 9], listener))
    after, elsewhere = hits(engine)
    assert after - before == 32 and elsewhere == 0
    assert fleet.stats.moved_blocks["bind"] >= adopted
    assert_as_alone(engine, requests, listener)
    assert_quiescent(engine)


def test_what_nobody_has_found_again_is_not_moved():
    engine, listener = fleet_of(), Listener()
    ask(engine, "0", PROMPT, listener)
    bind(engine, 4, 1.0)
    stats = engine.topology.find(Fleet).stats
    assert stats.num_adopted_blocks == 0 and not stats.moved_blocks["bind"]
    ask(engine, "2", PROMPT, listener)
    assert hits(engine) == (0, 1)


def test_what_goes_along_with_a_sequence_is_moved_once():
    engine, listener = fleet_of(), Listener()
    ask(engine, "0", PROMPT, listener)
    engine.add_request(make_request("1", [*PROMPT, 4], 1.0, max_tokens=9, ignore_eos=True))
    for _ in range(3):
        listener.hear(engine.step(1.0))
    bind(engine, 4, 2.0)
    stats = engine.topology.find(Fleet).stats
    assert stats.num_moved_sequences == 1 and stats.num_adopted_blocks == 0
    before, _ = hits(engine)
    engine.add_request(make_request("2", [*PROMPT, 5], 2.0, max_tokens=2, ignore_eos=True))
    while engine.has_work():
        listener.hear(engine.step(3.0))
        engine.check()
    after, _ = hits(engine)
    assert after - before == 32


@pytest.mark.parametrize("num_blocks", [26, 44])
def test_prefixes_fill_half_of_what_is_free_the_last_used_first(num_blocks):
    engine, listener = fleet_of(num_blocks=num_blocks), Listener()
    old, new = PROMPT[:25], [7] * 25
    for number, prompt in enumerate((old, old, new, new)):
        ask(engine, str(number), [*prompt, number], listener, 1)
    bind(engine, 2, 4.0)
    fleet = engine.topology.find(Fleet)
    (wide,) = (lane for lane in fleet.lanes.values() if lane.group == Group(0, 2))
    assert wide.scheduler.tables.device.num_free_blocks == num_blocks - 1
    adopted = fleet.stats.num_adopted_blocks
    assert adopted == 12 if num_blocks == 44 else 6 <= adopted < (num_blocks - 1) // MOST_FILLED
    found = [hits(engine)[0]]
    for number, prompt in enumerate((new, old)):
        ask(engine, str(number + 5), [*prompt, number], listener, 1)
        found.append(hits(engine)[0])
    first, second = (b - a for a, b in itertools.pairwise(found))
    # In the small pool new blocks are where some of the prefixes were.
    assert (first, second) == (24, 24) if num_blocks == 44 else first >= 16
    assert_quiescent(engine)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize(("first", "second"), [(1, 4), (4, 1), (2, 4), (2, 1)])
def test_what_one_width_left_on_the_host_any_other_reads(first, second, by_position):
    options = {"num_blocks": 24, "num_host_blocks": 400, "by_position": by_position}
    engine, listener = fleet_of(**options), Listener()
    fleet = engine.topology.find(Fleet)
    bind(engine, first, 0.0)
    readers = [lane for lane in fleet.lanes.values() if lane.group.width == second]
    # The blocks of the one prompt make room for those of others, which are as long.
    requests = [ask(engine, "0", PROMPT, listener)]
    while readers[0].scheduler.tables.num_known_tokens(requests[0], []) < 32:
        number = len(requests)
        requests.append(ask(engine, str(number), [number % 13] * 33, listener))
    now = len(requests)
    bind(engine, second, float(now))
    before, _ = hits(engine)
    requests.append(ask(engine, str(now), PROMPT, listener))
    after, _ = hits(engine)
    units = sum(len(plan.unit_restores) for lane in readers for plan in lane.runner.plans)
    assert units > 0 and after - before == 32
    assert_as_alone(engine, requests, listener)
    assert_quiescent(engine)
