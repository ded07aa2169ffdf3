"""By what an engine chooses modes, and of how much it has, as plain values. No JAX."""

from collections.abc import Sequence
from typing import Any

from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.policy import CostPolicy, FixedPolicy, Policy, ThresholdPolicy
from shiftjax.fleet.control import Fleet
from shiftjax.parallel.grid import Mode


def choice_of(engine: Engine) -> dict[str, Any]:
    """The policy, its threshold or predictions, and the modes that it chooses among.

    They are those of the widest group. `modes`: a step splits its tokens over `sp` of the `width`
    units; `groups`: how many step side by side, None where that changes. `predicted`, of a policy
    by cost: (tokens that steps are padded to, seconds by mode), without attention, which takes the
    same in all modes. To be called before the engine runs.
    """
    lane = max(engine.lanes, key=lambda lane: lane.group.width)
    policy = lane.policy or engine.policy
    return {
        "policy": _name(policy, lane.modes),
        "threshold": policy.threshold if isinstance(policy, ThresholdPolicy) else None,
        "modes": [mode._asdict() | {"label": mode.label} for mode in _choosable(policy, lane)],
        "predicted": _predicted(policy, lane.modes),
        "groups": None if engine.topology.find(Fleet) is not None else len(engine.lanes),
    }


def capacity_of(engine: Engine) -> dict[str, int | None]:
    """Sequences that may run at once, blocks of the KV pool; None in a fleet, where they vary."""
    if engine.topology.find(Fleet) is not None:
        return {"running": None, "blocks": None}
    schedulers = [lane.scheduler for lane in engine.lanes]
    return {
        "running": sum(each.config.max_num_seqs for each in schedulers),
        "blocks": sum(each.tables.device.num_usable_blocks for each in schedulers),
    }


def _name(policy: Policy, modes: Sequence[Mode]) -> str:
    if isinstance(policy, FixedPolicy):
        return modes[policy.place].label
    return "cost" if isinstance(policy, CostPolicy) else "threshold"


def _choosable(policy: Policy, lane: Lane) -> list[Mode]:
    """Base first; a policy by threshold never takes those between."""
    modes = lane.modes
    if isinstance(policy, ThresholdPolicy | FixedPolicy):
        modes = (modes[0], modes[-1])
    return list(dict.fromkeys(modes))


def _predicted(policy: Policy, modes: Sequence[Mode]) -> list[tuple[int, dict[str, float]]]:
    if not isinstance(policy, CostPolicy):
        return []
    rows: dict[int, dict[str, float]] = {}
    for bucket in policy.costs.stages[0].buckets:
        size = bucket.tokens, bucket.rows
        seconds = {mode.label: policy.costs.mode_seconds(mode, size) for mode in modes}
        rows.setdefault(bucket.tokens, seconds)
    return list(rows.items())
