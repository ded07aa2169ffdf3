"""Other arrangements of a fleet: their waits are those of the cost policy, whichever runs."""

import pytest

from shiftjax.core.request import Request, SamplingParams
from shiftjax.fleet.alternatives import Alternatives
from shiftjax.fleet.cost_arrangement import CostArrangement, Load, Nodes
from shiftjax.fleet.fleet_policy import FleetView, GroupView, Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.setup import forget_prices
from shiftjax.fleet.state import shown_arrangement
from shiftjax.parallel.arrangements import equal_groups
from shiftjax.sim.devices import Clock
from shiftjax.sim.experiments import target_from
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import serve
from shiftjax.sim.sim_backend import make_engine

TARGET = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
SMALL = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
EQUAL = ["8", "4+4", "2+2+2+2", "+".join("1" * 8)]


def fleet_of(name: str, *settings: str) -> tuple[Fleet, float]:
    """A fleet after a burst of 99 requests, and when that was."""
    clock = Clock()
    engine, _ = make_engine(TARGET, [deploy(TARGET, ",".join((name, *settings)), **SMALL)], clock)
    some = SamplingParams(max_tokens=200, ignore_eos=True)
    serve(engine, clock, (Request(str(n), [n] * 128, some, 0.02 * n) for n in range(99)))
    fleet = engine.topology.find(Fleet)
    assert fleet is not None and fleet.alternatives is not None
    return fleet, clock.now


WIDE = equal_groups(8, 8)


def view_of(num: int, arrangement=WIDE, now: float = 1.0, **more) -> FleetView:
    """`num` sequences of 500 tokens, evenly over the groups."""
    each = num // len(arrangement)
    held = GroupView(each, 0, 0, each * 500, each * 20, each * 32, 4096, 32, 1)._replace(**more)
    return FleetView(8, arrangement, dict.fromkeys(arrangement, held), (), 0, now, num)


@pytest.mark.parametrize("name", ["fleet", "fleet:load"], ids=["cost", "load"])
def test_waits_are_those_of_the_cost_policy(name):
    """By a policy of its own here, with what has come as the fleet's own has seen it."""
    fleet, now = fleet_of(name)
    told = fleet.alternatives.told(now)
    assert fleet.history and set(told) == {"now", "last_change"}
    view, load, wish = fleet.alternatives._changed
    of_fleet = fleet.alternatives.prices
    own = CostArrangement(of_fleet.widths, of_fleet.steps, of_fleet.moves, of_fleet.needs)
    change = told["last_change"]
    assert change["to"] == shown_arrangement(wish.arrangement)
    assert change["from"] == shown_arrangement(view.arrangement)
    assert change["reason"] == fleet.history[-1].reason and change["why"] != change["reason"]
    by_name = {each["arrangement"]: each for each in change["arrangements"]}
    nodes = Nodes(own, view, load)
    for width, each in zip((8, 4, 2, 1), EQUAL, strict=True):
        if each in by_name:
            waits = nodes.seconds_of(equal_groups(8, width))
            assert by_name[each]["wait_seconds"] == pytest.approx(waits)
    waits = [each["wait_seconds"] for each in change["arrangements"]]
    assert waits == sorted(waits) and len(waits) >= 3
    assert waits[0] == pytest.approx(nodes.seconds_of(nodes.best_partition()))
    assert (
        by_name[change["from"]]["switch_seconds"] == 0.0 < by_name[change["to"]]["switch_seconds"]
    )


def test_the_choice_of_the_cost_policy_is_the_quickest_that_is_told():
    fleet, now = fleet_of("fleet")
    change = fleet.alternatives.told(now)["last_change"]
    first, *_ = change["arrangements"]
    assert first["is_chosen"] and first["arrangement"] == change["to"]
    assert sum(each["is_chosen"] for each in change["arrangements"]) == 1


def test_it_has_seen_what_the_policy_has_seen():
    fleet, _ = fleet_of("fleet")
    seen, own = fleet.alternatives.load, fleet.policy._load
    assert vars(seen) == vars(own) and seen.rate > 0
    assert fleet.alternatives.prices.steps is not fleet.policy.steps  # a look is no decision


def test_what_does_not_hold_everybody_is_left_out():
    fleet, _ = fleet_of("fleet:load")
    prices = fleet.alternatives.prices
    alternatives = Alternatives(prices)
    told = lambda view: [  # noqa: E731
        shown_arrangement(each.arrangement)
        for each in alternatives.priced(view, Load(), view.arrangement)
    ]
    assert sorted(told(view_of(8))) == sorted(EQUAL)
    assert told(view_of(8, needed_width=8)) == ["8"]  # a request needs all units
    assert "8" not in told(view_of(64, equal_groups(8, 1)))  # more than run in one group


def test_the_last_change_stays_as_it_was_seen_and_now_follows():
    fleet, _ = fleet_of("fleet:load")
    alternatives = Alternatives(fleet.alternatives.prices)
    assert alternatives.told(0.0) == {}
    units = equal_groups(8, 1)
    alternatives.saw(view_of(16), Wish(units, "load"))
    before = alternatives.told(3.0)
    assert before["last_change"]["num_sequences"] == 16 and before["now"]["to"] == "8"
    assert before["last_change"]["seconds_ago"] == 2.0
    alternatives.saw(view_of(24, units, 9.0), Wish(units, "load"))  # as it is: no change
    after = alternatives.told(10.0)
    assert after["last_change"] == before["last_change"] | {"seconds_ago": 9.0}
    assert after["now"]["num_sequences"] == 24 and after["now"]["from"] == after["now"]["to"]


def test_the_last_change_is_priced_by_what_had_come_until_then():
    """Also if nobody looked at it before more came."""
    fleet, _ = fleet_of("fleet:load")
    looked, late = (Alternatives(fleet.alternatives.prices) for _ in range(2))
    for alternatives in (looked, late):
        alternatives.saw(view_of(16), Wish(equal_groups(8, 1), "load"))
    before = looked.told(9.0)["last_change"]
    late.saw(view_of(30, now=1.5)._replace(num_seen=900), None)
    assert late.told(9.0)["last_change"] == before
    assert late.load.rate > 10 * looked.load.rate > 0


def test_prices_are_asked_anew_with_those_of_the_policy():
    fleet, now = fleet_of("fleet")
    fleet.alternatives.told(now)
    steps = fleet.alternatives.prices.steps
    assert steps._seconds
    forget_prices(fleet)
    assert not steps._seconds and not fleet.policy.steps._seconds
