"""Engines on virtual devices: the classes that serve, over `CostRunner` and one virtual clock."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from shiftjax.assembly import Drafter, Groups, make_lanes
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.costs.machine import Transfer
from shiftjax.costs.stages import GroupCosts
from shiftjax.deploy.deployment import Deployment
from shiftjax.fleet.control import Fleet
from shiftjax.fleet.cost_arrangement import CostArrangement
from shiftjax.fleet.setup import make_fleet, move_costs
from shiftjax.host_tier.chunks import HostMemory
from shiftjax.phases.control import Phase, Resharding
from shiftjax.phases.costs import check_host_links
from shiftjax.phases.setup import limits_of
from shiftjax.sim.deployment import (
    Target,
    cost_model,
    drafting_of,
    modes_of,
    policy_of,
    sized_of,
)
from shiftjax.sim.devices import Clock, CostMover, CostRunner, Units
from shiftjax.sim.drafts import AcceptanceModel
from shiftjax.sim.exchange import CostExchange
from shiftjax.sim.host_link import HostLink, Stored


class Tier(NamedTuple):
    """The host's memory for KV, of all groups of an engine."""

    memory: HostMemory
    stored: Stored


class Made(NamedTuple):
    """The groups of one deployment, and what only simulated ones have."""

    groups: Groups
    lanes: list[Lane]
    runners: list[CostRunner]
    units: Units


def make_engine(
    target: Target,
    deployment: Deployment,
    clock: Clock,
    belief: GroupCosts | None = None,
    acceptance: AcceptanceModel | None = None,
    seed: int = 0,
) -> tuple[Engine, list[CostRunner]]:
    """An engine on virtual devices, and these.

    Raises ConfigError where the model does not fit, or drafts come without an acceptance.
    """
    tier = Tier(HostMemory(deployment.host_bytes), Stored())
    made = _make_lanes(target, deployment, clock, tier, belief, acceptance)
    engine = Engine(
        made.lanes,
        made.groups.policies[max(made.groups.policies)],
        made.groups.deployment.limits,
        overlap=target.engine.overlaps,
        seed=seed,
        clock=clock,
        wait=clock.wait_for_all if target.engine.replicas_in_step else clock.wait_for_one,
        topology=_fleet(target, made, clock) if deployment.widths else None,
    )
    return engine, made.runners


def make_phases(
    target: Target, phases: Mapping[Phase, Deployment], clock: Clock
) -> tuple[Engine, list[CostRunner]]:
    """An engine whose devices take turns in two configurations; `Resharding` has its exchange.

    Raises ConfigError where a phase does not fit, or the machine's links to the host are unknown.
    """
    tier = Tier(HostMemory(phases["prefill"].host_bytes), Stored())
    made: dict[Phase, Made] = {
        phase: _make_lanes(target, each, clock, tier, is_phase=True)
        for phase, each in phases.items()
    }
    runners = [runner for each in made.values() for runner in each.runners]
    sized: dict[Phase, Deployment] = {phase: each.groups.deployment for phase, each in made.items()}
    exchange = CostExchange(target, sized, runners, clock)
    lanes: dict[Phase, list[Lane]] = {phase: each.lanes for phase, each in made.items()}
    prefill = made["prefill"].groups.policies
    engine = Engine(
        [*lanes["prefill"], *lanes["decode"]],
        prefill[max(prefill)],
        limits_of(sized.values()),
        overlap=target.engine.overlaps,
        clock=clock,
        wait=clock.wait_for_all if target.engine.replicas_in_step else clock.wait_for_one,
        topology=Resharding(lanes, exchange, tier.memory, lambda: clock.now),
    )
    return engine, runners


def _make_lanes(
    target: Target,
    deployment: Deployment,
    clock: Clock,
    tier: Tier,
    belief: GroupCosts | None = None,
    acceptance: AcceptanceModel | None = None,
    *,
    is_phase: bool = False,
) -> Made:
    sized = sized_of(target, deployment)
    units = Units(sized.grid.units)
    by_width = sized.by_width
    costs = {width: cost_model(target, each) for width, each in by_width.items()}
    beliefs: dict[int, GroupCosts | None] = dict(costs)
    if belief is not None:
        known = belief.machine, belief.engine
        beliefs = {width: each.costs(*known) for width, each in by_width.items()}
    runners = {
        group: CostRunner(
            costs[width],
            clock,
            group=group,
            units=units,
            own_host=target.engine.replicas_in_step,
            drafting=drafting_of(target, deployment, acceptance),
            link=_link(target, by_width[width], tier),
        )
        for width in sorted(costs, reverse=True)
        for group in sized.grid.groups(width)
    }
    groups = Groups(
        sized,
        runners,
        {width: modes_of(costs[width], each) for width, each in by_width.items()},
        {w: policy_of(sized, costs[w], beliefs[w] or costs[w]) for w in costs},
        beliefs,
    )
    drafters = {
        group: Drafter(runner.drafting, runner.drafting.clock)
        for group, runner in runners.items()
        if runner.drafting is not None
    }
    overlap = target.engine.overlaps
    lanes = make_lanes(groups, tier.memory, drafters, overlap=overlap, is_phase=is_phase)
    return Made(groups, lanes, list(runners.values()), units)


def _link(target: Target, deployment: Deployment, tier: Tier) -> HostLink | None:
    if not tier.memory.num_bytes:
        return None
    check_host_links(target.machine)
    sizes = [stage.block_bytes for stage in deployment.stages]
    return HostLink(target.machine, sizes, deployment.blocks_in_flight, tier.stored)


def _fleet(target: Target, made: Made, clock: Clock) -> Fleet:
    """The groups that come and go; greedy ones do so for nothing, whenever it is best."""
    deployment = made.groups.deployment
    machine, host_seconds = target.machine, target.engine.host(0, 2)
    is_free = deployment.policy_class.is_simulated
    if is_free:
        free, host_seconds = (Transfer(0.0, float("inf")),), 0.0
        machine = replace(
            machine, all_to_all=free, memory_bytes_per_second=float("inf"), kernel_seconds=0.0
        )
    costs = move_costs(deployment, machine)
    mover = CostMover(costs, clock, made.units, host_seconds)
    known = made.groups.policies, made.groups.costs
    fleet = make_fleet(deployment, made.lanes, *known, mover, lambda: clock.now)
    fleet.history = deque()  # all of it
    if isinstance(fleet.policy, CostArrangement) and is_free:
        fleet.policy = replace(fleet.policy, moves=costs, margin=0.0, hold_switches=0.0)
    return fleet
