"""The assembly root: from a config to devices, weights, KV pools, compiled steps and an engine."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import jax

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.weights import num_parameters
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.resolve import Suited, check_experts, check_hosts, formats_in, resolve
from shiftjax.device.attention_cases import Shape
from shiftjax.device.attention_check import KernelCheck, check_attention
from shiftjax.device.cpu_probe import LEAST_PARAMETERS, suited_to_cpu
from shiftjax.device.groups import (
    Placed,
    TryKernels,
    define_groups,
    make_mover,
    place,
    start_runners,
    warm_up,
)
from shiftjax.device.mesh import own_devices
from shiftjax.device.place import HostWeights
from shiftjax.device.pool_sizes import PoolSizes
from shiftjax.device.programs import Progress
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.sizing import host_memory, measure
from shiftjax.fleet.setup import make_fleet
from shiftjax.host_tier.chunks import HostMemory
from shiftjax.hosts.control import Follower, Hosts, Leader
from shiftjax.hosts.steps_device import LeaderRunner
from shiftjax.lanes import Compiled, choosers_of, compile_groups, make_lanes
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import dtype_of, stored_weights
from shiftjax.phases.control import PHASES, Phase, Resharding
from shiftjax.phases.exchange_device import DeviceExchange
from shiftjax.phases.setup import limits_of, merge_phases, resolve_phases
from shiftjax.settings import environ_beside, num_cores, warn_of_crowding
from shiftjax.weights.kv_scales import identify_scales
from shiftjax.weights.source import TensorSource, check_complete

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A running engine and what is worth knowing about how it came to be."""

    deployment: Deployment  # of phases that of prefill
    engine: Engine
    runners: list[DeviceRunner]  # of the groups that the engine begins with, and their stages
    load_seconds: float
    compile_seconds: float
    phases: dict[Phase, Deployment] = field(default_factory=dict)  # empty: prompts have none

    @property
    def attention(self) -> dict[str, str]:
        """The implementations of attention that steps use, and why; one, but for a fleet's."""
        backends = (runner.step.attention for runner in self.runners)
        return {backend.name: backend.reason for backend in backends}

    @property
    def mesh(self) -> str:
        """For people."""
        each = (f"{phase} {deployment.mesh}" for phase, deployment in self.phases.items())
        return "; ".join(each) or self.deployment.mesh


def build(
    config: EngineConfig,
    source: TensorSource,
    progress: Progress,
    cache_dir: Path | None = None,
    leader: Leader | None = None,
) -> Built:
    """Resolve, place, compile, start; compiled programs are kept in `cache_dir`, if there is one.

    Of several hosts this is the first, `leader`, and the others run `build_follower`.

    Raises:
        ConfigError: what the options ask for does not fit the model or the machine.
        CheckpointError: the checkpoint is not what its config says.
        LostHostError: another host does not come as far.
    """
    config = merge_phases(config)
    if config.parallel.stages is not None:
        return _build_phases(config, source, progress, cache_dir)
    placed = _load(config, source, progress, cache_dir, leader)
    return assemble(config, *placed, leader=leader)


def build_follower(
    config: EngineConfig,
    source: TensorSource,
    progress: Progress,
    hosts: Follower,
    cache_dir: Path | None = None,
) -> DeviceRunner:
    """The same as far as a host needs it that repeats the leader's calls: its runner."""
    deployment, groups, progress, _, programs_dir = _load(
        config, source, progress, cache_dir, hosts
    )
    compiled = _compile(config, deployment, groups, progress, programs_dir, hosts)
    programs, seed = compiled.programs, config.model.seed
    runners = start_runners(compiled.deployment, groups, programs, seed, {})
    warm_up(runners)
    hosts.least("to have started", ())
    ((runner,),) = runners.values()
    return runner


def _load(
    config: EngineConfig,
    source: TensorSource,
    progress: Progress,
    cache_dir: Path | None,
    hosts: Hosts | None,
) -> tuple[Deployment, list[Placed], Progress, float, Path | None]:
    """Resolve and place: what `assemble` goes on with."""
    devices, deployment = deploy(config, source.config, cache_dir, hosts)
    programs_dir = _use_cache_for([deployment], devices[0], cache_dir)
    check_complete(source)
    (deployment,) = with_kv_scales([deployment], source)
    begin = time.perf_counter()
    check = _kernel_check(own_devices(devices), progress, cache_dir)
    groups = place(deployment, devices, source, progress, check)
    return deployment, groups, progress, time.perf_counter() - begin, programs_dir


