"""What the settings come to on the devices of this machine."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.weights import Weight, num_parameters, weights_of
from shiftjax.config import EngineConfig
from shiftjax.costs.machine_files import MACHINE_OF_DEVICE, load_engine, load_machine
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.expert_storage import as_used
from shiftjax.deploy.resolve import Suited, check_experts, check_hosts, formats_in, resolve
from shiftjax.device.choosers import choosers_of, expert_costs
from shiftjax.device.cpu_probe import LEAST_PARAMETERS, suited_to_cpu
from shiftjax.device.sizing import host_memory, measure
from shiftjax.hosts.calls import Hosts
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import codes_in, dtype_of, is_quantised, stored_weights
from shiftjax.phases.configurations import merge_phases, resolve_phases
from shiftjax.settings import environ_beside, num_cores, warn_of_crowding
from shiftjax.sim.chosen_mesh import with_costs
from shiftjax.sim.modelled import Target
from shiftjax.weights.kv_scales import identify_scales
from shiftjax.weights.source import OF_SCALE, TensorSource, part_shape


class Local(NamedTuple):
    """Devices of this machine, and what they are deployed as."""

    devices: list[Device]
    deployments: list[Deployment]  # one, or one for each phase, prefill first


def deploy(
    config: EngineConfig,
    model: ModelConfig,
    cache_dir: Path | None = None,
    hosts: Hosts | None = None,
) -> Local:
    """Return the devices, and what the settings come to on them; a start and `check` begin so.

    What suits a CPU is measured, once for each `cache_dir`. Raises ConfigError for what model or
    machine cannot take, before anything is loaded.
    """
    check_hosts(config, hosts.num if hosts else 1)
    is_alone = not config.host.is_one_of_several  # what is measured on each would differ
    if config.has_groups_on_each_host:
        config = config.of_one_host
    config = merge_phases(config)
    devices, suited = _machine(config, model, cache_dir, is_alone=is_alone)
    measured, available = measure(devices, hosts), host_memory()[1]
    if (target := _modelled(config, model, measured, devices[0], suited)) is not None:
        config = with_costs(config, target)
    if config.parallel.phases is None:
        deployments = [resolve(config, model, measured, suited)]
    else:  # the host holds a copy of the weights, too
        available -= host_copy_bytes(model, formats_in(config, model, suited))
        room = max(0, available)
        phases = resolve_phases(config, model, measured, suited, host_bytes=room)
        deployments = list(phases.values())
    costs_of = partial(expert_costs, device=devices[0])
    deployments = [as_used(each, costs_of) for each in deployments]
    used, present = deployments[0].grid.num_devices, jax.device_count()
    if config.host.is_one_of_several and used != present:
        words = f"and {config.host.hosts} hosts have {present}: make them equal"
        raise ConfigError([f"sp * tp = {used} devices are asked for, {words}"])
    for deployment in deployments:
        _check_host_memory(deployment, available)
        choosers_of(deployment, devices[0])  # raises for a machine that must be known
    if devices[0].platform == "cpu":
        most = max(deployment.grid.num_devices for deployment in deployments)
        warn_of_crowding(most // jax.process_count())
    return Local(devices, deployments)


def _modelled(
    config: EngineConfig, model: ModelConfig, measured: Devices, device: Device, suited: Suited
) -> Target | None:
    """These devices as a modelled machine; None where their costs are unknown."""
    name = config.scheduler.machine
    if name is None and (device.platform == "cpu" or device.device_kind not in MACHINE_OF_DEVICE):
        return None
    machine = replace(
        load_machine(name or MACHINE_OF_DEVICE[device.device_kind]),
        num_devices=measured.num_devices,
        memory_bytes=measured.total_bytes,
    )
    return Target(model, machine, load_engine("shiftjax"), formats_in(config, model, suited))


def with_kv_scales(deployments: Sequence[Deployment], source: TensorSource) -> list[Deployment]:
    """Deployments of one checkpoint that know which scales their KV cache has, if it has any.

    Raises CheckpointError for scales that cannot be used.
    """
    if not FORMATS[deployments[0].formats.kv].has_scales:
        return list(deployments)
    name = identify_scales(source)
    return [replace(deployment, kv_scales=name) for deployment in deployments]


def host_copy_bytes(model: ModelConfig, formats: Formats) -> int:
    """Bytes of the weights in host memory, out of which each phase is loaded (`HostWeights`).

    Codes are made of them on the devices, but for those of a checkpoint.
    """
    plain, codes = formats.activations, codes_in(model, formats)
    has_codes = codes is not None and not codes.are_made_anew
    held = Formats(formats.weights if has_codes else plain, plain, plain)
    if has_codes and held.has_codes_of_inputs:  # as the checkpoint has them, not in whole blocks
        return sum(_read_bytes(weight, model, held) for weight in weights_of(model))
    return sum(
        weight.num_elements * dtype_of(weight, held).itemsize
        for weight in stored_weights(Layout(model, 1, 1), held)
        if weight.tied_to is None
    )


def _read_bytes(weight: Weight, model: ModelConfig, held: Formats) -> int:
    """Bytes of a weight as it is read from a checkpoint with codes of eight bits."""
    codes = model.codes
    if weight.tied_to is not None or not is_quantised(weight, model, held):
        numbers = 0 if weight.tied_to else weight.num_elements
        return numbers * dtype_of(weight, held).itemsize
    assert codes is not None
    scales = [part_shape(shape, OF_SCALE, codes) for shape in weight.tensors.values()]
    inputs = len(scales) if codes.have_input_scales else 0
    num_scales = sum(map(math.prod, scales)) + inputs
    return weight.num_elements + num_scales * FORMATS["float32"].dtype.itemsize


def _machine(
    config: EngineConfig, model: ModelConfig, cache_dir: Path | None, *, is_alone: bool
) -> tuple[list[Device], Suited]:
    """The devices, and what suits them. Raises ConfigError for a model that cannot be loaded."""
    check_experts(model)
    devices = jax.devices()[: config.parallel.devices]
    if not is_alone:
        return devices, Suited()
    if devices[0].platform != "cpu" or num_parameters(model) < LEAST_PARAMETERS:
        return devices, Suited()
    dtype, sizes = config.model.dtype, config.compile.token_buckets
    if dtype != "auto" and sizes:
        return devices, Suited()
    flags = environ_beside().get("XLA_FLAGS", "")
    wanted = None if dtype == "auto" else dtype
    return devices, suited_to_cpu(wanted, cache_dir, flags, num_cores())


def _check_host_memory(deployment: Deployment, available: int) -> None:
    if deployment.host_bytes > available:
        given = f"host_memory = {deployment.host_bytes / 2**30:.1f} GiB is more than the"
        beside = ", beside the weights," if deployment.parks else ""
        given = f"{given} {available / 2**30:.1f} GiB that this host{beside} has available"
        raise ConfigError([f"{given}: use less"])
