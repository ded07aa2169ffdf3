"""SmolLM2-135M's greedy tokens equal transformers' whatever groups a fleet forms meanwhile."""

import random
from typing import ClassVar

import pytest
from lean import greedy_steps
from oracle.smollm2 import NEEDS_WEIGHTS, OPTIONS, SHORT, compare

from shiftjax import LLM
from shiftjax.core.request import Request
from shiftjax.fleet.fleet_policy import FleetView, Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import all_groups, bound, equal_groups

pytestmark = [NEEDS_WEIGHTS, pytest.mark.thorough]
UNITS, WIDTHS = 8, (1, 8)  # small models have others side by side (device/test_fleet_steps.py)


class AnyArrangement:
    """Groups come and go at random; policies of a group's modes are what they were."""

    widens: ClassVar[bool] = True

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def width_for(self, request: Request) -> int:
        return 1

    def arrange(self, view: FleetView) -> Wish | None:
        if self.random.random() < 0.7:
            return None
        found = equal_groups(UNITS, WIDTHS[0])
        for group in self.random.sample(all_groups(UNITS, WIDTHS), 3):
            if all(other.width <= group.width for other in found if other.overlaps(group)):
                found = bound(found, group)
        return Wish(found, "told", self.random.choice(("move", "move", "hard")))


class OneGroup(AnyArrangement):
    """All units stay in one group."""

    def arrange(self, view: FleetView) -> Wish | None:
        return Wish(equal_groups(UNITS, UNITS), "told", "move")


def test_a_fleet_gives_the_same_tokens_whatever_groups_there_are():
    options = OPTIONS | {"fleet": True, "devices": UNITS, "fleet_widths": WIDTHS}
    with greedy_steps():
        llm = LLM("smollm2-135m", dtype="float32", fleet_policy="context", **options)
    fleet = llm.engine.topology.find(Fleet)
    assert fleet is not None
    fleet.policy, fleet.rules = AnyArrangement(1), fleet.rules._replace(arrange_seconds=0.0)
    stats = fleet.stats
    for _ in range(6):  # how often the policy is asked depends on how long steps are in flight
        compare(llm.engine, "fleet", llm.engine.policy, SHORT, 16)
        if stats.num_moved_sequences > 20 and stats.binds.total() > 3:
            break
    assert stats.num_moved_sequences > 20 and stats.failed_changes.total() == 0
    assert stats.binds.total() > 3 and llm.stats()["compiles_after_warmup"] == 0
    fleet.policy = OneGroup(1)
    compare(llm.engine, "one group", llm.engine.policy, SHORT, 5)
    steps = llm.engine.stats().steps
    assert min(steps["base", UNITS], steps["shift", UNITS], steps["shift", 1]) > 0, steps
    llm.close()
