"""JAX's devices as a backend: places weights, compiles steps, starts runners."""

import logging
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from shiftjax.adapters.adapter import Adapter
from shiftjax.adapters.pool import AdapterPool
from shiftjax.adapters.slots_device import DeviceSlots
from shiftjax.arch.formats import FORMATS
from shiftjax.assembly import Drafter, Groups, Started
from shiftjax.core.lane import wait_for_one
from shiftjax.core.policy import Policy, wanted_modes
from shiftjax.core.request import Runner
from shiftjax.costs.buckets import also_with_adapters
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.deploy.deployment import Deployment
from shiftjax.device.attention_cases import Shape
from shiftjax.device.attention_check import KernelCheck, check_attention
from shiftjax.device.choosers import choosers_of, describe_width
from shiftjax.device.communicators import make_communicators
from shiftjax.device.groups import (
    Kind,
    Placed,
    TryKernels,
    compile_steps,
    define_groups,
    kind_of,
    make_mover,
    place,
    start_runners,
    warm_up,
)
from shiftjax.device.mesh import own_devices
from shiftjax.device.place import HostWeights
from shiftjax.device.pool_sizes import PoolSizes
from shiftjax.device.programs import Program, Progress
from shiftjax.device.runner import DeviceRunner
from shiftjax.disk_tier.payloads_device import disk_place
from shiftjax.drafts.drafting import Drafting
from shiftjax.host_tier.store_device import Extents
from shiftjax.hosts.calls import Hosts, Leader
from shiftjax.hosts.replicas import Replicas
from shiftjax.hosts.replicas_device import remote_runners
from shiftjax.hosts.steps_device import LeaderRunner
from shiftjax.models.sum_backend import XLA_SUMS
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Device, Group
from shiftjax.phases.exchange_device import DeviceExchange
from shiftjax.phases.pipeline_device import PipelineRunner
from shiftjax.phases.resharding import PHASES, Phase
from shiftjax.rollouts.weights_device import DeviceStore
from shiftjax.routing.chosen import notes_of
from shiftjax.routing.history import history_of
from shiftjax.weights.peft import read_adapter
from shiftjax.weights.source import TensorSource

logger = logging.getLogger(__name__)
Runners = Mapping[Group, Sequence[DeviceRunner]]  # of the stages of every group


class Compiled(NamedTuple):
    """A deployment whose steps are compiled; costs and policies by units of a group."""

    deployment: Deployment  # with its KV blocks
    programs: dict[Kind, list[Program]]
    known: Mapping[int, GroupCosts | None]
    policies: Mapping[int, Policy]


