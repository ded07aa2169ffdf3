"""Virtual devices as a backend: the classes that serve, over `CostRunner` and one virtual clock."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from shiftjax.adapters.adapter import Adapter
from shiftjax.adapters.pool import AdapterPool, NoDevices
from shiftjax.assembly import Drafter, Groups, Started, assemble
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.machine import Machine, Transfer
from shiftjax.deploy.deployment import Deployment
from shiftjax.fleet.cost_arrangement import CostArrangement
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.setup import move_costs
from shiftjax.phases.resharding import PHASES
from shiftjax.phases.switch_costs import check_host_links
from shiftjax.sim.devices import Clock, CostMover, CostRunner, Units
from shiftjax.sim.drafts import AcceptanceModel
from shiftjax.sim.host_link import HostLink, Stored
from shiftjax.sim.modelled import (
    Target,
    cost_model,
    drafting_of,
    modes_of,
    policy_of,
    sized_of,
)
from shiftjax.sim.phase_exchange import CostExchange
from shiftjax.sim.prompts_first import PromptsFirst


class SimulatedBackend:
    """Steps of a target's devices that take their predicted seconds; see `assembly.Backend`.

    Policies and drafts decide by `belief`, by default the costs that steps take.
    """

    def __init__(
        self,
        target: Target,
        clock: Clock,
        belief: GroupCosts | None = None,
        acceptance: AcceptanceModel | None = None,
    ):
        self.target, self.clock = target, clock
        self.runners: list[CostRunner] = []
        self._belief, self._acceptance = belief, acceptance

    @property
    def now(self) -> Callable[[], float]:
        """The virtual time of decisions."""
        return lambda: self.clock.now

    @property
    def wait(self) -> Callable[[Sequence[Lane]], None]:
        """Wait for all lanes where the engine keeps its replicas in step, else for one."""
        clock = self.clock
        return clock.wait_for_all if self.target.engine.replicas_in_step else clock.wait_for_one

    def start(self, deployments: Sequence[Deployment]) -> Started:
        """Return simulated groups.

        Raises ConfigError where a model does not fit, drafts come without an acceptance, or nobody
        knows the links to the host that are needed.
        """
        stored, target = Stored(), self.target
        units = [Units(deployment.grid.units) for deployment in deployments]
        groups = [self._groups(*each, stored) for each in zip(deployments, units, strict=True)]
        sized = [each.deployment for each in groups]
        if len(sized) > 1:
            by_phase = dict(zip(PHASES, sized, strict=True))
            return Started(
                groups, exchange=CostExchange(target, by_phase, self.runners, self.clock)
            )
        adapters = _adapters(sized[0])
        if not sized[0].widths:
            return Started(groups, adapters=adapters)
        machine, host_seconds = target.machine, target.engine.host(0, 2)
        if sized[0].policy_class.is_simulated:
            machine, host_seconds = _free(machine), 0.0
        costs = move_costs(sized[0], machine)
        mover = CostMover(costs, self.clock, units[0], host_seconds)
        return Started(groups, mover=mover, adapters=adapters)

    def _groups(self, deployment: Deployment, units: Units, stored: Stored) -> Groups:
        target = self.target
        sized = sized_of(target, deployment)
        sized = replace(sized, overlap=sized.overlap and target.engine.overlaps)
        by_width = sized.by_width
        costs = {width: cost_model(target, each) for width, each in by_width.items()}
        beliefs: dict[int, GroupCosts | None] = dict(costs)
        if self._belief is not None:
            known = self._belief.machine, self._belief.engine
            beliefs = {width: each.costs(*known) for width, each in by_width.items()}
        runners = {
            group: CostRunner(
                costs[width],
                self.clock,
                group=group,
                units=units,
                drafting=drafting_of(target, deployment, self._acceptance),
                link=_link(target, by_width[width], stored),
            )
            for width in sorted(costs, reverse=True)
            for group in sized.grid.groups(width)
        }
        self.runners += runners.values()
        return Groups(
            sized,
            runners,
            {width: modes_of(costs[width], each) for width, each in by_width.items()},
            {w: policy_of(sized, costs[w], beliefs[w] or costs[w]) for w in costs},
            beliefs,
            {
                group: Drafter(runner.drafting, runner.drafting.clock)
                for group, runner in runners.items()
                if runner.drafting is not None
            },
            PromptsFirst if target.engine.prompts_first else None,
        )


def make_engine(
    target: Target,
    deployments: Sequence[Deployment],
    clock: Clock,
    belief: GroupCosts | None = None,
    acceptance: AcceptanceModel | None = None,
    kind: "type[SimulatedBackend]" = SimulatedBackend,
) -> tuple[Engine, list[CostRunner]]:
    """Return an engine on virtual devices, and these. Raises ConfigError as a backend does.

    A fleet keeps all of its history; the groups of a greedy one come and go for nothing.
    """
    backend = kind(target, clock, belief, acceptance)
    engine = assemble(deployments, backend)
    fleet = engine.topology.find(Fleet)
    if fleet is not None:
        fleet.history = deque()
        if isinstance(fleet.policy, CostArrangement) and deployments[0].policy_class.is_simulated:
            moves = fleet.policy.moves._replace(machine=_free(target.machine))
            fleet.policy = replace(fleet.policy, moves=moves, margin=0.0, hold_switches=0.0)
    return engine, backend.runners


def _adapters(deployment: Deployment) -> AdapterPool | None:
    """Adapters that are made up: names alone, each of the largest rank. Nothing is read."""
    lora = deployment.lora
    if not lora.num_slots:
        return None

    def make_up(name: str, path: str) -> Adapter:
        return Adapter(name, path, blake2b(path.encode()).hexdigest(), lora.max_lora_rank, {})

    pool = AdapterPool(lora.num_slots, make_up, lora.max_cpu_loras, _AtOnce())
    for name, path in lora.modules.items():
        pool.load(name, path)
    pool.fill(NoDevices())
    return pool


class _AtOnce(Executor):
    """Does what it is given before it returns: threads know no virtual time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of a call that is over."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _free(machine: Machine) -> Machine:
    """A machine on which moving blocks takes no time."""
    free = (Transfer(0.0, float("inf")),)
    return replace(
        machine, all_to_all=free, memory_bytes_per_second=float("inf"), kernel_seconds=0.0
    )


def _link(target: Target, deployment: Deployment, stored: Stored) -> HostLink | None:
    if not deployment.host_bytes:
        return None
    check_host_links(target.machine)
    sizes = [stage.block_bytes for stage in deployment.stages]
    return HostLink(target.machine, sizes, deployment.blocks_in_flight, stored)
