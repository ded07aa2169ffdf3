"""From deployments to an engine, on devices or simulated ones: the one place that joins parts.

A backend starts the groups. Everything else, lanes, schedulers, topology and engine, is the same
for every backend. No JAX.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from shiftjax.adapters.admission import WithAdapters
from shiftjax.adapters.pool import AdapterPool
from shiftjax.core.admission import Admission
from shiftjax.core.blocks import BlockAllocator
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.notes import Notes
from shiftjax.core.policy import Policy
from shiftjax.core.request import Runner
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.step_sizes import StepSizes
from shiftjax.core.tier import Tier
from shiftjax.core.topology import Topology
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.routing import price
from shiftjax.deploy.deployment import Deployment
from shiftjax.disk_tier.disk import Disk, DiskPlace
from shiftjax.disk_tier.disk_blocks import DiskBlocks
from shiftjax.disk_tier.waits import Waits
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import Speculation
from shiftjax.explain.step_samples import StepSamples
from shiftjax.fleet.handover import Mover
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.setup import forget_prices, make_fleet
from shiftjax.fleet.shared_blocks import share
from shiftjax.host_tier.extents import HostBlocks, HostMemory
from shiftjax.hosts.replicas import HostGroups, Replicas
from shiftjax.parallel.grid import Group, Mode
from shiftjax.phases.configurations import limits_of
from shiftjax.phases.parking import Parking
from shiftjax.phases.resharding import PHASES, Exchange, Resharding
from shiftjax.routing.history import RoutingHistory
from shiftjax.sizing.cost_sizes import CostSizes, Known, patience_of, sizes_by_costs
from shiftjax.sizing.target_sizes import TargetSizes

TierOf = Callable[[int, int, int], Tier]  # of a block: tokens, bytes; tokens that are hashed


class Drafter(NamedTuple):
    """What guesses in one group, and the clock that its seconds are read from."""

    drafting: Drafting
    clock: Callable[[], float]


MakeTopology = Callable[[Sequence[Sequence[Lane]]], Topology]


class Groups(NamedTuple):
    """The groups of one deployment with their runners; all else by units of a group."""

    deployment: Deployment  # with its KV blocks
    runners: Mapping[Group, Runner]
    modes: Mapping[int, tuple[Mode, ...]]  # base first
    policies: Mapping[int, Policy]
    costs: Mapping[int, GroupCosts | None]  # as policies and drafts believe; None: unknown
    drafters: Mapping[Group, Drafter]
    admission: Callable[[], Admission] | None = None  # of a group; None: the deployment's
    host_of: Mapping[Group, int] = MappingProxyType({})  # the ranks of those on other hosts


class Started(NamedTuple):
    """What a backend has started: groups of each deployment, and what changes between them."""

    groups: Sequence[Groups]
    mover: Mover | None = None  # of sequences, between the groups of a fleet
    exchange: Exchange | None = None  # of the devices, between two deployments
    routing: RoutingHistory | None = None  # of the model's experts, as devices count it
    adapters: AdapterPool | None = None
    notes: Notes | None = None  # of tokens, as their steps tell them; None: nothing is kept
    hosts: Replicas | None = None  # where hosts have groups of their own
    topology: MakeTopology | None = None  # of the lanes of each deployment; None: as these say
    disk: DiskPlace | None = None  # where blocks go that fall out of host memory; None: nowhere


class Backend(Protocol):
    """What computes the steps of deployments: devices, or simulated ones."""

    @property
    def clock(self) -> Callable[[], float]:
        """Tells the seconds that results are entered with."""
        ...

    @property
    def now(self) -> Callable[[], float]:
        """Tells the seconds of all other decisions."""
        ...

    @property
    def wait(self) -> Callable[[Sequence[Lane]], None]:
        """Waits until the oldest step of one of these lanes is ready."""
        ...

    def start(self, deployments: Sequence[Deployment]) -> Started:
        """Start the groups of one deployment, or of two that have the devices in turn."""
        ...


def assemble(deployments: Sequence[Deployment], backend: Backend) -> Engine:
    """Return the engine of one deployment, or of two: of prompts, and of decodes.

    Raises ConfigError where a backend cannot start them.
    """
    groups, mover, exchange, routing, adapters, notes, hosts, made, disk = backend.start(
        deployments
    )
    first = groups[0]
    ranks = {0, *first.host_of.values()}
    memory = {rank: HostMemory(first.deployment.host_bytes) for rank in ranks}
    tiers: dict[int, TierOf] = {}
    if first.deployment.host_bytes:
        tiers = {rank: partial(HostBlocks, own) for rank, own in memory.items()}
    if disk is not None:
        opened = Disk(disk)
        tiers[0] = partial(DiskBlocks, memory[0], opened, Waits(opened))
    shared = tiers, notes, adapters, len(groups) > 1
    lanes = [_make_lanes(each, *shared, is_phase=exchange is not None) for each in groups]
    topology: Topology | None = made(lanes) if made is not None else None
    if exchange is not None:
        by_phase = dict(zip(PHASES, lanes, strict=True))
        topology = Resharding(by_phase, exchange, memory[0], backend.now)
    elif mover is not None:
        known = first.policies, first.costs
        topology = make_fleet(first.deployment, lanes[0], *known, mover, backend.now)
    elif hosts is not None:
        topology = HostGroups(lanes[0], first.host_of, hosts)
    if routing is not None:
        routing.watchers += _priced_by_routing(groups, topology)
    limits = limits_of(each.deployment for each in groups)
    parts: list[Callable[[], object]] = [] if routing is None else [routing.told]
    if adapters is not None:
        limits = replace(limits, adapters=adapters)
        parts.append(adapters.told)
    engine = Engine(
        list(chain.from_iterable(lanes)),
        first.policies[max(first.policies)],
        limits,
        overlap=first.deployment.overlap,
        seed=first.deployment.seed,
        clock=backend.clock,
        wait=backend.wait,
        topology=topology,
        patience=0.0 if exchange is not None else _patience(first),
        parts=parts,
        watchers=[StepSamples()],
    )
    if adapters is not None:
        adapters.users = lambda: (
            (request.adapter, runs) for request, runs in engine.unfinished() if request.adapter
        )
    return engine


def _make_lanes(
    groups: Groups,
    tiers: Mapping[int, TierOf],
    notes: Notes | None,
    adapters: AdapterPool | None,
    is_one_of_several: bool,
    *,
    is_phase: bool,
) -> list[Lane]:
    """A lane for every group; those of a fleet share their blocks, all on a host its memory.

    A lane has a policy of its own where the engine has lanes of several deployments or widths.
    """
    deployment = groups.deployment
    blocks: Mapping[Group, BlockAllocator] = {}
    if deployment.widths:
        sizes = {group: deployment.of_width(group.width).block_size for group in groups.runners}
        blocks = share(deployment.num_blocks, sizes)
    has_own = is_one_of_several or bool(deployment.widths)
    lanes = []
    for group, runner in groups.runners.items():
        of_width, policy = deployment.of_width(group.width), groups.policies[group.width]
        host, speculation = None, None
        rank = groups.host_of.get(group, 0)
        if rank in tiers:
            sizes = of_width.block_size, of_width.host_block_bytes, of_width.hash_size
            host = tiers[rank](*sizes)
        if group in groups.drafters:
            speculation = _speculation(groups, group)
        admission = Parking() if deployment.parks else None
        if adapters is not None:
            admission = WithAdapters(adapters)
        if groups.admission is not None:
            admission = groups.admission()
        seams = speculation, blocks.get(group), host, admission
        sizes = None if is_phase else _sizes(groups, group.width)
        scheduler = Scheduler(of_width.budgets, *seams, sizes, notes)
        own = policy if has_own else None
        modes = groups.modes[group.width]
        costs = groups.costs[group.width]
        lanes.append(Lane(scheduler, runner, modes, group=group, policy=own, costs=costs))
    return lanes


def _priced_by_routing(
    groups: Sequence[Groups], topology: Topology | None
) -> Iterator[Callable[[np.ndarray], None]]:
    """What takes over counts of chosen experts, where steps are predicted."""
    for each in groups:
        for costs in each.costs.values():
            if costs is not None:
                yield partial(price, costs)
    if isinstance(topology, Fleet):
        yield lambda _: forget_prices(topology)


def _sizes(groups: Groups, width: int) -> StepSizes | None:
    """Who says how large steps of a group are; None: they are as large as they may be."""
    deployment, costs = groups.deployment.of_width(width), groups.costs[width]
    if costs is None or not sizes_by_costs(deployment, costs):
        return None
    known = Known(deployment.step_sizes, groups.policies[width], groups.modes[width], costs)
    if deployment.targets.are_none:
        return CostSizes(known, deployment.dp)
    return TargetSizes(known, deployment.targets, deployment.dp)


def _patience(groups: Groups) -> float:
    """Seconds that a request may be passed for, by prompt token: one for all groups.

    That of the widest, so that a request that goes from one group to another keeps its order.
    """
    width = max(groups.costs)
    deployment, costs = groups.deployment.of_width(width), groups.costs[width]
    if costs is None or not sizes_by_costs(deployment, costs):
        return 0.0
    modes = groups.modes[width]
    return patience_of(Known(deployment.step_sizes, groups.policies[width], modes, costs))


def _speculation(groups: Groups, group: Group) -> Speculation:
    width, deployment = group.width, groups.deployment.of_width(group.width)
    speculator = deployment.layout.model.speculator
    num_predict = speculator.num_predict if speculator else 0
    costs = groups.costs[width] if deployment.prices_drafts else None
    known = groups.policies[width], groups.modes[width], costs
    return Speculation(
        groups.drafters[group].drafting,
        Prices(deployment.step_sizes, *known),
        max_rows=deployment.budgets.max_rows,
        overlap=deployment.overlap,
        num_guesses=min(num_predict, deployment.drafts.max_draft_tokens),  # no draft is longer
        num_micro_batches=deployment.budgets.num_micro_batches,
        clock=groups.drafters[group].clock,
    )