def _build_phases(
    config: EngineConfig, source: TensorSource, progress: Progress, cache_dir: Path | None
) -> Built:
    """The same of two configurations that take turns on the devices.

    Steps of both are compiled before there are weights, for their pools are sized by empty devices.
    Then each is loaded and tried out; prefill, which comes first, at last.
    """
    devices, deployments = deploy_phases(config, source.config, cache_dir)
    programs_dir = _use_cache_for(list(deployments.values()), devices[0], cache_dir)
    check_complete(source)
    scaled = with_kv_scales(list(deployments.values()), source)
    deployments = dict(zip(deployments, scaled, strict=True))
    begin, load_seconds = time.perf_counter(), 0.0
    check = _kernel_check(devices, progress, cache_dir)
    groups: dict[Phase, list[Placed]] = {}
    compiled: dict[Phase, Compiled] = {}
    for phase, deployment in deployments.items():
        groups[phase] = define_groups(deployment, devices, check)
        sizes = PoolSizes(deployment, devices, programs_dir, is_loaded=False)
        compiled[phase] = compile_groups(deployment, groups[phase], sizes, progress)
    sized: dict[Phase, Deployment] = {phase: each.deployment for phase, each in compiled.items()}
    first, dtype = sized["prefill"], FORMATS[sized["prefill"].formats.activations].dtype
    exchange = DeviceExchange(groups, HostWeights(source, dtype))
    memory, chunks = HostMemory(first.host_bytes), {}
    lanes: dict[Phase, list[Lane]] = {}
    runners: list[DeviceRunner] = []
    for phase in reversed(PHASES):
        begin_load = time.perf_counter()
        exchange.load(phase, progress)
        load_seconds += time.perf_counter() - begin_load
        progress("warm up", 0, 1)
        programs, seed = compiled[phase].programs, config.model.seed
        started = start_runners(sized[phase], groups[phase], programs, seed, chunks)
        warm_up(started)
        lanes[phase] = make_lanes(compiled[phase], started, memory, is_phase=True)
        runners = [runner for stages in started.values() for runner in stages] + runners
    engine = Engine(
        [lane for phase in PHASES for lane in lanes[phase]],
        compiled["prefill"].policies[first.sp],
        limits_of(sized.values()),
        overlap=config.scheduler.overlap,
        seed=config.model.seed,
        clock=time.monotonic,
        topology=Resharding(lanes, exchange, memory),
    )
    compile_seconds = time.perf_counter() - begin - load_seconds
    return _told(Built(first, engine, runners, load_seconds, compile_seconds, sized))


def deploy(
    config: EngineConfig,
    model: ModelConfig,
    cache_dir: Path | None = None,
    hosts: Hosts | None = None,
) -> tuple[list[Device], Deployment]:
    """The devices, and what the settings come to on them; a start begins with this, and `check`.

    What suits a CPU is measured, once for each `cache_dir`. Raises ConfigError for what model or
    machine cannot take, before anything is loaded.
    """
    check_hosts(config, hosts.num if hosts else 1)
    devices, suited = _machine(config, model, cache_dir)
    deployment = resolve(config, model, measure(devices, hosts), suited)
    used, present = deployment.grid.num_devices, jax.device_count()
    if config.host.is_one_of_several and used != present:
        words = f"and {config.host.hosts} hosts have {present}: make them equal"
        raise ConfigError([f"sp * tp = {used} devices are asked for, {words}"])
    _check_host(config, [deployment], devices[0], host_memory()[1])
    return devices, deployment


def deploy_phases(
    config: EngineConfig, model: ModelConfig, cache_dir: Path | None = None
) -> tuple[list[Device], dict[Phase, Deployment]]:
    """The same of settings that give each phase a configuration: `stages`.

    The host holds a copy of the weights, too.
    """
    devices, suited = _machine(config, model, cache_dir)
    available = host_memory()[1] - host_copy_bytes(model, formats_in(config, model, suited))
    free = max(0, available)
    deployments = resolve_phases(config, model, measure(devices), suited, host_bytes=free)
    _check_host(config, list(deployments.values()), devices[0], available)
    return devices, deployments


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
    plain = formats.activations
    held = Formats(formats.weights if model.has_codes else plain, plain, plain)
    return sum(
        weight.num_elements * dtype_of(weight, held).itemsize
        for weight in stored_weights(Layout(model, 1, 1), held)
        if weight.tied_to is None
    )


def _machine(
    config: EngineConfig, model: ModelConfig, cache_dir: Path | None
) -> tuple[list[Device], Suited]:
    """The devices, and what suits them. Raises ConfigError for a model that cannot be loaded."""
    check_experts(model)
    devices = jax.devices()[: config.parallel.devices]
    if config.host.is_one_of_several:  # measured on each they would differ
        return devices, Suited()
    if devices[0].platform != "cpu" or num_parameters(model) < LEAST_PARAMETERS:
        return devices, Suited()
    dtype, sizes = config.model.dtype, config.compile.token_buckets
    if dtype != "auto" and sizes:
        return devices, Suited()
    flags = environ_beside().get("XLA_FLAGS", "")
    wanted = None if dtype == "auto" else dtype
    return devices, suited_to_cpu(wanted, cache_dir, flags, num_cores())


