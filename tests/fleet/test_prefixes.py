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


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("width", [1, 2])
def test_a_prefix_that_was_found_again_is_found_where_a_release_has_moved_it(width, by_position):
    engine, listener = fleet_of(by_position=by_position), Listener()
    fleet = engine.topology.find(Fleet)
    bind(engine, 4, 0.0)
    other = [12 - token for token in PROMPT]
    requests = [
        ask(engine, str(n), [*prompt, n], listener)
        for n, prompt in enumerate((PROMPT, PROMPT, other, other))
    ]
    bind(engine, width, 4.0)
    narrow_size = next(
        lane.scheduler.config.block_size
        for lane in fleet.lanes.values()
        if lane.group.width == width
    )
    assert fleet.stats.num_adopted_blocks == 2 * 32 // narrow_size
    found = [hits(engine)[0]]
    for number, prompt in enumerate((PROMPT, other)):
        # Both at once: each goes where its prefix is, and the two prefixes were spread.
        request = make_request(str(number + 5), [*prompt, 9], 5.0, max_tokens=3, ignore_eos=True)
        engine.add_request(request)
        requests.append(request)
    while engine.has_work():
        listener.hear(engine.step(5.0))
        engine.check()
    found.append(hits(engine)[0])
    assert found[1] - found[0] == 64 and hits(engine)[1] == 0
    used = [lane for lane in fleet.lanes.values() if lane.state == "open" and lane.runner.plans]
    assert len(used) == 2
    bind(engine, 4, 6.0)  # where the wide group has them still, or has them again
    for prompt in (PROMPT, other):
        requests.append(ask(engine, str(len(requests) + 5), [*prompt, 1], listener))
    assert hits(engine)[0] - found[1] == 64
    assert_as_alone(engine, requests, listener)
    assert_quiescent(engine)


def test_a_prefix_goes_where_a_release_takes_a_sequence_that_has_it():
    engine, listener = fleet_of(), Listener()
    bind(engine, 4, 0.0)
    requests = [ask(engine, str(n), [*PROMPT, n], listener) for n in range(2)]
    requests.append(make_request("2", [*PROMPT, 7], 2.0, max_tokens=12, ignore_eos=True))
    engine.add_request(requests[-1])
    for _ in range(3):
        listener.hear(engine.step(2.0))
    fleet = engine.topology.find(Fleet)
    bind(engine, 1, 3.0)
    assert fleet.stats.num_moved_sequences == 1
    assert fleet.stats.num_adopted_blocks == 0  # it is there with the sequence
    before, _ = hits(engine)
    requests.append(make_request("3", [*PROMPT, 8], 3.0, max_tokens=2, ignore_eos=True))
    engine.add_request(requests[-1])
    while engine.has_work():
        listener.hear(engine.step(4.0))
        engine.check()
    assert hits(engine)[0] - before == 32
    (used,) = (lane for lane in fleet.lanes.values() if lane.state == "open" and lane.runner.plans)
    assert len(used.runner.plans) > 2
    assert_quiescent(engine)


def test_the_chain_of_a_prefix_outlives_a_release_and_a_bind():
    """From the wide group to a narrow one, which alone has it then, and to another wide one."""
    engine, listener = fleet_of(), Listener()
    bind(engine, 4, 0.0)
    requests = [ask(engine, str(n), [*PROMPT, n], listener) for n in range(2)]
    bind(engine, 1, 2.0)
    requests.append(ask(engine, "3", [*PROMPT, 3], listener))
    bind(engine, 2, 4.0)
    before, _ = hits(engine)
    requests.append(ask(engine, "5", [*PROMPT, 5], listener))
    assert hits(engine)[0] - before == 32
    for lane in engine.topology.find(Fleet).lanes.values():
        known = lane.scheduler.tables.device.shown()
        first = [each for each in known if each.parent is None]
        assert len(first) == bool(known)
        assert {each.parent for each in known} - {None} <= {each.block_hash for each in known}
    assert_as_alone(engine, requests, listener)


def test_what_was_swapped_out_goes_on_in_any_group():
    policy = {"preemption": "swap", "num_host_blocks": 100, "prefix_caching": False}
    engine, listener = fleet_of(num_blocks=30, watermark=0.0, **policy), Listener()
    fleet = engine.topology.find(Fleet)
    (first, *_) = (lane for group, lane in fleet.lanes.items() if group == Group(0, 1))
    requests = [
        make_request(str(n), PROMPT[:20], 0.0, max_tokens=25, ignore_eos=True) for n in range(8)
    ]
    for request in requests:
        engine.add_request(request)
    while not any(each.places for each in first.scheduler.waiting):
        listener.hear(engine.step(0.0))
    swapped = next(each for each in first.scheduler.waiting if each.places)
    listener.hear(engine.settle(0.5))
    num_computed = swapped.num_computed_tokens
    fleet.policy.wishes = [Wish(equal_groups(UNITS, 4), "told", "move")]
    fleet.turn(lambda _: [], 0, 0, 1.0)
    assert len(fleet.arrangement) == 1
    assert swapped.num_computed_tokens >= num_computed > 20
    while engine.has_work():
        listener.hear(engine.step(2.0))
        engine.check()
    (wide,) = (lane for group, lane in fleet.lanes.items() if group == Group(0, 4))
    assert wide.scheduler.tables.tier.num_restored_blocks > 0
    assert_as_alone(engine, requests, listener)
    assert_quiescent(engine)
