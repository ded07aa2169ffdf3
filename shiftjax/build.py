"""The assembly root: from a config to devices, weights, KV pools, compiled steps and an engine."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.weights import num_parameters
from shiftjax.config import EngineConfig
from shiftjax.control.blocks import BlockAllocator
from shiftjax.control.deployment import Deployment, Suited, resolve
from shiftjax.control.engine import Engine
from shiftjax.control.fleet_setup import make_fleet
from shiftjax.control.host_chunks import HostBlocks, HostMemory
from shiftjax.control.lane import Lane
from shiftjax.control.policy import Policy, make_policy, wanted_modes
from shiftjax.control.prices import prices_of
from shiftjax.control.scheduler import Scheduler
from shiftjax.control.shared_blocks import share
from shiftjax.control.speculation import Speculation
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.machine_files import (
    MACHINE_OF_DEVICE,
    load_engine,
    load_machine,
    machine_of,
)
from shiftjax.costs.step import CostModel
from shiftjax.device.attention_cases import Shape
from shiftjax.device.attention_check import KernelCheck, check_attention
from shiftjax.device.communicators import make_communicators
from shiftjax.device.cpu_probe import LEAST_PARAMETERS, suited_to_cpu
from shiftjax.device.groups import (
    Placed,
    compile_steps,
    kind_of,
    make_mover,
    place,
    start_runners,
)
from shiftjax.device.pipeline import PipelineRunner
from shiftjax.device.pool_sizes import PoolSizes
from shiftjax.device.programs import Progress
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.sizing import host_memory, measure
from shiftjax.drafts.drafting import Drafting
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Device, Group, Mode
from shiftjax.settings import environ_beside, num_cores, warn_of_crowding
from shiftjax.weights.source import TensorSource, check_complete

logger = logging.getLogger(__name__)
Wanted = Mapping[Bucket, list[Mode]]  # the modes that each size of steps is compiled in


@dataclass(frozen=True)
class Built:
    """A running engine and what is worth knowing about how it came to be."""

    deployment: Deployment
    engine: Engine
    runners: list[DeviceRunner]  # of the groups that the engine begins with, and their stages
    load_seconds: float
    compile_seconds: float

    @property
    def attention(self) -> dict[str, str]:
        """The implementations of attention that steps use, and why; one, but for a fleet's."""
        backends = (runner.step.attention for runner in self.runners)
        return {backend.name: backend.reason for backend in backends}


def build(
    config: EngineConfig,
    source: TensorSource,
    progress: Progress,
    cache_dir: Path | None = None,
) -> Built:
    """Resolve, place, compile, start; compiled programs are kept in `cache_dir`, if there is one.

    Raises:
        ConfigError: what the options ask for does not fit the model or the machine.
        CheckpointError: the checkpoint is not what its config says.
    """
    devices, deployment = deploy(config, source.config, cache_dir)
    programs_dir = cache_dir
    loads = deployment.widths or deployment.dp > 1 or deployment.pp > 2
    if devices[0].platform == "cpu" and loads:
        # What a CPU reads from the cache cannot be loaded on other devices.
        logger.info("several groups on a CPU: compiled at every start, without the cache")
        programs_dir = None
    use_compile_cache(programs_dir)
    check_complete(source)
    begin = time.perf_counter()
    how = KernelCheck(environ_beside(), cache_dir)

    def check(shape: Shape) -> str | None:
        progress("try attention", 0, 1)
        problem = check_attention(how, devices, shape)
        progress("try attention", 1, 1)
        return problem

    groups = place(deployment, devices, source, progress, check)
    load_seconds = time.perf_counter() - begin
    return assemble(config, deployment, groups, progress, load_seconds, programs_dir)


def deploy(
    config: EngineConfig, model: ModelConfig, cache_dir: Path | None = None
) -> tuple[list[Device], Deployment]:
    """The devices, and what the settings come to on them; a start begins with this, and `check`.

    What suits a CPU is measured, once for each `cache_dir`. Raises ConfigError for what model or
    machine cannot take, before anything is loaded.
    """
    devices = jax.devices()[: config.parallel.devices]
    suited = Suited()
    if devices[0].platform == "cpu" and num_parameters(model) >= LEAST_PARAMETERS:
        dtype, sizes = config.model.dtype, config.compile.token_buckets
        if dtype == "auto" or not sizes:
            flags = environ_beside().get("XLA_FLAGS", "")
            wanted = None if dtype == "auto" else dtype
            suited = suited_to_cpu(wanted, cache_dir, flags, num_cores())
    deployment = resolve(config, model, measure(devices), suited)
    available = host_memory()[1] if deployment.host_bytes else 0
    if deployment.host_bytes > available:
        given = f"host_memory = {config.cache.host_memory} is more than the {available / 2**30:.1f}"
        raise ConfigError([f"{given} GiB that this host has available: use less"])
    choosers_of(config, deployment, devices[0])  # that the machine is known where it must be
    if devices[0].platform == "cpu":
        warn_of_crowding(deployment.grid.num_devices)
    return devices, deployment


