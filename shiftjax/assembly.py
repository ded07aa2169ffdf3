"""Lanes of a configuration, on devices or simulated ones: the one place that puts them together.

What differs is handed in: runners, and who guesses ahead. No JAX.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from shiftjax.core.blocks import BlockAllocator
from shiftjax.core.lane import Lane
from shiftjax.core.policy import Policy
from shiftjax.core.request import Runner
from shiftjax.core.scheduler import Scheduler
from shiftjax.costs.stages import GroupCosts
from shiftjax.deploy.deployment import Deployment
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import Speculation
from shiftjax.fleet.shared_blocks import share
from shiftjax.host_tier.chunks import HostBlocks, HostMemory
from shiftjax.parallel.grid import Group, Mode
from shiftjax.phases.parking import Parking


class Drafter(NamedTuple):
    """What guesses in one group, and the clock that its seconds are read from."""

    drafting: Drafting
    clock: Callable[[], float]


class Groups(NamedTuple):
    """The groups of one deployment with their runners; all else by units of a group."""

    deployment: Deployment  # with its KV blocks
    runners: Mapping[Group, Runner]
    modes: Mapping[int, tuple[Mode, ...]]  # base first
    policies: Mapping[int, Policy]
    costs: Mapping[int, GroupCosts | None]  # as policies and drafts believe; None: unknown


def make_lanes(
    groups: Groups,
    memory: HostMemory,
    drafters: Mapping[Group, Drafter],
    *,
    overlap: bool,
    is_phase: bool = False,
) -> list[Lane]:
    """A lane for every group; those of a fleet share their blocks, all of them host memory.

    A lane has a policy of its own where the engine has lanes of several deployments or widths.
    """
    deployment = groups.deployment
    blocks: Mapping[Group, BlockAllocator] = {}
    if deployment.widths:
        sizes = {group: deployment.of_width(group.width).block_size for group in groups.runners}
        blocks = share(deployment.num_blocks, sizes)
    has_own = is_phase or bool(deployment.widths)
    lanes = []
    for group, runner in groups.runners.items():
        of_width, policy = deployment.of_width(group.width), groups.policies[group.width]
        host, speculation = None, None
        if memory.num_bytes:
            host = HostBlocks(memory, of_width.block_size, of_width.host_block_bytes)
        if group in drafters:
            speculation = _speculation(groups, group, drafters[group], overlap)
        admission = Parking() if deployment.parks else None
        scheduler = Scheduler(of_width.budgets, speculation, blocks.get(group), host, admission)
        own = policy if has_own else None
        modes = groups.modes[group.width]
        lanes.append(Lane(scheduler, runner, modes, group=group, policy=own))
    return lanes


def _speculation(groups: Groups, group: Group, drafter: Drafter, overlap: bool) -> Speculation:
    width, deployment = group.width, groups.deployment.of_width(group.width)
    speculator = deployment.layout.model.speculator
    num_predict = speculator.num_predict if speculator else 0
    known = groups.policies[width], groups.modes[width], groups.costs[width]
    return Speculation(
        drafter.drafting,
        Prices(deployment.step_sizes, *known),
        max_rows=deployment.budgets.max_rows,
        overlap=overlap,
        num_guesses=min(num_predict, deployment.drafts.max_draft_tokens),  # no draft is longer
        clock=drafter.clock,
    )
