"""One configuration of the devices: its steps compiled, its policies, a lane for each group.

A static deployment is one configuration; where prompts and decodes have one each there are two.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import jax

from shiftjax import assembly
from shiftjax.assembly import Drafter, Groups
from shiftjax.core.lane import Lane
from shiftjax.core.policy import Policy, make_policy, wanted_modes
from shiftjax.core.request import Runner
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.machine_files import MACHINE_OF_DEVICE, load_engine, load_machine, machine_of
from shiftjax.costs.stages import GroupCosts
from shiftjax.deploy.deployment import Deployment
from shiftjax.device.communicators import make_communicators
from shiftjax.device.groups import Kind, Placed, compile_steps, kind_of
from shiftjax.device.pool_sizes import PoolSizes
from shiftjax.device.programs import Program, Progress
from shiftjax.device.runner import DeviceRunner
from shiftjax.drafts.drafting import Drafting
from shiftjax.host_tier.chunks import HostMemory
from shiftjax.parallel.grid import Device, Group, Mode
from shiftjax.phases.pipeline_device import PipelineRunner

logger = logging.getLogger(__name__)
Wanted = Mapping[Bucket, list[Mode]]  # the modes that each size of steps is compiled in


class Compiled(NamedTuple):
    """A configuration whose steps are compiled; costs and policies by units of a group."""

    deployment: Deployment  # with its KV blocks
    programs: dict[Kind, list[Program]]
    known: Mapping[int, GroupCosts | None]
    policies: Mapping[int, Policy]


def compile_groups(
    deployment: Deployment,
    groups: Sequence[Placed],
    sizes: PoolSizes,
    progress: Progress,
) -> Compiled:
    """Compile what the policies may ask for, and size the KV pools. No weights are needed."""
    device = groups[0].step.mesh.devices.flat[0]
    steps = {kind_of(placed.step): placed.step for placed in reversed(groups)}  # the first ones
    modes = {kind.width: step.weights.modes for kind, step in steps.items()}
    known, policies = choosers_of(deployment, device)
    wanted = {
        width: wanted_modes(policies[width], of_width.buckets, modes[width])
        for width, of_width in deployment.by_width.items()
    }
    for width in deployment.widths:
        logger.info("fleet: %s", describe_width(deployment.of_width(width), wanted[width]))
    if deployment.widths and device.platform != "cpu":
        make_communicators((placed.step for placed in groups), deployment.widths)
    deployment, programs = compile_steps(deployment, steps, wanted, sizes, progress)
    if device.platform == "gpu" and (held := deployment.sum_buffer_bytes(wanted)):
        logger.info("sums hold %.1f GB of a GPU outside of JAX's share, with NVLink", held / 1e9)
    return Compiled(deployment, programs, known, policies)


def make_lanes(
    compiled: Compiled,
    runners: Mapping[Group, Sequence[DeviceRunner]],
    memory: HostMemory,
    *,
    is_phase: bool = False,
) -> list[Lane]:
    """A lane for every group, whose stages are one runner."""
    deployment, drafters = compiled.deployment, {}
    if deployment.drafts.speculation != "none":
        drafters = {group: Drafter(Drafting(deployment.drafts), perf_counter) for group in runners}
    groups = Groups(
        deployment,
        {group: _joined(stages) for group, stages in runners.items()},
        {group.width: stages[0].step.weights.modes for group, stages in runners.items()},
        compiled.policies,
        compiled.known,
    )
    return assembly.make_lanes(
        groups, memory, drafters, overlap=deployment.overlap, is_phase=is_phase
    )


def _joined(stages: Sequence[DeviceRunner]) -> Runner:
    return stages[0] if len(stages) == 1 else PipelineRunner(stages)


def choosers_of(
    deployment: Deployment, device: Device
) -> tuple[dict[int, GroupCosts | None], dict[int, Policy]]:
    """What is known of the costs of steps, and who chooses their modes, by units of a group."""
    known = {
        width: known_costs(of_width, device) for width, of_width in deployment.by_width.items()
    }
    name, threshold = deployment.policy, deployment.threshold
    return known, {width: make_policy(name, threshold, costs) for width, costs in known.items()}


def wanted_by_width(deployment: Deployment, device: Device) -> dict[int, Wanted]:
    """Which steps will be compiled, by units of a group; weights as `alias` has them."""
    _, policies = choosers_of(deployment, device)
    return {
        width: wanted_modes(policies[width], of_width.buckets, of_width.layout.modes)
        for width, of_width in deployment.by_width.items()
    }


def describe_width(deployment: Deployment, wanted: Wanted) -> str:
    """For people: the groups of one width of a fleet, and what is compiled for them."""
    layout, modes = deployment.layout, [mode for modes in wanted.values() for mode in modes]
    labels = [f"sp {m.sp}, tp {layout.ways(m)}" for m in layout.modes if m in modes]
    return (
        f"{deployment.dp} x {deployment.sp} units ({'; '.join(labels)}): {len(modes)} programs "
        f"for {len(wanted)} sizes of steps, KV blocks of {deployment.block_size} tokens"
    )


def known_costs(deployment: Deployment, device: Device) -> GroupCosts | None:
    """The cost model of this machine, if something asks for it.

    Raises ConfigError for an unknown machine that something needs; drafts can do without.
    """
    machine = deployment.machine
    choice, drafts = deployment.drafts.draft_choice, deployment.drafts.speculation != "none"
    is_needed = deployment.needs_costs or (drafts and choice == "cost")
    is_needed |= bool(deployment.widths) and deployment.fleet.fleet_policy == "cost"
    is_known = machine is not None or device.device_kind in MACHINE_OF_DEVICE
    if not (is_needed or (drafts and choice == "auto" and is_known)):
        return None
    name, hosts = machine or machine_of(device.device_kind), jax.process_count()
    if hosts > 1 and not (is_needed or load_machine(name).network):
        return None
    constants = load_machine(name, hosts)
    if hosts > 1:  # of which each host may have fewer than the file's machine
        here, all_of_them = jax.local_device_count(), jax.device_count()
        constants = replace(constants, devices_per_host=here, num_devices=all_of_them)
    return deployment.costs(constants, load_engine("shiftjax"))
