"""From settings to a running engine on this machine's devices."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shiftjax.adapters.pool import AdapterPool, Slots
from shiftjax.assembly import assemble
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.costs.buckets import Bucket
from shiftjax.deploy.deployment import Deployment
from shiftjax.device.attention_check import KernelCheck
from shiftjax.device.backend import DeviceBackend
from shiftjax.device.compile_cache import use_cache_for
from shiftjax.device.programs import Progress
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.step import StepDef
from shiftjax.hosts.calls import Follower, Hosts, Leader
from shiftjax.local_deployment import deploy, with_kv_scales
from shiftjax.parallel.grid import Mode
from shiftjax.phases.resharding import PHASES
from shiftjax.rollouts.control import Rollouts
from shiftjax.settings import environ_beside
from shiftjax.weights.source import TensorSource, check_complete

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A running engine, and what is worth knowing about how it came to be."""

    engine: Engine
    deployments: list[Deployment]  # with their KV blocks: one, or one for each phase
    runners: list[DeviceRunner]  # of the groups that the engine begins with, and their stages
    load_seconds: float
    compile_seconds: float
    rollouts: Rollouts  # what holds the engine and changes its weights
    adapters: AdapterPool | None = None

    @property
    def deployment(self) -> Deployment:
        """The only deployment, or that of prefill."""
        return self.deployments[0]

    @property
    def attention(self) -> dict[str, str]:
        """The implementations of attention that steps use, and why; one, but for a fleet's."""
        backends = (runner.step.attention for runner in self.runners)
        return {backend.name: backend.reason for backend in backends}

    @property
    def experts(self) -> dict[str, str]:
        """As in which mode the programs of each mode and size use experts, and why.

        Of sizes that do as the next smaller one does, the smallest alone; none without experts.
        """

        def used(step: StepDef, mode: Mode, bucket: Bucket) -> tuple[Mode, str] | None:
            if step.layout.model.experts is None or step.expert_modes is None:
                return None
            found, why = step.expert_modes.of(mode, bucket.tokens)
            return found, f"split {step.layout.ways(found)} ways ({why})"

        return self._changes(used)

    @property
    def rows(self) -> dict[str, str]:
        """What travels of decode rows where devices split positions, and why: told as `experts`.

        Of modes in which there is a choice.
        """

        def used(step: StepDef, mode: Mode, bucket: Bucket) -> tuple[Mode, str] | None:
            if len(step.layout.query_modes(mode)) == 1 or step.query_modes is None:
                return None
            found, why = step.query_modes.of(mode, bucket[:2])
            what = "queries and parts" if found == mode else "normalisers alone"
            return found, f"{what} ({why})"

        return self._changes(used)

    def _changes(
        self, used: Callable[[StepDef, Mode, Bucket], tuple[Mode, str] | None]
    ) -> dict[str, str]:
        """Return what programs use, in words; of those that are alike only the smallest's."""
        found: dict[str, str] = {}
        last: dict[tuple[int, str], Mode] = {}
        for runner in self.runners:
            sp = runner.step.layout.sp
            for program in runner.programs:
                for mode in program.steps:
                    own = used(runner.step, mode, program.bucket)
                    if own is None or last.get((sp, mode.label)) == own[0]:
                        continue
                    last[sp, mode.label] = own[0]
                    name = f"{mode.label}, {program.bucket.tokens:,} tokens or more"
                    name += f", {sp} units" if self.deployment.widths else ""
                    found[name] = own[1]
        return found

    @property
    def mesh(self) -> str:
        """For people."""
        if len(self.deployments) == 1:
            return self.deployment.mesh
        by_phase = zip(PHASES, self.deployments, strict=True)
        return "; ".join(f"{phase} {deployment.mesh}" for phase, deployment in by_phase)


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
    return start(*_prepare(config, source, progress, cache_dir, leader))


def start(backend: DeviceBackend, deployments: Sequence[Deployment]) -> Built:
    """Return the running engine of one deployment, or of one for each phase, prefill first."""
    begin = time.perf_counter()
    engine = assemble(deployments, backend)
    seconds = time.perf_counter() - begin
    load = backend.load_seconds
    rollouts = Rollouts(engine, backend.store)
    held = engine, backend.deployments, backend.runners
    adapters = backend.adapters
    if adapters is not None and backend.store is not None:
        backend.store.watchers.append(adapters.forget_slots)
    built = Built(*held, load, seconds - load, rollouts, adapters)
    for name, reason in built.attention.items():
        logger.info("attention: %s (%s)", name, reason)
    for name, reason in built.experts.items():
        logger.info("experts of %s: %s", name, reason)
    for name, reason in built.rows.items():
        logger.info("decode rows of %s: exchange %s", name, reason)
    return built


def build_follower(
    config: EngineConfig,
    source: TensorSource,
    progress: Progress,
    hosts: Follower,
    cache_dir: Path | None = None,
) -> tuple[list[DeviceRunner], Slots | None]:
    """The same as far as a host needs it that does the leader's calls.

    Returns its runners, one for each group, and the slots of adapters on its devices.
    """
    backend, deployments = _prepare(config, source, progress, cache_dir, hosts)
    backend.start(deployments)
    return backend.runners, backend.slots


def _prepare(
    config: EngineConfig,
    source: TensorSource,
    progress: Progress,
    cache_dir: Path | None,
    hosts: Hosts | None,
) -> tuple[DeviceBackend, list[Deployment]]:
    """The devices, and what is to be started on them."""
    devices, deployments = deploy(config, source.config, cache_dir, hosts)
    programs_dir = use_cache_for(deployments, devices[0], cache_dir)
    check_complete(source)
    check = KernelCheck(environ_beside(), cache_dir)
    backend = DeviceBackend(devices, source, progress, programs_dir, check, hosts)
    return backend, with_kv_scales(deployments, source)
