"""The simulator decides what the engine on devices decides, step for step, on the same trace.

The engine on devices runs first, with a recorder around its runner: the virtual time of every
step is taken from a list of made-up step times. The simulator then serves the same arrivals with
the same step times, and every plan must be the same: sequences, tokens, rows, blocks and mode.
"""

from dataclasses import replace

import pytest
from engines import checkpoint, make
from time_kit import Delayed

from shiftjax.arch.formats import Formats
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.policies import ThresholdPolicy
from shiftjax.core.request import Request, SamplingParams
from shiftjax.core.scheduler import Scheduler
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.sim.devices import Clock, CostRunner, Handle
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import serve

PROMPTS = [[5, 6, 7] * 4, [5, 6, 7] * 8, [9] * 20, [5, 6, 7] * 4 + [1], [3] * 30, [8, 2] * 9]
ARRIVALS = [0.0, 0.0, 0.5, 0.9, 2.0, 2.1]
OUTPUTS = [9, 4, 12, 6, 3, 8]


def step_seconds(plan, mode) -> float:
    """Measured elsewhere, say: what matters is that both runs see the same."""
    return 0.1 + 0.01 * plan.num_tokens + (0.05 if mode.sp == 1 else 0.0)


class Recorder(Delayed):
    """Around a runner: notes every plan; with `seconds`, lets virtual time pass for devices."""

    def __init__(self, runner, clock, plans, seconds):
        super().__init__(runner, clock)
        self.plans, self.seconds = plans, seconds
        self.number, self.idle_at = len(plans), 0.0
        plans.append([])

    def run(self, plan, mode, previous):
        scheduled = [
            (s.sequence.order, s.start, s.num_tokens, s.num_rows, tuple(s.sequence.block_table))
            for s in plan.scheduled
        ]
        self.plans[self.number].append((self.clock.now, mode, scheduled))
        handle = self.runner.run(plan, mode, previous and previous[1])
        if self.seconds is None:
            return Handle(handle[0], handle)
        self.idle_at = max(self.clock.now, self.idle_at) + self.seconds(plan, mode)
        return Handle(self.idle_at, handle)


def record(engine: Engine, runners, clock: Clock, seconds=None):
    """The plans of every group when runners like these serve the requests."""
    plans: list[list] = []
    lanes = [
        Lane(Scheduler(lane.scheduler.config), Recorder(runner, clock, plans, seconds), lane.modes)
        for lane, runner in zip(engine.lanes, runners, strict=True)
    ]
    options = {"overlap": True, "clock": clock, "wait": clock.wait_for_one}
    requests = [
        Request(
            str(n),
            prompt,
            SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True),
            arrival,
        )
        for n, (arrival, prompt, output) in enumerate(zip(ARRIVALS, PROMPTS, OUTPUTS, strict=True))
    ]
    serve(Engine(lanes, ThresholdPolicy(8), engine.limits, **options), clock, requests)
    return plans


@pytest.mark.costs(10)
@pytest.mark.parametrize("dp", [1, 2])
def test_the_simulator_makes_the_plans_of_the_device_engine(dp):
    directory, _, _ = checkpoint()
    built = make(directory, 2, 2, dp=dp, num_blocks=24, max_model_len=64, token_buckets=[32])
    on_devices = record(built.engine, built.runners, Clock(), step_seconds)
    no_host = {"host_seconds": 0.0, "host_seconds_per_sequence": 0.0}
    engine = replace(load_engine("shiftjax").offline, **no_host)  # the step times are all there is
    target = Target(built.deployment.layout.model, load_machine("cpu"), engine, Formats())
    costs = cost_model(target, deploy(target, f"dp={dp},sp=2,tp=2", max_num_seqs=6))
    clock = Clock()
    runners = [CostRunner(costs, clock) for _ in range(dp)]
    for runner in runners:
        runner.step_seconds = step_seconds
    simulated = record(built.engine, runners, clock)
    assert sum(map(len, on_devices)) > 15 and all(on_devices)
    for plans in on_devices:
        assert {mode for _, mode, _ in plans} == set(built.deployment.layout.modes)
    assert simulated == on_devices