def assemble(
    config: EngineConfig,
    deployment: Deployment,
    groups: list[Placed],
    progress: Progress,
    load_seconds: float = 0.0,
    cache_dir: Path | None = None,
) -> Built:
    """Compile and start over weights that are in place. Raises ConfigError as `build` does.

    Beside the compiled programs in `cache_dir` lies the size of their KV pool.
    """
    begin = time.perf_counter()
    devices = jax.devices()[: config.parallel.devices]
    steps = {kind_of(placed.step): placed.step for placed in reversed(groups)}  # the first ones
    modes = {kind.width: step.weights.modes for kind, step in steps.items()}
    known, policies = choosers_of(config, deployment, devices[0])
    wanted = {
        width: wanted_modes(policies[width], of_width.buckets, modes[width])
        for width, of_width in deployment.by_width.items()
    }
    for width in deployment.widths:
        logger.info("fleet: %s", describe_width(deployment.of_width(width), wanted[width]))
    if deployment.widths and devices[0].platform != "cpu":
        make_communicators((placed.step for placed in groups), deployment.widths)
    sizes = PoolSizes(deployment, devices, cache_dir)
    deployment, programs = compile_steps(deployment, steps, wanted, sizes, progress)
    progress("warm up", 0, 1)
    runners = start_runners(deployment, groups, programs, config.model.seed)
    blocks: Mapping[Group, BlockAllocator] = {}
    if deployment.widths:
        sizes = {group: stages[0].pool.block_size for group, stages in runners.items()}
        blocks = share(deployment.num_blocks, sizes)
    memory = HostMemory(deployment.host_bytes)
    lanes = [
        _lane(config, deployment, group, stages, policies, known, blocks.get(group), memory)
        for group, stages in runners.items()
    ]
    fleet = None
    if deployment.widths:
        progress("compile moves", 0, 1)
        fleet = make_fleet(deployment, lanes, policies, known, make_mover(deployment, groups))
    engine = Engine(
        lanes,
        policies[max(policies)],
        deployment.limits,
        overlap=config.scheduler.overlap,
        seed=config.model.seed,
        clock=time.monotonic,
        fleet=fleet,
    )
    compile_seconds = time.perf_counter() - begin
    of_devices = [runner for stages in runners.values() for runner in stages]
    built = Built(deployment, engine, of_devices, load_seconds, compile_seconds)
    for name, reason in built.attention.items():
        logger.info("attention: %s (%s)", name, reason)
    return built


def choosers_of(
    config: EngineConfig, deployment: Deployment, device: Device
) -> tuple[dict[int, CostModel | None], dict[int, Policy]]:
    """What is known of the costs of steps, and who chooses their modes, by units of a group."""
    known = {
        width: known_costs(of_width, config.scheduler.machine, device)
        for width, of_width in deployment.by_width.items()
    }
    name, threshold = deployment.policy, deployment.threshold
    return known, {width: make_policy(name, threshold, costs) for width, costs in known.items()}


def wanted_by_width(
    config: EngineConfig, deployment: Deployment, device: Device
) -> dict[int, Wanted]:
    """Which steps will be compiled, by units of a group; weights as `alias` has them."""
    _, policies = choosers_of(config, deployment, device)
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


def known_costs(deployment: Deployment, machine: str | None, device: Device) -> CostModel | None:
    """The cost model of this machine, if something asks for it.

    Raises ConfigError for an unknown machine that something needs; drafts can do without.
    """
    choice, drafts = deployment.drafts.draft_choice, deployment.drafts.speculation != "none"
    is_needed = deployment.policy == "cost" or (drafts and choice == "cost")
    is_needed |= bool(deployment.widths) and deployment.fleet.fleet_policy == "cost"
    is_known = machine is not None or device.device_kind in MACHINE_OF_DEVICE
    if not (is_needed or (drafts and choice == "auto" and is_known)):
        return None
    constants = load_machine(machine or machine_of(device.device_kind))
    return deployment.costs(constants, load_engine("shiftjax"))


def _lane(
    config: EngineConfig,
    deployment: Deployment,
    group: Group,
    stages: Sequence[DeviceRunner],
    policies: Mapping[int, Policy],
    known: Mapping[int, CostModel | None],
    blocks: BlockAllocator | None,
    memory: HostMemory,
) -> Lane:
    deployment = deployment.of_width(group.width)
    host = None
    if memory.num_bytes:
        host = HostBlocks(memory, deployment.block_size, deployment.host_block_bytes)
    policy, costs = policies[group.width], known[group.width]
    runner = stages[0] if len(stages) == 1 else PipelineRunner(stages)
    modes, budgets, speculation = stages[0].step.weights.modes, deployment.budgets, None
    speculator, drafts = deployment.layout.model.speculator, deployment.drafts
    num_predict = speculator.num_predict if speculator else 0
    if drafts.speculation != "none":
        speculation = Speculation(
            Drafting(drafts),
            prices_of(policy, deployment.buckets, modes, costs),
            max_rows=budgets.max_rows,
            overlap=config.scheduler.overlap,
            num_guesses=min(num_predict, drafts.max_draft_tokens),  # no draft is longer
        )
    own = policy if deployment.widths else None
    scheduler = Scheduler(budgets, speculation, blocks, host)
    return Lane(scheduler, runner, modes, group=group, policy=own)


def use_compile_cache(directory: Path | None) -> None:
    """Point JAX at a persistent cache; every program counts, however quick to compile."""
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
