"""The simulator decides what the engine on devices decides, step for step, on the same trace.

The engine on devices runs first, with a recorder around its runner: the virtual time of every
step is taken from a list of made-up step times. The simulator then serves the same arrivals with
the same step times, and every plan must be the same: sequences, tokens, rows, blocks and mode.
"""

from dataclasses import replace

from engines import checkpoint, make

from shiftjax.arch.shape import Formats, ModelShape
from shiftjax.control.engine import Engine, Group
from shiftjax.control.policy import ThresholdPolicy
from shiftjax.control.request import Request, SamplingParams
from shiftjax.control.scheduler import Scheduler
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.parallel.mode import Mode
from shiftjax.sim.deployment import Deployment, Target, cost_model
from shiftjax.sim.replay import Clock, CostRunner

PROMPTS = [[5, 6, 7] * 4, [5, 6, 7] * 8, [9] * 20, [5, 6, 7] * 4 + [1], [3] * 30, [8, 2] * 9]
ARRIVALS = [0.0, 0.0, 0.5, 0.9, 2.0, 2.1]
OUTPUTS = [9, 4, 12, 6, 3, 8]


def step_seconds(plan, mode) -> float:
    """Measured elsewhere, say: what matters is that both runs see the same."""
    return 0.1 + 0.01 * plan.num_tokens + (0.05 if mode is Mode.SHIFT else 0.0)


class Recorder:
    """Around a runner: notes every plan, and lets virtual time pass for devices that have none."""

    def __init__(self, runner, clock, keeps_time: bool):
        self.runner, self.clock, self.keeps_time = runner, clock, keeps_time
        self.plans, self.idle_at = [], 0.0

    def run(self, plan, mode, previous):
        scheduled = [
            (s.sequence.order, s.start, s.num_tokens, s.num_rows, tuple(s.sequence.block_table))
            for s in plan.scheduled
        ]
        self.plans.append((self.clock.now, mode, scheduled))
        handle = self.runner.run(plan, mode, previous and previous[0])
        if not self.keeps_time:
            self.idle_at = max(self.clock.now, self.idle_at) + step_seconds(plan, mode)
        return handle, self.idle_at

    def fetch(self, handle):
        if not self.keeps_time:
            self.clock.now = max(self.clock.now, handle[1])
        return self.runner.fetch(handle[0])

    def reset(self):
        self.runner.reset()


def serve(engine: Engine, clock: Clock) -> None:
    """Requests come when they come; between steps the clock moves by what the steps took."""
    waiting = list(enumerate(zip(ARRIVALS, PROMPTS, OUTPUTS, strict=True)))
    while waiting or engine.has_work():
        while waiting and (waiting[0][1][0] <= clock.now or not engine.has_work()):
            number, (arrival, prompt, output) = waiting.pop(0)
            clock.now = max(clock.now, arrival)
            sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            engine.add_request(Request(str(number), prompt, sampling, arrival))
        engine.step(clock.now)


def record(engine: Engine, runner, clock: Clock, *, keeps_time: bool):
    (group,) = engine.groups
    recorder = Recorder(runner, clock, keeps_time)
    policy = ThresholdPolicy(8)
    groups = [Group(Scheduler(group.scheduler.config), recorder)]
    serve(Engine(groups, policy, engine.limits, overlap=True, clock=clock), clock)
    return recorder.plans


def test_the_simulator_makes_the_plans_of_the_device_engine():
    directory, _, _ = checkpoint()
    built = make(directory, 2, 2, num_blocks=24, max_model_len=64, token_buckets=[32])
    on_devices = record(built.engine, built.runners[0], Clock(), keeps_time=False)
    shape = ModelShape(built.layout.model)
    no_host = {"host_seconds": 0.0, "host_seconds_per_sequence": 0.0}
    engine = replace(load_engine("shiftjax"), **no_host)  # the step times are all there is
    target = Target(shape, load_machine("cpu"), engine, Formats())
    costs = cost_model(target, Deployment("", 1, 2, 2, "threshold", max_num_seqs=6))
    clock = Clock()
    simulated = record(built.engine, CostRunner(costs, clock, step_seconds), clock, keeps_time=True)
    assert len(on_devices) > 15
    assert {mode for _, mode, _ in on_devices} == set(Mode)
    assert simulated == on_devices
