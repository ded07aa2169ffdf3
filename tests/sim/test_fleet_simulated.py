"""A fleet decides on virtual devices what it decides on those that compute: the same trace, twice.

Once over runners that echo tokens out of audited pools, once over `CostRunner`; step times are made
up and the same. Plans, block tables, times and changes of groups must be equal.
"""

from dataclasses import replace

import pytest
from echo_kit import make_request
from fleet_kit import make_fleet
from time_kit import Delayed

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.step_costs import CostModel
from shiftjax.fleet.fleet_policy import LoadPolicy, NeedPolicy
from shiftjax.fleet.move_costs import MoveCosts
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import possible_widths
from shiftjax.parallel.layout import Layout
from shiftjax.sim.devices import Clock, CostMover, CostRunner, Handle, Units
from shiftjax.sim.replay import serve

UNITS = 4
WIDTHS = possible_widths(UNITS)
ARRIVALS = [0.0, 0.1, 2.0, 2.0, 2.1, 2.1, 2.1, 2.2, 2.2, 2.3, 2.3, 2.4, 6.0, 6.1, 9.0]


def step_seconds(plan, mode) -> float:
    return 0.05 + 0.01 * plan.num_tokens / mode.width + 0.01 * mode.sp


class Recorder(Delayed):
    """Around a runner: notes plans; lets virtual time pass where the runner has none."""

    def __init__(self, runner, clock, units, group, plans):
        super().__init__(runner, clock)
        self.units, self.group, self.plans = units, group, plans

    def run(self, plan, mode, previous):
        tables = [(s.sequence.order, s.start, s.num_tokens, tuple(s.sequence.block_table))
                  for s in plan.scheduled]  # fmt: skip
        self.plans.append((self.clock.now, self.group, mode, tables))
        handle = self.runner.run(plan, mode, previous and previous[1])
        if isinstance(self.runner, CostRunner):
            return Handle(handle.done, handle)
        done = self.units.occupy(self.group, self.clock.now, step_seconds(plan, mode))
        return Handle(done, handle)


def play(kind: str, *, simulated: bool):
    """(plans, changes, blocks moved) of one run."""
    clock, units, plans = Clock(), Units(UNITS), []
    policy = LoadPolicy(WIDTHS, 1.0, 2.0, NeedPolicy(WIDTHS))
    options = {"switch": kind, "max_pause_seconds": 1.0, "clock": lambda: 0.0}
    engine = make_fleet(units=UNITS, policy=policy, clock=clock, fleet=options)
    engine.wait = clock.wait_for_one
    model = replace(PRESETS["tiny"], num_heads=8, num_kv_heads=4)
    overhead = replace(
        load_engine("shiftjax").offline, host_seconds=0.0, host_seconds_per_sequence=0.0
    )
    for lane in engine.lanes:
        runner, group = lane.runner, lane.group
        if simulated:
            layout = Layout(model, group.width, 1, UNITS)
            costs = CostModel(layout, load_machine("cpu"), overhead, Formats())
            runner = CostRunner(costs, clock, group=group, units=units)
            runner.step_seconds = step_seconds
        lane.runner = Recorder(runner, clock, units, group, plans)
    if simulated:
        instant = {"memory_bytes_per_second": float("inf"), "kernel_seconds": 0.0}
        free = replace(load_machine("cpu"), **instant)
        no_time = tuple(way.scaled(0.0, float("inf")) for way in free.all_to_all)
        free = replace(free, all_to_all=no_time)
        costs = MoveCosts(Layout(model, 1, 1, UNITS), Formats(), free, 2, 40)
        engine.topology.find(Fleet).mover = CostMover(costs, clock, units, 0.0)
    requests = [
        make_request(str(n), [5, n % 7, 3] * (1 + n % 3), at, max_tokens=9 + n, ignore_eos=True)
        for n, at in enumerate(ARRIVALS)
    ]
    records, _ = serve(engine, clock, requests)
    assert len(records) == len(ARRIVALS)
    return (
        plans,
        list(engine.topology.find(Fleet).history),
        engine.topology.find(Fleet).stats.moved_blocks,
    )


@pytest.mark.parametrize("kind", ["move", "hard", "sequential"])
def test_virtual_devices_see_the_plans_and_changes_of_others(kind):
    plans, turns, blocks = play(kind, simulated=False)
    assert {mode.width for _, _, mode, _ in plans} >= {1, UNITS}
    assert len(turns) >= 2 and {turn.kind for turn in turns} >= {kind}
    assert play(kind, simulated=True) == (plans, turns, blocks)
