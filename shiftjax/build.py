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
from shiftjax.costs.machine_files import (
    MACHINE_OF_DEVICE,
    load_engine,
    load_machine,
    machine_of,
)
from shiftjax.costs.step import CostModel
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
    costs = _known_costs(deployment, config.scheduler.machine, devices[0])
    policy = make_policy(deployment.policy, deployment.threshold, costs)
    wanted = wanted_modes(policy, deployment.buckets, step.weights.modes)
    deployment, programs = compile_steps(deployment, step, wanted, devices, progress)
    runners = start_runners(deployment, groups, programs, config.model.seed)
    compile_seconds = time.perf_counter() - begin
    engine = _start(config, deployment, policy, runners, costs)
    return Built(deployment, engine, runners, load_seconds, compile_seconds)


def _known_costs(deployment: Deployment, machine: str | None, device: Device) -> CostModel | None:
    """The cost model of this machine, if something asks for it.

    Raises ConfigError for an unknown machine that something needs; drafts can do without.
    """
    choice, drafts = deployment.drafts.draft_choice, deployment.drafts.speculation != "none"
    is_needed = deployment.policy == "cost" or (drafts and choice == "cost")
    is_known = machine is not None or device.device_kind in MACHINE_OF_DEVICE
    if not (is_needed or (drafts and choice == "auto" and is_known)):
        return None
    constants = load_machine(machine or machine_of(device.device_kind))
    return deployment.costs(constants, load_engine("shiftjax"))


def _start(
    config: EngineConfig,
    deployment: Deployment,
    policy: Policy,
    runners: list[DeviceRunner],
    costs: CostModel | None,
) -> Engine:
    return Engine(
        [_lane(config, deployment, policy, runner, costs) for runner in runners],
        policy,
        deployment.limits,
        overlap=config.scheduler.overlap,
        seed=config.model.seed,
        clock=time.monotonic,
    )


def _lane(
    config: EngineConfig,
    deployment: Deployment,
    policy: Policy,
    runner: DeviceRunner,
    costs: CostModel | None,
) -> Lane:
    modes, budgets, speculation = runner.step.weights.modes, deployment.budgets, None
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
    return Lane(Scheduler(budgets, speculation), runner, modes)


def use_compile_cache(config: EngineConfig) -> None:
    """Point JAX at the persistent cache; every program counts, however quick to compile."""
    directory = compile_cache_dir(config)
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
