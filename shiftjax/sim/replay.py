"""Replays a trace through the production loop: the real engine, a `CostRunner`, a virtual clock.

One engine, as in a server: data-parallel replicas are its groups, its own queue gives them their
requests, and they share the virtual clock. Everything that decides is the code that serves. The
host prepares the steps of all groups, one after the other; an engine whose replicas step together
(`replicas_in_step`) has a process for each, whose host works pass side by side.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shiftjax.control.deployment import Deployment
from shiftjax.control.engine import Engine
from shiftjax.control.lane import Failure, Lane
from shiftjax.control.policy import work_of
from shiftjax.control.prices import Prices
from shiftjax.control.request import (
    Event,
    Request,
    RequestError,
    SamplingParams,
    StepOutput,
    StepPlan,
)
from shiftjax.control.scheduler import Scheduler
from shiftjax.control.speculation import Speculation
from shiftjax.costs.step import CostModel
from shiftjax.parallel.grid import Mode
from shiftjax.sim.deployment import (
    Target,
    cost_model,
    drafting_of,
    memory_of,
    modes_of,
    policy_of,
    sizes_of,
)
from shiftjax.sim.drafts import AcceptanceModel, ModelledDrafting
from shiftjax.sim.trace import TraceRequest

MAX_ROWS = 1 << 16


class Clock:
    """Virtual seconds, and when the next request will come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next_arrival = float("inf")
        self.seen_at = 0.0  # when the results that were fetched last were seen

    def __call__(self) -> float:
        """The time, as an engine reads it when it has fetched results."""
        return self.seen_at

    def wait_for_one(self, lanes: Sequence[Lane]) -> None:
        """Until the first of these groups has a step ready, or a request comes."""
        self.now = max(self.now, min(self.next_arrival, *map(_ready_at, lanes)))

    def wait_for_all(self, lanes: Sequence[Lane]) -> None:
        """Until all of them have."""
        self.now = max(self.now, *map(_ready_at, lanes))


def _ready_at(lane: Lane) -> float:
    flight = lane.in_flight[0]
    if isinstance(flight, Failure):
        raise flight.error
    return flight.handle[0]


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
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class CostRunner:
    """A `Runner` that computes nothing: a step takes its predicted seconds.

    The host's time passes while a step is prepared: on the clock, or, with `own_host`, beside it.
    The devices work through what they were given in order; `fetch` waits for them. Tokens are all
    0. `step_seconds` replaces the predictions, say by measured ones. `drafting` has taken more of
    the host's time.
    """

    def __init__(
        self,
        costs: CostModel,
        clock: Clock,
        step_seconds: Callable[[StepPlan, Mode], float] | None = None,
        *,
        own_host: bool = False,
        drafting: ModelledDrafting | None = None,
    ):
        self.costs, self.clock, self.drafting = costs, clock, drafting
        self.steps: list[StepRecord] = []
        self._own_host, self._prepared_at, self._drafted_at = own_host, 0.0, 0.0
        self._step_seconds = step_seconds
        self._idle_at = 0.0  # when the devices have done all they were given
        self._last_mode: Mode | None = None
        self._zeros, self._finite = np.zeros(MAX_ROWS, np.int32), np.ones(MAX_ROWS, bool)

    def run(
        self, plan: StepPlan, mode: Mode, previous_handle: tuple[float, int] | None
    ) -> tuple[float, int]:
        """Let the host's time pass and queue the step on the devices."""
        work = work_of(plan)
        host = self.costs.host_seconds(work) + self._drafting_seconds()
        self._prepared_at = max(self.clock.now, self._prepared_at) + host
        if not self._own_host:
            self.clock.now = self._prepared_at
        if self._step_seconds is not None:
            seconds = self._step_seconds(plan, mode)
        else:
            seconds = self.costs.device_seconds(mode, work)
        if self._last_mode not in (None, mode):
            seconds += self.costs.engine.switch_seconds
        self._last_mode = mode
        self._idle_at = max(self._prepared_at, self._idle_at) + seconds
        num_decodes = plan.num_decodes + plan.num_drafts
        record = StepRecord(self._idle_at, seconds, plan.num_tokens, num_decodes, mode)
        self.steps.append(record)
        return self._idle_at, plan.num_rows

    def _drafting_seconds(self) -> float:
        """Of the host since the step before."""
        if self.drafting is None:
            return 0.0
        before, self._drafted_at = self._drafted_at, self.drafting.seconds
        return self._drafted_at - before

    def is_ready(self, handle: tuple[float, int]) -> bool:
        """Whether the step is done by now."""
        return handle[0] <= self.clock.now

    def fetch(self, handle: tuple[float, int]) -> StepOutput:
        """Wait until the step is done."""
        done, num_rows = handle
        self.clock.now = max(self.clock.now, done)
        self.clock.seen_at = done if self._own_host else self.clock.now
        return StepOutput(self._zeros[:num_rows], self._finite[:num_rows])

    def reset(self) -> None:
        """Nothing is held that could be lost."""


