"""Who chooses the modes of a deployment's steps on this machine, and which steps that takes."""

from collections.abc import Mapping
from dataclasses import replace

import jax

from shiftjax.core.policies import make_policy
from shiftjax.core.policy import Policy, wanted_modes
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.expert_modes import ExpertModes, by_bytes
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.machine_files import MACHINE_OF_DEVICE, load_engine, load_machine, machine_of
from shiftjax.costs.query_modes import QueryModes
from shiftjax.deploy.deployment import Deployment
from shiftjax.parallel.grid import Device, Mode

Wanted = Mapping[Bucket, list[Mode]]  # the modes that each size of steps is compiled in


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


def expert_modes_of(deployment: Deployment, device: Device) -> ExpertModes:
    """As in which mode the steps of a group use experts; of a pipeline, those of one stage."""
    costs = expert_costs(deployment, device)
    if costs is None:
        return ExpertModes(deployment.layout, by_bytes(deployment.formats))
    return costs.stages[0].expert_modes


def query_modes_of(deployment: Deployment, device: Device) -> QueryModes:
    """As in which mode the steps of a group use q and o; of a pipeline, those of one stage."""
    if not deployment.layout.by_position:
        return QueryModes(deployment.layout)
    costs = expert_costs(deployment, device)
    return QueryModes(deployment.layout) if costs is None else costs.stages[0].query_modes


def expert_costs(deployment: Deployment, device: Device) -> GroupCosts | None:
    """The costs by which programs use experts, and q and o; None: they are unknown."""
    costs = known_costs(deployment, device)
    is_known = deployment.machine is not None or device.device_kind in MACHINE_OF_DEVICE
    if costs is None and is_known and device.platform != "cpu" and jax.process_count() == 1:
        return _costs_on(deployment, device)
    return costs


def known_costs(deployment: Deployment, device: Device) -> GroupCosts | None:
    """The cost model of this machine, if something asks for it.

    Raises ConfigError for an unknown machine that something needs; drafts and sizes of steps can
    do without.
    """
    machine = deployment.machine
    choice = deployment.drafts.draft_choice
    drafts = deployment.drafts.speculation != "none" and not deployment.drafts.fixed_drafts
    is_needed = deployment.needs_costs or (drafts and choice == "cost")
    is_needed |= bool(deployment.widths) and deployment.fleet.traits.needs_costs
    is_known = machine is not None or device.device_kind in MACHINE_OF_DEVICE
    is_read = drafts and choice == "auto"
    is_read |= deployment.sizes_by == "cost" and (
        machine is not None or device.device_kind != "cpu"
    )
    if not (is_needed or (is_read and is_known)):
        return None
    is_one = jax.process_count() == 1
    if not (is_one or is_needed or load_machine(machine or machine_of(device.device_kind)).network):
        return None
    return _costs_on(deployment, device)


def _costs_on(deployment: Deployment, device: Device) -> GroupCosts:
    name = deployment.machine or machine_of(device.device_kind)
    hosts = jax.process_count()
    constants = load_machine(name, hosts)
    if hosts > 1:  # of which each host may have fewer than the file's machine
        here, all_of_them = jax.local_device_count(), jax.device_count()
        constants = replace(constants, devices_per_host=here, num_devices=all_of_them)
    return deployment.costs(constants, load_engine("shiftjax"))
