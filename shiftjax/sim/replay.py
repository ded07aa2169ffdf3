"""Replays a trace through the production loop: the real engine, a `CostRunner`, a virtual clock.

Each replica is an engine of its own with its own clock, as separate servers behind a router
would be; a request goes to the replica with the least to do when it arrives. Within a replica
everything that decides is the code that serves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shiftjax.control.admission import RequestLimits
from shiftjax.control.engine import Engine, Group
from shiftjax.control.policy import work_of
from shiftjax.control.request import (
    Event,
    Request,
    RequestError,
    SamplingParams,
    StepOutput,
    StepPlan,
)
from shiftjax.control.scheduler import Scheduler
from shiftjax.control.scheduler_config import SchedulerConfig
from shiftjax.costs.step import CostModel
from shiftjax.options import ConfigError
from shiftjax.parallel.mode import Mode
from shiftjax.sim.deployment import Deployment, Target, cost_model, memory_of, policy_of
from shiftjax.sim.trace import TraceRequest

MAX_ROWS = 1 << 16


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time, as an engine reads it."""
        return self.now


class StepRecord(NamedTuple):
    """One step that ran."""

    done: float  # seconds
    device_seconds: float
    num_tokens: int
    num_decodes: int
    mode: Mode


class RequestRecord(NamedTuple):
    """One request that ended; seconds."""

    arrival: float
    queue: float
    ttft: float
    tpot: float | None
    completion: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


class CostRunner:
    """A `Runner` that computes nothing: a step takes its predicted seconds.

    The host's time passes while a step is prepared; the devices work through what they were given
    in order; `fetch` waits for them. Tokens are all 0. `step_seconds` replaces the predictions,
    say by measured ones.
    """

    def __init__(
        self,
        costs: CostModel,
        clock: Clock,
        step_seconds: Callable[[StepPlan, Mode], float] | None = None,
    ):
        self.costs, self.clock = costs, clock
        self.steps: list[StepRecord] = []
        self._step_seconds = step_seconds
        self._idle_at = 0.0  # when the devices have done all they were given
        self._last_mode: Mode | None = None
        self._zeros, self._finite = np.zeros(MAX_ROWS, np.int32), np.ones(MAX_ROWS, bool)

    def run(
        self, plan: StepPlan, mode: Mode, previous_handle: tuple[float, int] | None
    ) -> tuple[float, int]:
        """Let the host's time pass and queue the step on the devices."""
        work = work_of(plan)
        self.clock.now += self.costs.host_seconds(work)
        if self._step_seconds is not None:
            seconds = self._step_seconds(plan, mode)
        else:
            seconds = self.costs.device_seconds(mode, work)
        if self._last_mode not in (None, mode):
            seconds += self.costs.engine.switch_seconds
        self._last_mode = mode
        self._idle_at = max(self.clock.now, self._idle_at) + seconds
        record = StepRecord(self._idle_at, seconds, plan.num_tokens, plan.num_decodes, mode)
        self.steps.append(record)
        return self._idle_at, plan.num_rows

    def fetch(self, handle: tuple[float, int]) -> StepOutput:
        """Wait until the step is done."""
        done, num_rows = handle
        self.clock.now = max(self.clock.now, done)
        return StepOutput(self._zeros[:num_rows], self._finite[:num_rows])

    def reset(self) -> None:
        """Nothing is held that could be lost."""


@dataclass
class Replica:
    """One engine on its own clock, and what became of its requests."""

    engine: Engine
    runner: CostRunner
    clock: Clock
    finished: list[RequestRecord] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)

    @property
    def load(self) -> int:
        """Tokens that it holds or has waiting."""
        scheduler = self.engine.groups[0].scheduler
        queued = sum(len(request.prompt_token_ids) for *_, request in self.engine._queue)
        used = scheduler.num_used_blocks * scheduler.config.block_size
        return used + scheduler.num_waiting_tokens + queued

    def step(self) -> None:
        """One turn of the engine's loop."""
        for event in self.engine.step(self.clock.now):
            if event.metrics is not None:
                self._finish(event)

    def _finish(self, event: Event) -> None:
        metrics, arrival = event.metrics, self.arrivals.pop(event.request_id)
        if event.finish_reason != "length" or metrics is None:
            raise RuntimeError(f"a request ended with {event.finish_reason}: {event.error}")
        later = max(0, metrics.num_output_tokens - 1)
        ttft = metrics.ttft_seconds or 0.0
        record = RequestRecord(
            arrival,
            metrics.queue_seconds or 0.0,
            ttft,
            metrics.tpot_seconds,
            ttft + later * (metrics.tpot_seconds or 0.0),
            metrics.num_prompt_tokens,
            metrics.num_output_tokens,
            metrics.num_cached_tokens,
        )
        self.finished.append(record)


