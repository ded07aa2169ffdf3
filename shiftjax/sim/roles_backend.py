"""Virtual groups with roles as a backend: each side of a split has devices of its own."""

from collections.abc import Callable, Sequence

from shiftjax.assembly import Groups, Started
from shiftjax.core.lane import Lane
from shiftjax.core.topology import Topology
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.deploy.deployment import Deployment
from shiftjax.fleet.setup import move_costs
from shiftjax.fleet.step_prices import StepPrices
from shiftjax.sim.devices import Units
from shiftjax.sim.host_link import Stored
from shiftjax.sim.kv_links import KvLinks
from shiftjax.sim.role_policy import CostRoles
from shiftjax.sim.roles import FixedRoles, Role, RolePolicy, Roles
from shiftjax.sim.sim_backend import SimulatedBackend


class RolesBackend(SimulatedBackend):
    """Groups of one deployment whose roles a policy chooses, or of one for each role.

    Groups step on their own, as servers of their own would, whatever the engine.
    """

    @property
    def wait(self) -> Callable[[Sequence[Lane]], None]:
        """Wait for one of the lanes."""
        return self.clock.wait_for_one

    def start(self, deployments: Sequence[Deployment]) -> Started:
        """Return simulated groups, and what gives them roles. Raises ConfigError as others do."""
        units, stored = [Units(each.grid.units) for each in deployments], Stored()
        groups = [self._groups(*each, stored) for each in zip(deployments, units, strict=True)]

        def topology(lanes: Sequence[Sequence[Lane]]) -> Topology:
            return self._roles(groups, lanes, units)

        return Started(groups, topology=topology)

    def _roles(
        self, groups: Sequence[Groups], lanes: Sequence[Sequence[Lane]], units: Sequence[Units]
    ) -> Roles:
        machine, clock = self.target.machine, self.clock
        costs = [move_costs(each.deployment, machine) for each in groups]
        every = list(zip(lanes, costs, units, strict=True))
        links = KvLinks(
            {id(lane): cost for of_side, cost, _ in every for lane in of_side},
            {id(lane): unit for of_side, _, unit in every for lane in of_side},
            clock,
            self.target.engine.host(0, 2),
        )

        def due(seconds: float) -> None:
            clock.next_due = seconds

        flat = [lane for of_side in lanes for lane in of_side]
        return Roles(flat, links, _policy(groups, lanes), due)


def _policy(groups: Sequence[Groups], lanes: Sequence[Sequence[Lane]]) -> RolePolicy:
    """Of two sides, the first computes prompts; of one, roles go by cost."""
    if len(groups) > 1:
        sides: tuple[Role, Role] = "prefill", "decode"
        return FixedRoles([side for side, of in zip(sides, lanes, strict=True) for _ in of])
    (one,), (own,) = groups, lanes
    width, deployment = own[0].group.width, one.deployment
    known: dict[int, GroupCosts] = {w: each for w, each in one.costs.items() if each is not None}
    sizes = {width: own[0].scheduler.sizes}
    steps = StepPrices(
        known, {width: own[0].modes}, one.policies, sizes, deployment.max_num_batched_tokens
    )
    limits = deployment.num_kv_tokens, deployment.max_num_seqs
    return CostRoles(len(own), steps, width, *limits, deployment.targets.default)
