"""The assembly root: from a config to devices, weights, KV pools, compiled steps and an engine."""

import time
from dataclasses import dataclass

import jax

from shiftjax.config import EngineConfig
from shiftjax.control.deployment import Deployment, resolve
from shiftjax.control.engine import Engine
from shiftjax.control.lane import Lane
from shiftjax.control.policy import Policy, make_policy, wanted_modes
from shiftjax.control.scheduler import Scheduler
from shiftjax.control.speculation import Speculation, prices_of
from shiftjax.costs.machine_files import load_engine, load_machine, machine_of
from shiftjax.device.groups import Placed, compile_steps, place, start_runners
from shiftjax.device.programs import Progress
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.sizing import measure
from shiftjax.drafts.drafting import Drafting
from shiftjax.parallel.grid import Device
from shiftjax.settings import compile_cache_dir
from shiftjax.weights.source import TensorSource, check_complete


@dataclass(frozen=True)
class Built:
    """A running engine and what is worth knowing about how it came to be."""

    deployment: Deployment
    engine: Engine
    runners: list[DeviceRunner]
    load_seconds: float
    compile_seconds: float


def build(config: EngineConfig, source: TensorSource, progress: Progress) -> Built:
    """Resolve, place, compile, start.

    Raises:
        ConfigError: what the options ask for does not fit the model or the machine.
        CheckpointError: the checkpoint is not what its config says.
    """
    use_compile_cache(config)
    devices = jax.devices()[: config.parallel.devices]
    deployment = resolve(config, source.config, measure(devices))
    check_complete(source)
    begin = time.perf_counter()
    groups = place(deployment, devices, source, progress)
    load_seconds = time.perf_counter() - begin
    return assemble(config, deployment, groups, progress, load_seconds)


def assemble(
    config: EngineConfig,
    deployment: Deployment,
    groups: list[Placed],
    progress: Progress,
    load_seconds: float = 0.0,
) -> Built:
    """Compile and start over weights that are in place. Raises ConfigError as `build` does."""
    begin, step = time.perf_counter(), groups[0].step
    devices = jax.devices()[: config.parallel.devices]
    policy = _make_policy(config, deployment, devices[0])
    wanted = wanted_modes(policy, deployment.buckets, step.weights.modes)
    deployment, programs = compile_steps(deployment, step, wanted, devices, progress)
    runners = start_runners(deployment, groups, programs, config.model.seed)
    compile_seconds = time.perf_counter() - begin
    engine = _start(config, deployment, policy, runners)
    return Built(deployment, engine, runners, load_seconds, compile_seconds)


def _make_policy(config: EngineConfig, deployment: Deployment, device: Device) -> Policy:
    costs = None
    if deployment.policy == "cost":
        machine = load_machine(config.scheduler.machine or machine_of(device.device_kind))
        costs = deployment.costs(machine, load_engine("shiftjax"))
    return make_policy(deployment.policy, deployment.threshold, costs)


def _start(
    config: EngineConfig, deployment: Deployment, policy: Policy, runners: list[DeviceRunner]
) -> Engine:
    return Engine(
        [_lane(config, deployment, policy, runner) for runner in runners],
        policy,
        deployment.limits,
        overlap=config.scheduler.overlap,
        seed=config.model.seed,
        clock=time.monotonic,
    )


def _lane(
    config: EngineConfig, deployment: Deployment, policy: Policy, runner: DeviceRunner
) -> Lane:
    modes, budgets, speculation = runner.step.weights.modes, deployment.budgets, None
    if deployment.drafts.speculation != "none":
        speculation = Speculation(
            Drafting(deployment.drafts),
            prices_of(policy, deployment.buckets, modes),
            max_rows=budgets.max_rows,
            overlap=config.scheduler.overlap,
        )
    return Lane(Scheduler(budgets, speculation), runner, modes)


def use_compile_cache(config: EngineConfig) -> None:
    """Point JAX at the persistent cache; every program counts, however quick to compile."""
    directory = compile_cache_dir(config)
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