class DeviceBackend:
    """Starts deployments of one checkpoint on devices; see `assembly.Backend`.

    Beside the compiled programs in `cache_dir` lies the size of their KV pool. `check` says how
    attention kernels are tried first; None: they are not. Of several `hosts` all start the same.
    """

    clock = staticmethod(time.monotonic)
    now = staticmethod(time.monotonic)
    wait = staticmethod(wait_for_one)

    def __init__(
        self,
        devices: Sequence[Device],
        source: TensorSource,
        progress: Progress,
        cache_dir: Path | None = None,
        check: KernelCheck | None = None,
        hosts: Hosts | None = None,
    ):
        self.runners: list[DeviceRunner] = []  # of the groups at work first, and their stages
        self.deployments: list[Deployment] = []  # with their KV blocks
        self.load_seconds = 0.0
        self.adapters: AdapterPool | None = None
        self.slots: DeviceSlots | None = None  # of adapters, on this host's devices
        self.store: DeviceStore | None = None  # of what was started; None: of several hosts
        self.devices, self._source, self._progress = devices, source, progress
        self._cache_dir, self._check, self._hosts = cache_dir, check, hosts

    def start(self, deployments: Sequence[Deployment]) -> Started:
        """Load, compile and warm up.

        Raises:
            ConfigError: no KV block fits, or hosts come to different steps.
            LostHostError: another host does not come as far.
        """
        if len(deployments) > 1:
            return self._start_phases(dict(zip(PHASES, deployments, strict=True)))
        (deployment,) = deployments
        begin, adapters = time.perf_counter(), self._adapters(deployment)
        groups = self.place(deployment)
        self.load_seconds = time.perf_counter() - begin
        sizes = PoolSizes(deployment, self.devices, self._cache_dir, hosts=self._hosts)
        compiled = self._compile(deployment, groups, sizes)
        self._progress("warm up", 0, 1)
        routing = history_of([deployment])
        if adapters is not None:
            self.slots = DeviceSlots(groups)
        extents: Extents = {}
        started = compiled.deployment, groups, compiled.programs, extents, routing
        runners = start_runners(*started, slots=None if adapters is None else adapters.slot_of)
        mover = None
        if deployment.widths:
            self._progress("compile moves", 0, 1)
            mover = make_mover(compiled.deployment, groups)
        warm_up(runners)
        self.runners = [runner for stages in runners.values() for runner in stages]
        self.deployments = [compiled.deployment]
        self.store = DeviceStore([groups]) if self._hosts is None else None
        if self._hosts is not None:
            self._hosts.least("to have started", ())
        started = [_groups(compiled, runners, self._hosts)]
        if adapters is not None and self.slots is not None:
            self._fill(adapters, self.slots, list(started[0].runners.values()))
        self.adapters = adapters
        notes = notes_of(self.deployments)
        rest = {"mover": mover, "routing": routing, "adapters": adapters, "notes": notes}
        hosts = self._hosts if isinstance(self._hosts, Replicas) else None
        disk = disk_place(compiled.deployment, self._source, extents)
        return Started(started, **rest, hosts=hosts, disk=disk)

    def _adapters(self, deployment: Deployment) -> AdapterPool | None:
        """Return the adapters of a deployment. Raises AdapterError."""
        lora, model = deployment.lora, deployment.layout.model
        if not lora.num_slots:
            return None
        dtype = FORMATS[deployment.formats.activations].dtype

        def read(name: str, path: str) -> Adapter:
            return read_adapter(name, Path(path), model, dtype, lora.max_lora_rank)

        pool = AdapterPool(lora.num_slots, read, lora.max_cpu_loras)
        if self._hosts is None or isinstance(self._hosts, Leader):  # who tells the others
            for name, path in lora.modules.items():
                pool.load(name, path)
        return pool

    def _fill(self, pool: AdapterPool, slots: DeviceSlots, runners: Sequence[Runner]) -> None:
        """Have the first adapters in the slots, of all hosts; a follower waits to be told."""
        (runner,) = runners[:1]
        if isinstance(runner, LeaderRunner):
            pool.fill(runner.slots(slots))
        elif self._hosts is None:
            pool.fill(slots)

    def place(self, deployment: Deployment) -> list[Placed]:
        """Return the groups of a deployment with their weights."""
        check = self._try_kernels()
        return place(deployment, self.devices, self._source, self._progress, check)

    def _start_phases(self, phases: Mapping[Phase, Deployment]) -> Started:
        """Start two deployments that have the devices in turn.

        Steps of both are compiled before there are weights, for their pools are sized by empty
        devices. Then each is loaded and tried out; prefill, which comes first, at last.
        """
        placed: dict[Phase, list[Placed]] = {}
        compiled: dict[Phase, Compiled] = {}
        check = self._try_kernels()
        for phase, deployment in phases.items():
            placed[phase] = define_groups(deployment, self.devices, check)
            sizes = PoolSizes(deployment, self.devices, self._cache_dir, is_loaded=False)
            compiled[phase] = self._compile(deployment, placed[phase], sizes)
        dtype = FORMATS[phases["prefill"].formats.activations].dtype
        rows = HostWeights(self._source, dtype)
        exchange = DeviceExchange(placed, rows)
        extents, groups, routing = {}, {}, history_of(list(phases.values()))
        for phase in reversed(PHASES):
            begin = time.perf_counter()
            exchange.load(phase, self._progress)
            self.load_seconds += time.perf_counter() - begin
            self._progress("warm up", 0, 1)
            deployment, programs, *_ = compiled[phase]
            runners = start_runners(deployment, placed[phase], programs, extents, routing)
            warm_up(runners)
            groups[phase] = _groups(compiled[phase], runners, None)
            self.runners = [r for stages in runners.values() for r in stages] + self.runners
        self.deployments = [compiled[phase].deployment for phase in PHASES]
        self.store = DeviceStore([placed[phase] for phase in PHASES], rows)
        started = [groups[phase] for phase in PHASES]
        notes = notes_of(self.deployments)
        return Started(started, exchange=exchange, routing=routing, notes=notes)

    def _try_kernels(self) -> TryKernels | None:
        how, devices, progress = self._check, own_devices(self.devices), self._progress
        if how is None:
            return None

        def check(shape: Shape) -> str | None:
            progress("try attention", 0, 1)
            problem = check_attention(how, devices, shape)
            progress("try attention", 1, 1)
            return problem

        return check

    def _compile(
        self, deployment: Deployment, groups: Sequence[Placed], sizes: PoolSizes
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
        if deployment.lora.num_slots:
            wanted = {width: also_with_adapters(modes) for width, modes in wanted.items()}
        for width in deployment.widths:
            logger.info("fleet: %s", describe_width(deployment.of_width(width), wanted[width]))
        if deployment.widths and device.platform != "cpu":
            steps_of_all = (placed.step for placed in groups)
            make_communicators(steps_of_all, deployment.widths, deployment.step_sizes)
        deployment, programs = compile_steps(deployment, steps, wanted, sizes, self._progress)
        if device.platform == "gpu" and (held := deployment.sum_buffer_bytes(wanted)):
            gigabytes = held / 1e9
            logger.info("sums hold %.1f GB of a GPU outside of JAX's share, with NVLink", gigabytes)
            if any(step.sums.name != XLA_SUMS.name for step in steps.values()):
                shared = deployment.switch_buffer_bytes(wanted)
                logger.info("%d MB of it for those that a switch does", shared >> 20)
        compiled = Compiled(deployment, programs, known, policies)
        if self._hosts is not None:
            _check_same(compiled, groups, self._hosts)
        return compiled


def _check_same(compiled: Compiled, groups: Sequence[Placed], hosts: Hosts) -> None:
    """Raise ConfigError where hosts have compiled different steps."""
    names = [placed.step.attention.name for placed in groups]
    buckets = [[p.bucket for p in each] for each in compiled.programs.values()]
    step = groups[0].step
    uses = [
        [step.use_in(mode, p.bucket[:2]) for p in each for mode in p.steps]
        for each in compiled.programs.values()
    ]
    found = compiled.deployment, names, buckets, uses
    told = blake2b(repr(found).encode(), digest_size=7)
    value = int.from_bytes(told.digest())
    least, most = hosts.least("to have compiled", (value, -value))
    if least != -most:
        raise ConfigError(["hosts come to other steps or KV blocks: are their devices alike?"])


def _groups(compiled: Compiled, runners: Runners, hosts: Hosts | None) -> Groups:
    deployment, host_of = compiled.deployment, dict[Group, int]()
    joined: dict[Group, Runner] = {}
    for group, stages in runners.items():
        joined[group] = stages[0] if len(stages) == 1 else PipelineRunner(stages)
        if isinstance(hosts, Leader) and not isinstance(hosts, Replicas):
            joined[group] = LeaderRunner(stages[0], hosts)
    modes = {group.width: stages[0].step.weights.modes for group, stages in runners.items()}
    if isinstance(hosts, Replicas):
        own = {group: stages[0] for group, stages in runners.items()}
        others, host_of = remote_runners(own, hosts)
        joined |= others
    drafters = {}
    if deployment.drafts.speculation != "none":
        drafters = {
            group: Drafter(Drafting(deployment.drafts), time.perf_counter) for group in joined
        }
    known = compiled.policies, compiled.known
    return Groups(deployment, joined, modes, *known, drafters, host_of=host_of)