@dataclass(frozen=True)
class Replay:
    """All that happened: requests by arrival, the steps of all replicas by their ends."""

    deployment: Deployment
    requests: list[RequestRecord]
    steps: list[StepRecord]
    num_refused: int
    mode_switches: int
    num_preemptions: int

    @property
    def labels(self) -> list[str]:
        """The modes of its steps, in the order of their names: base comes first."""
        return sorted({step.mode.label for step in self.steps})


def make_engine(
    target: Target,
    deployment: Deployment,
    clock: Clock,
    belief: CostModel | None = None,
    acceptance: AcceptanceModel | None = None,
) -> tuple[Engine, list[CostRunner]]:
    """An engine on virtual devices, and these.

    Raises ConfigError where the model does not fit, or drafts come without an acceptance.
    """
    costs, memory = cost_model(target, deployment), memory_of(target, deployment)
    sized = deployment.with_blocks(memory.num_kv_tokens // deployment.block_size, memory)
    policy, in_step = policy_of(deployment, costs, belief or costs), target.engine.replicas_in_step
    lanes, runners = [], []
    for _ in range(deployment.dp):
        drafting = drafting_of(target, deployment, acceptance)
        runners.append(CostRunner(costs, clock, own_host=in_step, drafting=drafting))
        modes, speculation = modes_of(costs, deployment), None
        if drafting is not None:
            speculation = Speculation(
                drafting,
                Prices(sizes_of(deployment), policy, modes, belief or costs),
                max_rows=sized.budgets.max_rows,
                overlap=target.engine.overlaps,
                clock=drafting.clock,
            )
        lanes.append(Lane(Scheduler(sized.budgets, speculation), runners[-1], modes))
    engine = Engine(
        lanes,
        policy,
        sized.limits,
        overlap=target.engine.overlaps,
        clock=clock,
        wait=clock.wait_for_all if in_step else clock.wait_for_one,
    )
    return engine, runners


def replay(
    requests: Sequence[TraceRequest],
    target: Target,
    deployment: Deployment,
    belief: CostModel | None = None,
    acceptance: AcceptanceModel | None = None,
) -> Replay:
    """Serve a trace, sorted by arrival, to its end.

    `belief` is what a cost policy thinks, `acceptance` how often drafts are right.
    """
    clock = Clock()
    engine, runners = make_engine(target, deployment, clock, belief, acceptance)
    vocab_size = target.model.vocab_size
    coming = (_request(n, request, vocab_size) for n, request in enumerate(requests))
    records, num_refused = serve(engine, clock, coming)
    stats = engine.stats()
    steps = [step for runner in runners for step in runner.steps]
    return Replay(
        deployment,
        records,
        sorted(steps, key=lambda s: s.done),
        num_refused,
        sum(stats.mode_switches.values()),
        sum(stats.num_preemptions.values()),
    )


def serve(
    engine: Engine, clock: Clock, requests: Iterable[Request]
) -> tuple[list[RequestRecord], int]:
    """Bring requests when they come, and step while there is work.

    Returns what became of them, in their order, and how many were refused.

    A request that comes while the host waits for a step is seen after it, as by a server.
    """
    coming = iter(requests)
    request, num_refused = next(coming, None), 0
    arrivals: dict[str, float] = {}
    ended: dict[str, RequestRecord] = {}
    while request is not None or engine.has_work():
        while request and (request.arrival_seconds <= clock.now or not engine.has_work()):
            clock.now = max(clock.now, request.arrival_seconds)
            try:
                engine.add_request(request)
                arrivals[request.request_id] = request.arrival_seconds
            except RequestError:
                num_refused += 1
            request = next(coming, None)
        clock.next_arrival = request.arrival_seconds if request else float("inf")
        for event in engine.step(clock.now):
            if event.metrics is not None:
                ended[event.request_id] = _record(event, arrivals[event.request_id])
    return [ended[name] for name in arrivals], num_refused


def _request(number: int, request: TraceRequest, vocab_size: int) -> Request:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True
    )
    prompt = request.prompt(number, vocab_size)
    return Request(str(number), prompt, sampling, request.arrival_seconds)


def _record(event: Event, arrival: float) -> RequestRecord:
    metrics = event.metrics
    if event.finish_reason != "length" or metrics is None:
        raise RuntimeError(f"a request ended with {event.finish_reason}: {event.error}")
    later = max(0, metrics.num_output_tokens - 1)
    ttft = metrics.ttft_seconds or 0.0
    return RequestRecord(
        arrival,
        metrics.queue_seconds or 0.0,
        ttft,
        metrics.tpot_seconds,
        ttft + later * (metrics.tpot_seconds or 0.0),
        metrics.num_prompt_tokens,
        metrics.num_output_tokens,
        metrics.num_cached_tokens,
        metrics.num_draft_tokens,
        metrics.num_accepted_tokens,
    )
