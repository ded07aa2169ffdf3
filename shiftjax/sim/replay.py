"""Replays a trace through the production loop: the real engine, a `CostRunner`, a virtual clock.

One engine, as in a server: data-parallel replicas are its groups, its own queue gives them their
requests, and they share the virtual clock. Everything that decides is the code that serves. The
host prepares the steps of all groups, one after the other; an engine whose replicas step together
(`replicas_in_step`) has a process for each, whose host works pass side by side.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shiftjax.control.blocks import BlockAllocator
from shiftjax.control.cost_arrangement import CostArrangement
from shiftjax.control.deployment import Deployment
from shiftjax.control.engine import Engine
from shiftjax.control.fleet import Fleet
from shiftjax.control.fleet_setup import first_arrangement, make_fleet, move_costs
from shiftjax.control.fleet_stats import FleetStats, Turn
from shiftjax.control.lane import Lane
from shiftjax.control.policy import Policy
from shiftjax.control.prices import Prices
from shiftjax.control.request import Event, Request, RequestError, SamplingParams
from shiftjax.control.scheduler import Scheduler
from shiftjax.control.shared_blocks import share
from shiftjax.control.speculation import Speculation
from shiftjax.costs.machine import Transfer
from shiftjax.costs.stages import GroupCosts
from shiftjax.parallel.fleet import Arrangement
from shiftjax.parallel.grid import Group
from shiftjax.sim.deployment import (
    Target,
    cost_model,
    drafting_of,
    memory_of,
    modes_of,
    policy_of,
    sizes_of,
)
from shiftjax.sim.devices import Clock, CostMover, CostRunner, StepRecord, Units
from shiftjax.sim.drafts import AcceptanceModel
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
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    priority: int = 0


class FleetRun(NamedTuple):
    """What became of the groups of a fleet."""

    first: Arrangement
    turns: tuple[Turn, ...]
    stats: FleetStats
    num_moved_bytes: int  # received by a device, over all moves
    move_seconds: float  # of devices


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

    @property
    def labels(self) -> list[str]:
        """The modes of its steps, in the order of their names: base comes first."""
        return sorted({step.mode.label for step in self.steps})


def make_engine(
    target: Target,
    deployment: Deployment,
    clock: Clock,
    belief: GroupCosts | None = None,
    acceptance: AcceptanceModel | None = None,
) -> tuple[Engine, list[CostRunner]]:
    """An engine on virtual devices, and these.

    Raises ConfigError where the model does not fit, or drafts come without an acceptance.
    """
    memory, in_step = memory_of(target, deployment), target.engine.replicas_in_step
    sized = deployment.with_blocks(memory.num_kv_tokens // deployment.block_size, memory)
    units = Units(sized.grid.units)
    costs = {width: cost_model(target, each) for width, each in sized.by_width.items()}
    beliefs = costs
    if belief is not None:
        known = belief.machine, belief.engine
        beliefs = {width: each.costs(*known) for width, each in sized.by_width.items()}
    policies = {w: policy_of(sized, costs[w], beliefs[w]) for w in costs}
    groups = [group for width in sorted(costs, reverse=True) for group in sized.grid.groups(width)]
    blocks: Mapping[Group, BlockAllocator] = {}
    if sized.widths:
        sizes = {group: sized.of_width(group.width).block_size for group in groups}
        blocks = share(sized.num_blocks, sizes)
    lanes, runners = [], []
    for group in groups:
        width, drafting = group.width, drafting_of(target, deployment, acceptance)
        runner = CostRunner(
            costs[width],
            clock,
            group=group,
            units=units,
            own_host=in_step,
            drafting=drafting,
        )
        known = beliefs[width], policies[width]
        lanes.append(_lane(target, sized.of_width(width), runner, *known, blocks.get(group)))
        runners.append(runner)
    fleet = _fleet(target, sized, lanes, policies, beliefs, clock, units) if sized.widths else None
    engine = Engine(
        lanes,
        policies[max(policies)],
        sized.limits,
        overlap=target.engine.overlaps,
        clock=clock,
        wait=clock.wait_for_all if in_step else clock.wait_for_one,
        fleet=fleet,
    )
    return engine, runners


def _lane(
    target: Target,
    deployment: Deployment,
    runner: CostRunner,
    belief: GroupCosts,
    policy: Policy,
    blocks: BlockAllocator | None,
) -> Lane:
    """One group, with a deployment of its width."""
    modes, speculation = modes_of(runner.costs, deployment), None
    if runner.drafting is not None:
        speculation = Speculation(
            runner.drafting,
            Prices(sizes_of(deployment), policy, modes, belief),
            max_rows=deployment.budgets.max_rows,
            overlap=target.engine.overlaps,
            clock=runner.drafting.clock,
        )
    scheduler = Scheduler(deployment.budgets, speculation, blocks)
    return Lane(scheduler, runner, modes, group=runner.group, policy=policy)


def _fleet(
    target: Target,
    deployment: Deployment,
    lanes: Sequence[Lane],
    policies: Mapping[int, Policy],
    beliefs: Mapping[int, GroupCosts],
    clock: Clock,
    units: Units,
) -> Fleet:
    """The groups that come and go; those of an oracle do so for nothing, whenever it is best."""
    machine, host_seconds = target.machine, target.engine.host(0, 2)
    if deployment.policy == "oracle":
        free, host_seconds = (Transfer(0.0, float("inf")),), 0.0
        machine = replace(
            machine, all_to_all=free, memory_bytes_per_second=float("inf"), kernel_seconds=0.0
        )
    costs = move_costs(deployment, machine)
    mover = CostMover(costs, clock, units, host_seconds)
    fleet = make_fleet(deployment, lanes, policies, beliefs, mover, lambda: clock.now)
    fleet.history = deque()  # all of it
    if isinstance(fleet.policy, CostArrangement) and deployment.policy == "oracle":
        fleet.policy = replace(fleet.policy, moves=costs, margin=0.0, hold_switches=0.0)
    return fleet


def replay(
    requests: Sequence[TraceRequest],
    target: Target,
    deployment: Deployment,
    belief: GroupCosts | None = None,
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
        _fleet_run(deployment, engine),
    )


def _fleet_run(deployment: Deployment, engine: Engine) -> FleetRun | None:
    fleet = engine.fleet
    if fleet is None:
        return None
    mover = fleet.mover
    assert isinstance(mover, CostMover)
    first = first_arrangement(deployment)
    return FleetRun(first, tuple(fleet.history), fleet.stats, mover.num_bytes, mover.seconds)


def serve(
    engine: Engine, clock: Clock, requests: Iterable[Request]
) -> tuple[list[RequestRecord], int]:
    """Bring requests when they come, and step while there is work.

    Returns what became of them, in their order, and how many were refused.

    A request that comes while the host waits for a step is seen after it, as by a server.
    """
    coming = iter(requests)
    request, num_refused = next(coming, None), 0
    accepted: dict[str, Request] = {}
    ended: dict[str, RequestRecord] = {}
    while request is not None or engine.has_work():
        while request and (request.arrival_seconds <= clock.now or not engine.has_work()):
            clock.now = max(clock.now, request.arrival_seconds)
            try:
                engine.add_request(request)
                accepted[request.request_id] = request
            except RequestError:
                num_refused += 1
            request = next(coming, None)
        clock.next_arrival = request.arrival_seconds if request else float("inf")
        begin = clock.now
        for event in engine.step(begin):
            if event.metrics is not None:
                ended[event.request_id] = _record(event, accepted[event.request_id])
        if clock.now == begin and not any(lane.in_flight for lane in engine.lanes):
            clock.now = min(clock.next_arrival, begin + IDLE_SECONDS)
    return [ended[name] for name in accepted], num_refused


def _request(number: int, request: TraceRequest, vocab_size: int) -> Request:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True
    )
    prompt = request.prompt(number, vocab_size)
    return Request(str(number), prompt, sampling, request.arrival_seconds, request.priority)


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
        metrics.num_draft_tokens,
        metrics.num_accepted_tokens,
        request.priority,
    )
