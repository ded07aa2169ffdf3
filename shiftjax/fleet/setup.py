"""A fleet as settings want it: its policy, and the groups that it begins with. No JAX."""

import time
from collections.abc import Callable, Mapping, Sequence

from shiftjax.core.lane import Lane
from shiftjax.core.policy import Policy
from shiftjax.core.request import Request
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.machine import Machine
from shiftjax.deploy.deployment import Deployment
from shiftjax.fleet import switching
from shiftjax.fleet.alternatives import Alternatives
from shiftjax.fleet.cost_arrangement import CostArrangement
from shiftjax.fleet.fleet_policy import (
    FixedArrangement,
    FleetPolicy,
    LoadPolicy,
    NeedPolicy,
)
from shiftjax.fleet.handover import Mover
from shiftjax.fleet.move_costs import MoveCosts
from shiftjax.fleet.regrouping import Fleet, SwitchRules
from shiftjax.fleet.step_prices import StepPrices
from shiftjax.fleet.switching import Steps
from shiftjax.parallel.arrangements import Arrangement, Change, equal_groups

URGENT = range(-(1 << 31), 0)  # priorities that get the widest group with fleet_policy = priority


def make_fleet(
    deployment: Deployment,
    lanes: Sequence[Lane],
    policies: Mapping[int, Policy],
    costs: Mapping[int, GroupCosts | None],
    mover: Mover,
    clock: Callable[[], float] | None = None,
) -> Fleet:
    """The fleet over these lanes, one for each group; `policies` choose modes, by width.

    Raises:
        ConfigError: the settings name an arrangement that the units cannot form.
    """
    options = deployment.fleet
    rules = SwitchRules(
        options.switch,
        block_bytes=deployment.block_bytes * deployment.tp,
        clock=clock or time.perf_counter,
    )
    policy = make_fleet_policy(deployment, lanes, policies, costs)
    if isinstance(policy, CostArrangement):
        steps = Steps(policy.steps.decode_seconds, policy.steps.prefill_rate)
        by_group = {lane.group: lane for lane in lanes}

        def kind_of_bind(change: Change, wanting: Sequence[Request]) -> str:
            closing = [by_group[group] for group in change.sources]
            return switching.kind_of_bind(change, closing, wanting, steps, policy.moves)

        rules = rules._replace(kind_of_bind=kind_of_bind)
    first = first_arrangement(deployment)
    prices = _cost_arrangement(deployment, lanes, policies, costs)
    others = None if prices is None else Alternatives(prices)
    return Fleet(lanes, first, policy, mover, deployment.limits, rules, others)


def forget_prices(fleet: Fleet) -> None:
    """Have a policy ask anew for what it has kept of the costs of steps."""
    if isinstance(fleet.policy, CostArrangement):
        fleet.policy.steps.forget()
    if fleet.alternatives is not None:
        fleet.alternatives.prices.steps.forget()


def move_costs(deployment: Deployment, machine: Machine) -> MoveCosts:
    """What moves between the groups of a fleet take on this machine."""
    sizes = deployment.block_size, deployment.num_blocks
    return MoveCosts(deployment.layout, deployment.formats, machine, *sizes)


def first_arrangement(deployment: Deployment) -> Arrangement:
    """What a fleet begins with: what is fixed; in a quiet time one group; else single units."""
    units = deployment.grid.units
    if deployment.fixed is not None:
        return deployment.fixed
    width = deployment.widths[-1 if deployment.fleet.traits.begins_wide else 0]
    return equal_groups(units, width)


def make_fleet_policy(
    deployment: Deployment,
    lanes: Sequence[Lane],
    policies: Mapping[int, Policy],
    costs: Mapping[int, GroupCosts | None],
) -> FleetPolicy:
    """The policy that the settings name."""
    options, widths = deployment.fleet, deployment.widths
    traits = options.traits
    needs = _needs(deployment)
    if deployment.fixed is not None:
        return FixedArrangement(deployment.fixed)
    if traits.has_bounds:
        return LoadPolicy(widths, options.bind_at, options.release_at, needs)
    if not traits.needs_costs:
        return needs
    policy = _cost_arrangement(deployment, lanes, policies, costs)
    assert policy is not None  # it is known what it costs, as the settings need it
    return policy


def _needs(deployment: Deployment) -> NeedPolicy:
    urgent = URGENT if deployment.fleet.traits.binds_urgent else ()
    return NeedPolicy(deployment.widths, urgent, deployment.widths[-1])


def _cost_arrangement(
    deployment: Deployment,
    lanes: Sequence[Lane],
    policies: Mapping[int, Policy],
    costs: Mapping[int, GroupCosts | None],
) -> CostArrangement | None:
    """The arrangement by costs; None where those of a width are unknown."""
    widths = deployment.widths
    known = {width: model for width, model in costs.items() if model is not None}
    if len(known) < len(widths):
        return None
    modes = {lane.group.width: lane.modes for lane in lanes}
    sizes = {lane.group.width: lane.scheduler.sizes for lane in lanes}
    steps = StepPrices(known, modes, policies, sizes, deployment.max_num_batched_tokens)
    moves = move_costs(deployment, known[widths[-1]].machine)
    return CostArrangement(widths, steps, moves, _needs(deployment))
