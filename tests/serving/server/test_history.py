"""A bounded past in columns: gauges hold where nothing was noted, long steps leave no hole."""

import pytest
from kit import make_engine

from serving.server.history import KINDS, History
from serving.server.mode_choice import choice_of
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.core.policies import make_policy
from shiftjax.costs.buckets import Bucket, doubling
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.step_costs import CostModel
from shiftjax.parallel.grid import Group, Mode
from shiftjax.parallel.layout import Layout
from shiftjax.sim.devices import Clock, CostRunner


def columns(history: History, now: float) -> dict[str, list[float]]:
    return history.columns(now)["columns"]


def test_counts_are_where_they_were_counted():
    past = History(0.5, 4)
    for at in (10.0, 10.4, 10.6, 11.9):
        past.count(at, tokens=3, accepted=0)
    found = past.columns(11.9)
    assert (found["start"], found["seconds"]) == (10.0, 0.5)
    assert found["columns"]["tokens"] == [6, 3, 0, 3]
    assert columns(past, 12.4)["tokens"] == [3, 0, 3, 0]
    assert columns(past, 100.0)["tokens"] == [0, 0, 0, 0]


def test_gauges_hold_what_was_last_though_its_place_is_taken():
    """A pause as long as the ring, then work again: what was in the middle of before is over."""
    past = History(1.0, 4)
    for at, running in ((10.5, 5), (11.5, 5), (12.5, 0)):
        past.look(at, running=running)
    past.look(16.5, running=7)  # in the place of 12.5
    assert columns(past, 16.9)["running"] == [0, 0, 0, 7]


def test_gauges_hold_until_they_change():
    past = History(1.0, 5)
    past.look(10.1, running=1, waiting=0, kv=0.1)
    past.look(10.2, running=7, waiting=2, kv=0.3)
    past.look(10.9, running=3, waiting=0, kv=0.2)
    past.look(13.5, running=0, waiting=0, kv=0.0)
    found = columns(past, 14.0)
    assert found["running"] == [7, 3, 3, 0, 0]  # the most in a stretch; then what it ended with
    assert found["kv"] == [0.3, 0.2, 0.2, 0, 0]
    past.look(14.5, running=4, waiting=1, kv=0.5)
    assert columns(past, 30.0)["running"] == [4, 4, 4, 4, 4]  # a step that takes that long


def test_a_step_is_entered_wherever_it_ran():
    past = History(1.0, 6)
    past.step("base", 13.5, 3.0, 100)  # since 10.5
    past.step("shift", 14.0, 0.5, 4)
    found = columns(past, 15.0)
    assert found["base_busy"] == [0.5, 1, 1, 0.5, 0, 0]
    assert found["base_load"] == [50, 100, 100, 50, 0, 0]
    assert found["base_steps"] == [0, 0, 0, 1, 0, 0]
    assert (sum(found["shift_busy"]), sum(found["shift_load"])) == (0.5, 2.0)
    past.step("between", 15.5, 1e9, 7)  # longer than what is kept, as after a pause of the process
    assert columns(past, 15.5)["between_busy"] == [1, 1, 1, 1, 1, 0.5]


def test_it_does_not_grow():
    past = History(0.5, 8)
    for number in range(10_000):
        past.step(KINDS[number % 3], number * 0.3, 0.3, 5)
        past.look(number * 0.3, running=number, waiting=0, kv=0.0)
    found = columns(past, 3000.0)
    assert {len(column) for column in found.values()} == {8}
    assert len(past._slots) == 8
    assert sum(len(slot.counts) for slot in past._slots if slot) <= 8 * 4 * len(KINDS)


@pytest.mark.parametrize("name", ["base", "shift"])
def test_a_fixed_policy_is_told_as_it_is(name):
    engine = make_engine()
    engine.policy = make_policy(name, 32)
    choice = choice_of(engine)
    assert (choice["policy"], choice["threshold"], choice["predicted"]) == (name, None, [])


@pytest.mark.parametrize("name", ["cost", "threshold"])
def test_where_costs_are_known_predictions_are_told(name):
    engine = make_engine()
    buckets = [Bucket(tokens, 16) for tokens in (8192, 16)]
    h100 = load_machine("h100x8"), load_engine("shiftjax"), Formats()
    costs = CostModel(Layout(PRESETS["llama-70b"], 4, 2), *h100, buckets)
    engine.policy, lane = make_policy(name, 9, costs), engine.lanes[0]
    lane.modes, lane.costs = Group(0, 4).modes, costs
    choice = choice_of(engine)
    assert (choice["policy"], choice["threshold"]) == (name, {"threshold": 9}.get(name))
    labels = ["base", "sp2", "shift"] if name == "cost" else ["base", "shift"]
    assert [mode["label"] for mode in choice["modes"]] == labels
    (few, at_few), (many, at_many) = choice["predicted"]
    assert (few, many) == (16, 8192)
    quickest = [list(labels)[::-1], list(labels)]
    assert [sorted(each, key=each.get) for each in (at_few, at_many)] == quickest
    assert at_few["shift"] == costs.mode_seconds(Mode(4, 1), (16, 16))


def test_how_far_steps_split_experts_is_told_with_the_reason():
    engine = make_engine()
    h200 = load_machine("h200x8"), load_engine("shiftjax"), Formats()
    layout = Layout(PRESETS["qwen3-30b-a3b"], 4, 1, experts_sp=4)
    costs, lane = CostModel(layout, *h200), engine.lanes[0]
    lane.runner, lane.modes = CostRunner(costs, Clock()), Group(0, 4).modes
    engine.policy = make_policy("cost", None, costs)
    rows, most = choice_of(engine)["experts"], lane.scheduler.config.max_num_batched_tokens
    assert tuple(tokens for tokens, _ in rows) == doubling(most)
    for tokens, by_mode in rows:
        assert list(by_mode) == ["base", "sp2", "shift"]
        for mode in lane.modes:
            use = costs.expert_modes.of(mode, -(-tokens // 4) * 4)
            assert by_mode[mode.label] == {"ways": layout.ways(use.mode), "why": use.why}
    assert choice_of(make_engine())["experts"] == []