def _check_host(
    config: EngineConfig, deployments: Sequence[Deployment], device: Device, available: int
) -> None:
    """That the host has the memory that is asked for, and the machine is known where it must be."""
    for deployment in deployments:
        if deployment.host_bytes > available:
            given = f"host_memory = {config.cache.host_memory} is more than the"
            beside = ", beside the weights," if deployment.parks else ""
            given = f"{given} {available / 2**30:.1f} GiB that this host{beside} has available"
            raise ConfigError([f"{given}: use less"])
        choosers_of(deployment, device)
    if device.platform == "cpu":
        most = max(deployment.grid.num_devices for deployment in deployments)
        warn_of_crowding(most // jax.process_count())


def _kernel_check(
    devices: Sequence[Device], progress: Progress, cache_dir: Path | None
) -> TryKernels:
    how = KernelCheck(environ_beside(), cache_dir)

    def check(shape: Shape) -> str | None:
        progress("try attention", 0, 1)
        problem = check_attention(how, devices, shape)
        progress("try attention", 1, 1)
        return problem

    return check


def assemble(
    config: EngineConfig,
    deployment: Deployment,
    groups: list[Placed],
    progress: Progress,
    load_seconds: float = 0.0,
    cache_dir: Path | None = None,
    leader: Leader | None = None,
) -> Built:
    """Compile and start over weights that are in place. Raises ConfigError as `build` does.

    Beside the compiled programs in `cache_dir` lies the size of their KV pool.
    """
    begin = time.perf_counter()
    compiled = _compile(config, deployment, groups, progress, cache_dir, leader)
    deployment, programs, known, policies = compiled
    progress("warm up", 0, 1)
    runners = start_runners(deployment, groups, programs, config.model.seed, {})
    mover = None
    if deployment.widths:
        progress("compile moves", 0, 1)
        mover = make_mover(deployment, groups)
    warm_up(runners)
    lanes = make_lanes(compiled, runners, HostMemory(deployment.host_bytes))
    if leader is not None:
        (lane,) = lanes
        ((runner,),) = runners.values()
        lane.runner = LeaderRunner(runner, leader)
        leader.least("to have started", ())
    fleet = None
    if mover is not None:
        fleet = make_fleet(deployment, lanes, policies, known, mover)
    engine = Engine(
        lanes,
        policies[max(policies)],
        deployment.limits,
        overlap=config.scheduler.overlap,
        seed=config.model.seed,
        clock=time.monotonic,
        topology=fleet,
    )
    compile_seconds = time.perf_counter() - begin
    of_devices = [runner for stages in runners.values() for runner in stages]
    return _told(Built(deployment, engine, of_devices, load_seconds, compile_seconds))


def _compile(
    config: EngineConfig,
    deployment: Deployment,
    groups: list[Placed],
    progress: Progress,
    cache_dir: Path | None,
    hosts: Hosts | None,
) -> Compiled:
    """Compile the steps, and size the KV pools; all hosts must come to the same."""
    devices = jax.devices()[: config.parallel.devices]
    sizes = PoolSizes(deployment, devices, cache_dir, hosts=hosts)
    compiled = compile_groups(deployment, groups, sizes, progress)
    if hosts is not None:
        names = [placed.step.attention.name for placed in groups]
        buckets = [[p.bucket for p in each] for each in compiled.programs.values()]
        told = blake2b(repr((compiled.deployment, names, buckets)).encode(), digest_size=7)
        value = int.from_bytes(told.digest())
        least, most = hosts.least("to have compiled", (value, -value))
        if least != -most:
            raise ConfigError(["hosts come to other steps or KV blocks: are their devices alike?"])
    return compiled


def _told(built: Built) -> Built:
    for name, reason in built.attention.items():
        logger.info("attention: %s (%s)", name, reason)
    return built


def _use_cache_for(
    deployments: Sequence[Deployment], device: Device, cache_dir: Path | None
) -> Path | None:
    """Use a compilation cache where it helps; returns where it is."""
    loads = any(each.widths or each.dp > 1 or each.pp > 2 for each in deployments)
    if device.platform == "cpu" and loads:
        # What a CPU reads from the cache cannot be loaded on other devices.
        logger.info("several groups on a CPU: compiled at every start, without the cache")
        cache_dir = None
    use_compile_cache(cache_dir)
    return cache_dir


def use_compile_cache(directory: Path | None) -> None:
    """Point JAX at a persistent cache; every program counts, however quick to compile."""
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
