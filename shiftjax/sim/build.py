"""Engines on virtual devices: the classes that serve, over `CostRunner` and one virtual clock."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from shiftjax.core.blocks import BlockAllocator
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.policy import Policy
from shiftjax.core.scheduler import Scheduler
from shiftjax.costs.machine import Transfer
from shiftjax.costs.stages import GroupCosts
from shiftjax.deploy.deployment import Deployment
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import Speculation
from shiftjax.fleet.control import Fleet
from shiftjax.fleet.cost_arrangement import CostArrangement
from shiftjax.fleet.setup import make_fleet, move_costs
from shiftjax.fleet.shared_blocks import share
from shiftjax.host_tier.chunks import HostBlocks, HostMemory
from shiftjax.parallel.grid import Group
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
    sizes_of,
)
from shiftjax.sim.devices import Clock, CostMover, CostRunner, Units
from shiftjax.sim.drafts import AcceptanceModel
from shiftjax.sim.exchange import CostExchange
from shiftjax.sim.host_link import HostLink, Stored


class Tier(NamedTuple):
    """The host's memory for KV, of all groups of an engine."""

    memory: HostMemory
    stored: Stored


class Lanes(NamedTuple):
    """The groups of one deployment, with blocks, and what chooses their modes, by width."""

    deployment: Deployment
    lanes: list[Lane]
    runners: list[CostRunner]
    units: Units
    policies: dict[int, Policy]
    beliefs: dict[int, GroupCosts]


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
        made.policies[max(made.policies)],
        made.deployment.limits,
        overlap=target.engine.overlaps,
        seed=seed,
        clock=clock,
        wait=clock.wait_for_all if target.engine.replicas_in_step else clock.wait_for_one,
        topology=_fleet(target, made, clock) if made.deployment.widths else None,
    )
    return engine, made.runners


def make_phases(
    target: Target, phases: Mapping[Phase, Deployment], clock: Clock
) -> tuple[Engine, list[CostRunner]]:
    """An engine whose devices take turns in two configurations; `Resharding` has its exchange.

    Raises ConfigError where a phase does not fit, or the machine's links to the host are unknown.
    """
    tier = Tier(HostMemory(phases["prefill"].host_bytes), Stored())
    made: dict[Phase, Lanes] = {
        phase: _make_lanes(target, each, clock, tier) for phase, each in phases.items()
    }
    runners = [runner for each in made.values() for runner in each.runners]
    sized: dict[Phase, Deployment] = {phase: each.deployment for phase, each in made.items()}
    exchange = CostExchange(target, sized, runners, clock)
    lanes: dict[Phase, list[Lane]] = {phase: each.lanes for phase, each in made.items()}
    prefill = made["prefill"].policies
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
) -> Lanes:
    sized = sized_of(target, deployment)
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
    made = Lanes(sized, [], [], units, policies, beliefs)
    for group in groups:
        width, of_width = group.width, sized.of_width(group.width)
        runner = CostRunner(
            costs[width],
            clock,
            group=group,
            units=units,
            own_host=target.engine.replicas_in_step,
            drafting=drafting_of(target, deployment, acceptance),
            link=_link(target, of_width, tier),
        )
        host = None
        if tier.memory.num_bytes:
            host = HostBlocks(tier.memory, of_width.block_size, of_width.host_block_bytes)
        known = beliefs[width], policies[width]
        made.lanes.append(_lane(target, of_width, runner, *known, blocks.get(group), host))
        made.runners.append(runner)
    return made


def _link(target: Target, deployment: Deployment, tier: Tier) -> HostLink | None:
    if not tier.memory.num_bytes:
        return None
    check_host_links(target.machine)
    sizes = [stage.block_bytes for stage in deployment.stages]
    return HostLink(target.machine, sizes, deployment.blocks_in_flight, tier.stored)


def _lane(
    target: Target,
    deployment: Deployment,
    runner: CostRunner,
    belief: GroupCosts,
    policy: Policy,
    blocks: BlockAllocator | None,
    host: HostBlocks | None,
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
    scheduler = Scheduler(deployment.budgets, speculation, blocks, host)
    return Lane(scheduler, runner, modes, group=runner.group, policy=policy)


def _fleet(target: Target, made: Lanes, clock: Clock) -> Fleet:
    """The groups that come and go; greedy ones do so for nothing, whenever it is best."""
    deployment = made.deployment
    machine, host_seconds = target.machine, target.engine.host(0, 2)
    is_free = deployment.policy_class.is_simulated
    if is_free:
        free, host_seconds = (Transfer(0.0, float("inf")),), 0.0
        machine = replace(
            machine, all_to_all=free, memory_bytes_per_second=float("inf"), kernel_seconds=0.0
        )
    costs = move_costs(deployment, machine)
    mover = CostMover(costs, clock, made.units, host_seconds)
    known = made.policies, made.beliefs
    fleet = make_fleet(deployment, made.lanes, *known, mover, lambda: clock.now)
    fleet.history = deque()  # all of it
    if isinstance(fleet.policy, CostArrangement) and is_free:
        fleet.policy = replace(fleet.policy, moves=costs, margin=0.0, hold_switches=0.0)
    return fleet
