"""What a fleet says of itself: a value of its own, that agrees with what has happened."""

import json

from echo_kit import Listener, make_request, run_to_end
from echo_pools import Told
from fleet_kit import make_fleet

from shiftjax.core.engine import Engine
from shiftjax.core.request import Request, SamplingParams
from shiftjax.fleet.fleet_policy import NeedPolicy, Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.state import NUM_CHANGES, REASONS, FleetState, plain_state
from shiftjax.parallel.arrangements import equal_groups, possible_widths
from shiftjax.parallel.grid import Group

UNITS, BLOCK_BYTES = 8, 10


def told(engine: Engine, width: int, kind: str = "move") -> None:
    policy = engine.topology.find(Fleet).policy
    assert isinstance(policy, Told)
    policy.wishes = [Wish(equal_groups(UNITS, width), "told", kind)]


def busy_fleet(**fleet) -> tuple[Engine, Listener]:
    engine, listener = make_fleet(fleet={"block_bytes": BLOCK_BYTES} | fleet), Listener()
    for number in range(8):
        engine.add_request(make_request(str(number), [1, 2, number], max_tokens=30))
    for turn in range(3):
        listener.hear(engine.step(float(turn)))
    return engine, listener


def test_bytes_are_those_of_all_units_that_hold_parts_of_a_block():
    engine, listener = busy_fleet()
    moved: list[tuple[int, int]] = []
    for turn, width in enumerate((2, 8, 4, 1), 3):
        before = engine.stats().find(FleetState).stats
        told(engine, width)
        for _ in range(3):
            listener.hear(engine.step(float(turn)))
        after = engine.stats().find(FleetState).stats
        blocks = after.moved_blocks.total() - before.moved_blocks.total()
        moved.append((blocks, after.moved_bytes.total() - before.moved_bytes.total()))
    widths = 1, 2, 4, 1  # of the narrow groups of each change
    assert all(blocks for blocks, _ in moved)
    for (blocks, num_bytes), width in zip(moved, widths, strict=True):
        assert num_bytes == blocks * width * BLOCK_BYTES
    run_to_end(engine, listener)


def test_a_state_stays_what_it_was():
    engine, listener = busy_fleet()
    before = engine.stats().find(FleetState)
    shown = plain_state(before, 3.0)
    told(engine, 8)
    run_to_end(engine, listener)
    after = engine.stats().find(FleetState)
    assert plain_state(before, 3.0) == shown
    assert before.arrangement == equal_groups(UNITS, 1) and before.changes == ()
    assert after.arrangement == (Group(0, 8),)
    assert len(after.changes) == after.stats.move_seconds.buckets()[-1][1] == 1
    assert before.stats.move_seconds.buckets()[-1][1] == 0


def test_groups_and_their_load_are_told():
    engine, listener = busy_fleet()
    groups = engine.stats().find(FleetState).groups
    assert [each.group for each in groups] == list(equal_groups(UNITS, 1))
    assert [each.num_running for each in groups] == [1] * 8
    assert {(each.state, each.mode) for each in groups} == {("open", "shift")}
    assert all(0 < each.kv_usage < 0.5 for each in groups)
    told(engine, 8, "hard")
    engine.add_request(make_request("wide", [3, 4], max_tokens=20))
    for turn in range(3, 6):
        listener.hear(engine.step(float(turn)))
    state = engine.stats().find(FleetState)
    states = {each.group: each.state for each in state.groups}
    assert states == {Group(0, 8): "open"} | dict.fromkeys(equal_groups(UNITS, 1), "paused")
    assert state.num_paused_sequences == 8
    run_to_end(engine, listener)
    assert engine.stats().find(FleetState).num_paused_sequences == 0


def test_plain_data_is_json_and_says_which_units_changed_and_why():
    engine, listener = busy_fleet()
    for turn, width in enumerate((4, 1), 3):
        told(engine, width)
        listener.hear(engine.step(float(turn)))
        listener.hear(engine.step(float(turn)))
    found = plain_state(engine.stats().find(FleetState), 10.0)
    assert json.loads(json.dumps(found))["arrangement"] == "1+1+1+1+1+1+1+1"
    rows = [(c["what"], c["first"], c["width"], c["from"], c["to"]) for c in found["changes"]]
    assert sorted(rows) == [
        ("bind", 0, 4, "1+1+1+1", "4"),
        ("bind", 4, 4, "1+1+1+1", "4"),
        ("release", 0, 4, "4", "1+1+1+1"),
        ("release", 4, 4, "4", "1+1+1+1"),
    ]
    assert {change["why"] for change in found["changes"]} == {"told"}  # no policy's own reason
    assert all(0 < change["seconds_ago"] <= 7.0 for change in found["changes"])
    run_to_end(engine, listener)


def test_no_more_changes_are_told_than_anybody_reads():
    engine, listener = busy_fleet()
    for turn in range(3, 3 + NUM_CHANGES):
        told(engine, 1 + turn % 2)
        listener.hear(engine.step(float(turn)))
    run_to_end(engine, listener)
    state = engine.stats().find(FleetState)
    assert len(state.changes) == NUM_CHANGES < state.stats.num_changes
    assert state.changes[-1] == engine.topology.find(Fleet).history[-1]


def test_a_width_between_those_that_there_are_is_the_next_one():
    engine = make_fleet(policy=NeedPolicy(possible_widths(UNITS)))
    sampling = SamplingParams(max_tokens=5)
    engine.add_request(Request("a", [1, 2], sampling, min_width=3))
    run_to_end(engine, Listener())
    (first, *_) = engine.stats().find(FleetState).changes
    assert (first.change.wide.width, first.reason) == (4, "need")
    assert first.reason in REASONS
