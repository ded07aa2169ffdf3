"""By what an engine chooses modes, and of how much it has, as plain values. No JAX."""

from collections.abc import Sequence
from typing import Any

from serving.server.bottleneck import StepInFlight
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Flight, Lane
from shiftjax.costs.buckets import doubling
from shiftjax.costs.expert_modes import ExpertModes
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import round_up


def choice_of(engine: Engine) -> dict[str, Any]:
    """The policy, its threshold or predictions, and the modes that it chooses among.

    They are those of the widest group. `modes`: a step splits its tokens over `sp` of the `width`
    units; `groups`: how many step side by side, None where that changes. `predicted`, where costs
    are known: (tokens that steps are padded to, seconds by mode), without attention, which takes
    the same in all modes. `experts`: (tokens, how many ways a step of each mode splits experts, and
    why). `fleet_rule`: when groups change. To be called before the engine runs.
    """
    lane = max(engine.lanes, key=lambda lane: lane.group.width)
    policy = lane.policy or engine.policy
    fleet = engine.topology.find(Fleet)
    return {
        "policy": policy.name,
        "threshold": policy.most_shifted,
        "modes": [mode._asdict() | {"label": mode.label} for mode in policy.modes_used(lane.modes)],
        "predicted": _predicted(lane, policy.modes_used(lane.modes)),
        "experts": _experts(lane, policy.modes_used(lane.modes)),
        "groups": None if fleet is not None else len(engine.lanes),
        "fleet_rule": None if fleet is None else fleet.policy.rule(),
    }


def capacity_of(engine: Engine) -> dict[str, int | None]:
    """Sequences that may run at once, blocks of the KV pool; None in a fleet, where they vary.

    `group_running` and `step_tokens` are those of a group.
    """
    schedulers = [lane.scheduler for lane in engine.lanes]
    of_group = {
        "group_running": max(each.config.max_num_seqs for each in schedulers),
        "step_tokens": max(each.config.max_num_batched_tokens for each in schedulers),
    }
    if engine.topology.find(Fleet) is not None:
        return {"running": None, "blocks": None, **of_group}
    return {
        **of_group,
        "running": sum(each.config.max_num_seqs for each in schedulers),
        "blocks": sum(each.tables.device.num_usable_blocks for each in schedulers),
    }


def step_in_flight(engine: Engine) -> StepInFlight | None:
    """Return the step that the engine has waited for longest; None: there is none.

    For a look while the engine's thread hangs: what it reads may change in between otherwise.
    """
    lanes = [lane for lane in list(engine.lanes) if lane.awaited or lane.in_flight]
    if not lanes:
        return None
    lane = min(lanes, key=lambda lane: lane.progress_at)
    flight = lane.awaited or next(iter(tuple(lane.in_flight)), None)
    if not isinstance(flight, Flight):
        return None
    first, plan = lane.group.first, flight.plan
    units = (first, first + lane.group.width - 1) if len(engine.lanes) > 1 else None
    return StepInFlight(flight.mode.label, plan.num_tokens, len(plan.scheduled), units)


def _predicted(lane: Lane, modes: Sequence[Mode]) -> list[tuple[int, dict[str, float]]]:
    if lane.costs is None:
        return []
    rows: dict[int, dict[str, float]] = {}
    for bucket in lane.costs.stages[0].buckets:
        size = bucket.tokens, bucket.rows
        seconds = {mode.label: lane.costs.mode_seconds(mode, size) for mode in modes}
        rows.setdefault(bucket.tokens, seconds)
    return list(rows.items())


def _experts(lane: Lane, modes: Sequence[Mode]) -> list[tuple[int, dict[str, dict[str, Any]]]]:
    """Of steps that are padded to so many tokens; empty without experts."""
    uses: ExpertModes | None = getattr(lane.runner, "expert_modes", None)  # some do not tell
    if uses is None or uses.layout.model.experts is None:
        return []
    layout, rows = uses.layout, []
    for tokens in doubling(lane.scheduler.config.max_num_batched_tokens):
        size = round_up(tokens, layout.num_devices)
        of_modes = {mode.label: uses.of(mode, size) for mode in modes}
        told = {
            label: {"ways": layout.ways(each.mode), "why": each.why}
            for label, each in of_modes.items()
        }
        rows.append((tokens, told))
    return rows