@dataclass(frozen=True)
class Replay:
    """All that happened; steps and requests of all replicas in the order of their ends."""

    deployment: Deployment
    requests: list[RequestRecord]
    steps: list[StepRecord]
    num_refused: int
    mode_switches: int
    num_preemptions: int


def advance(replicas: Sequence[Replica], until: float, *, together: bool) -> None:
    """Run steps until the clocks have reached `until` or nothing is left to do.

    `together`: replicas meet before every step, so each waits for the slowest of them.
    """
    if not together:
        for replica in replicas:
            while replica.clock.now < until and replica.engine.has_work():
                replica.step()
        return
    while busy := [replica for replica in replicas if replica.engine.has_work()]:
        start = max(replica.clock.now for replica in busy)
        if start >= until:
            return
        for replica in busy:
            replica.clock.now = start
            replica.step()


def make_replica(
    target: Target, deployment: Deployment, belief: CostModel | None = None
) -> Replica:
    """An engine on virtual devices. Raises ConfigError where the model does not fit."""
    costs, clock = cost_model(target, deployment), Clock()
    memory = memory_of(target, deployment)
    num_blocks = memory.num_kv_tokens // deployment.block_size
    if num_blocks < 2:
        raise ConfigError(
            [
                f"{deployment.name}: {memory.weight_bytes / 1e9:.0f} GB of weights a device leave "
                f"no KV cache on {target.machine.name}; use more TP"
            ]
        )
    budgets = SchedulerConfig(
        num_blocks,
        deployment.block_size,
        deployment.max_num_seqs,
        deployment.max_num_batched_tokens,
        prefix_caching=deployment.prefix_caching,
    )
    config = target.shape.config
    limits = RequestLimits(
        config.vocab_size, config.max_position_embeddings, (num_blocks - 1) * deployment.block_size
    )
    runner = CostRunner(costs, clock)
    policy = policy_of(deployment, costs, belief or costs)
    groups = [Group(Scheduler(budgets), runner)]
    engine = Engine(groups, policy, limits, overlap=target.engine.overlaps, clock=clock)
    return Replica(engine, runner, clock)


def replay(
    requests: Sequence[TraceRequest],
    target: Target,
    deployment: Deployment,
    belief: CostModel | None = None,
) -> Replay:
    """Serve a trace, sorted by arrival, to its end. `belief` is what a cost policy thinks."""
    replicas = [make_replica(target, deployment, belief) for _ in range(deployment.dp)]
    refused = sum(
        not _submit(number, request, replicas, target) for number, request in enumerate(requests)
    )
    advance(replicas, float("inf"), together=target.engine.replicas_in_step)
    stats = [replica.engine.stats() for replica in replicas]
    return Replay(
        deployment,
        sorted((r for replica in replicas for r in replica.finished), key=lambda r: r.arrival),
        sorted((s for replica in replicas for s in replica.runner.steps), key=lambda s: s.done),
        refused,
        sum(sum(s.mode_switches.values()) for s in stats),
        sum(sum(s.num_preemptions.values()) for s in stats),
    )


def _submit(
    number: int, request: TraceRequest, replicas: Sequence[Replica], target: Target
) -> bool:
    """Bring all replicas to the arrival and give the request to one; False if it can never fit."""
    arrival = request.arrival_seconds
    advance(replicas, arrival, together=target.engine.replicas_in_step)
    replica = min(replicas, key=lambda replica: replica.load) if len(replicas) > 1 else replicas[0]
    name = str(number)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True
    )
    prompt = request.prompt(number, target.shape.config.vocab_size)
    try:
        replica.engine.add_request(Request(name, prompt, sampling, arrival))
    except RequestError:
        return False
    replica.clock.now = max(replica.clock.now, arrival)
    replica.arrivals[name] = arrival
    return True
