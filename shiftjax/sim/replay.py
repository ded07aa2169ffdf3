"""Replays a trace through the production loop: the real engine, a `CostRunner`, a virtual clock.

One engine, as in a server: data-parallel replicas are its groups, its own queue gives them their
requests, and they share the virtual clock. Everything that decides is the code that serves. The
host prepares the steps of all groups, one after the other; an engine whose replicas step together
(`replicas_in_step`) has a process for each, whose host works pass side by side.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from math import inf
from random import Random
from typing import NamedTuple

from shiftjax.adapters.pool import AdapterPool
from shiftjax.core.engine import Engine
from shiftjax.core.limits import check_length
from shiftjax.core.request import Event, Request, RequestError, SamplingParams
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.deploy.deployment import Deployment
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.setup import first_arrangement
from shiftjax.fleet.stats import FleetStats, Turn
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.parallel.arrangements import Arrangement
from shiftjax.phases.resharding import PHASES, Resharding
from shiftjax.sim.arrivals import Arrivals, InOrder, Returning
from shiftjax.sim.closed_loop import ClosedLoop
from shiftjax.sim.devices import Clock, CostMover, CostRunner, StepRecord
from shiftjax.sim.drafts import AcceptanceModel
from shiftjax.sim.front_end import FrontEnd, opening_seconds, reading_seconds
from shiftjax.sim.modelled import Target
from shiftjax.sim.named import Phases, RoleSplit
from shiftjax.sim.phase_exchange import CostExchange, Switch
from shiftjax.sim.roles import Roles, RolesRun
from shiftjax.sim.roles_backend import RolesBackend
from shiftjax.sim.sim_backend import SimulatedBackend, make_engine
from shiftjax.sim.trace import TraceRequest

IDLE_SECONDS = 0.05  # that pass in a turn in which nothing can be done, say for a pause to end


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
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    priority: int = 0


class FleetRun(NamedTuple):
    """What became of the groups of a fleet."""

    first: Arrangement
    turns: tuple[Turn, ...]
    stats: FleetStats
    num_moved_bytes: int  # received by a device, over all moves
    move_seconds: float  # of devices


class PhasesRun(NamedTuple):
    """What became of an engine in phases."""

    switches: tuple[Switch, ...]
    num_parked_bytes: int  # of KV that went to the host, over all devices
    num_restored_bytes: int
    waited_seconds: float  # of first stages, for KV that was not there yet


@dataclass(frozen=True)
class Replay:
    """All that happened: requests by arrival, the steps of all replicas by their ends."""

    deployment: Deployment
    requests: list[RequestRecord]
    steps: list[StepRecord]
    num_refused: int
    mode_switches: int
    num_preemptions: int
    fleet: FleetRun | None = None
    phases: PhasesRun | None = None  # `deployment` is then that of the prompts
    roles: RolesRun | None = None  # `deployment` is then that of the first side
    best: Mapping[str, int] | None = None  # of an oracle: windows in which each deployment was best

    @property
    def labels(self) -> list[str]:
        """The modes of its steps, in the order of their names: base comes first."""
        return sorted({step.mode.label for step in self.steps})


def replay(
    requests: Sequence[TraceRequest],
    target: Target,
    deployment: Deployment | Phases | RoleSplit,
    belief: GroupCosts | None = None,
    acceptance: AcceptanceModel | None = None,
    hear: Callable[[Event], None] = lambda _: None,
) -> Replay:
    """Serve a trace, sorted by arrival, or a closed loop, to its end.

    `belief` is what a cost policy thinks, `acceptance` how often drafts are right; `hear` is told
    of all events.
    """
    clock, kind = Clock(), SimulatedBackend
    if isinstance(deployment, Phases):
        deployments = [deployment.by_phase[phase] for phase in PHASES]
        first = replace(deployments[0], name=deployment.name)
    elif isinstance(deployment, RoleSplit):
        deployments, kind = deployment.sides, RolesBackend
        first = replace(deployments[0], name=deployment.name)
    else:
        deployments, first = [deployment], deployment
    engine, runners = make_engine(target, deployments, clock, belief, acceptance, kind)
    vocab_size = target.model.vocab_size
    adapters = _adapters_of(first, engine)
    coming = (
        _request(n, request, vocab_size, next(adapters)) for n, request in enumerate(requests)
    )
    is_loop = isinstance(requests, ClosedLoop)
    arrivals = Returning(requests, coming) if is_loop else InOrder(coming)
    reading = reading_seconds(target.engine, target.model)
    waits = (target.engine.chat_latency_seconds, opening_seconds(target.engine, target.machine))
    if reading or any(waits):
        arrivals = FrontEnd(arrivals, reading, *waits)
    records, num_refused = serve(engine, clock, arrivals, hear)
    stats = engine.stats()
    steps = [step for runner in runners for step in runner.steps]
    return Replay(
        first,
        records,
        sorted(steps, key=lambda s: s.done),
        num_refused,
        sum(stats.mode_switches.values()),
        sum(stats.num_preemptions.values()),
        _fleet_run(first, engine),
        _phases_run(engine, runners),
        _roles_run(engine),
    )


def _phases_run(engine: Engine, runners: Sequence[CostRunner]) -> PhasesRun | None:
    resharding, host = engine.topology.find(Resharding), engine.stats().find(HostStats)
    if resharding is None or host is None:
        return None
    exchange = resharding.exchange
    assert isinstance(exchange, CostExchange)
    moved = host.num_offloaded_bytes, host.num_restored_bytes
    waited = sum(runner.waited_seconds for runner in runners)
    return PhasesRun(tuple(exchange.switches), *moved, waited)


def _roles_run(engine: Engine) -> RolesRun | None:
    roles = engine.topology.find(Roles)
    return None if roles is None else roles.run


def _fleet_run(deployment: Deployment, engine: Engine) -> FleetRun | None:
    fleet = engine.topology.find(Fleet)
    if fleet is None:
        return None
    mover = fleet.mover
    assert isinstance(mover, CostMover)
    first = first_arrangement(deployment)
    return FleetRun(first, tuple(fleet.history), fleet.stats, mover.num_bytes, mover.seconds)


def serve(
    engine: Engine,
    clock: Clock,
    requests: Arrivals | Iterable[Request],
    hear: Callable[[Event], None] = lambda _: None,
) -> tuple[list[RequestRecord], int]:
    """Bring requests when they come, and step while there is work; `hear` is told of all events.

    Returns what became of them, in their order, and how many were refused.

    A request that comes while the host waits for a step is seen after it, as by a server. Its
    tokens are as a trace spells them, so nothing but its length can be refused.
    """
    coming = requests if isinstance(requests, Arrivals) else InOrder(requests)
    num_refused = 0
    names: list[str] = []
    open_requests: dict[str, Request] = {}
    ended: dict[str, RequestRecord] = {}
    while coming.next_seconds < inf or engine.has_work():
        while (at := coming.next_seconds) <= clock.now or (at < inf and not engine.has_work()):
            clock.now = max(clock.now, at)
            request = coming.take()
            try:
                num_prompt, limits = len(request.prompt_token_ids), engine.limits
                check_length(num_prompt, request.sampling.max_tokens, limits)
                engine.admit(request)
                names.append(request.request_id)
                open_requests[request.request_id] = request
            except RequestError:
                num_refused += 1
                coming.ended(clock.now)
        clock.next_arrival = coming.next_seconds
        begin = clock.now
        for event in engine.step(begin):
            hear(event)
            if event.metrics is not None:
                name = event.request_id
                record = ended[name] = _record(event, open_requests.pop(name))
                coming.ended(record.arrival + record.completion)
        if clock.now == begin and not any(lane.in_flight for lane in engine.lanes):
            clock.now = min(coming.next_seconds, clock.next_due, begin + IDLE_SECONDS)
    return [ended[name] for name in names], num_refused


@dataclass(frozen=True, slots=True)
class TracePrompt(Collection[int]):
    """The prompt of a traced request, spelled when it is read: who waits holds no token ids."""

    request: TraceRequest
    number: int
    vocab_size: int

    def __len__(self) -> int:
        return self.request.num_prompt_tokens

    def __iter__(self) -> Iterator[int]:
        return iter(self.request.prompt(self.number, self.vocab_size))

    def __contains__(self, token: object) -> bool:
        return token in self.request.prompt(self.number, self.vocab_size)


@lru_cache(1 << 16)
def _sampling(num_output_tokens: int) -> SamplingParams:
    """Equal ones are one object: a million of them wait in a queue."""
    return SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)


def _request(
    number: int, request: TraceRequest, vocab_size: int, adapter: str | None = None
) -> Request:
    prompt = TracePrompt(request, number, vocab_size)
    own = _sampling(request.num_output_tokens), request.arrival_seconds, request.priority
    return Request(str(number), prompt, *own, adapter)


def _adapters_of(deployment: Deployment, engine: Engine) -> Iterator[str | None]:
    """Yield the adapter of each request: the nth most wanted is wanted 1 / n times as often."""
    pool, names = engine.limits.adapters, list(deployment.lora.modules)
    if not isinstance(pool, AdapterPool) or not names:
        yield from repeat(None)
        return
    keys, weights = [pool.key_of(name) for name in names], [1 / (n + 1) for n in range(len(names))]
    draw = Random(0)
    while True:
        yield draw.choices(keys, weights)[0]


def _record(event: Event, request: Request) -> RequestRecord:
    metrics = event.metrics
    if event.finish_reason != "length" or metrics is None:
        raise RuntimeError(f"a request ended with {event.finish_reason}: {event.error}")
    later = max(0, metrics.num_output_tokens - 1)
    ttft = metrics.ttft_seconds or 0.0
    return RequestRecord(
        request.arrival_seconds,
        metrics.queue_seconds or 0.0,
        ttft,
        metrics.tpot_seconds,
        ttft + later * (metrics.tpot_seconds or 0.0),
        metrics.num_prompt_tokens,
        metrics.num_output_tokens,
        metrics.num_cached_tokens,
        metrics.num_proposed_tokens,
        metrics.num_accepted_tokens,
        request.priority,
    )
