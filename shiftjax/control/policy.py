"""Which parallel mode a step uses. A policy sees the plan and the queue, never JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shiftjax.control.request import StepPlan
from shiftjax.costs.step import CostModel, Work
from shiftjax.parallel.mode import Mode

COST_MARGIN = 0.02  # of a step: what the other mode must save before a switch is worth trusting


def work_of(plan: StepPlan) -> Work:
    """What a plan computes, as the cost model counts it."""
    scheduled, split = plan.scheduled, plan.num_decodes
    context = split + sum([item.start for item in scheduled[:split]])
    chunk_context = pairs = 0
    for item in scheduled[split:]:
        start, count = item.start, item.num_tokens
        chunk_context += start + count
        pairs += count * start + count * (count + 1) // 2
    return Work(plan.num_tokens, plan.num_rows, len(scheduled), context, chunk_context, pairs)


class Policy(Protocol):
    """Chooses the mode of every step."""

    def choose(self, plan: StepPlan, num_waiting: int, last_mode: Mode | None) -> Mode:
        """The mode of this step; `num_waiting` sequences are not in it for want of room.

        `last_mode` is that of the group's step before; None: there was none.
        """
        ...

    def modes(self, least: int, most: int) -> set[Mode]:
        """The modes it may choose for steps of `least` to `most` tokens: these are compiled."""
        ...


@dataclass(frozen=True)
class ThresholdPolicy:
    """BASE for more than `threshold` scheduled tokens, else SHIFT (Shift Parallelism, 3.3)."""

    threshold: int

    def choose(self, plan: StepPlan, num_waiting: int, last_mode: Mode | None) -> Mode:
        """Count prefill and decode tokens of the step alike."""
        return self._mode(plan.num_tokens)

    def modes(self, least: int, most: int) -> set[Mode]:
        """One, but for the range that holds the threshold."""
        return {self._mode(least), self._mode(most)}

    def _mode(self, num_tokens: int) -> Mode:
        return Mode.BASE if num_tokens > self.threshold else Mode.SHIFT


@dataclass(frozen=True)
class FixedPolicy:
    """The same mode for every step: the controls that shifting is measured against."""

    mode: Mode

    def choose(self, plan: StepPlan, num_waiting: int, last_mode: Mode | None) -> Mode:
        """Whatever the traffic."""
        return self.mode

    def modes(self, least: int, most: int) -> set[Mode]:
        """The one."""
        return {self.mode}


@dataclass(frozen=True)
class CostPolicy:
    """The mode that the cost model predicts to be quicker, with hysteresis.

    The plan is the same in both modes, so the quicker mode is better for latency and throughput
    alike. A switch must save more than its own cost and `margin` of the step, by which much the
    model may be wrong. The queue says what comes next: while sequences wait, a full step follows
    as soon as there is room, so a switch to BASE needs no margin and one to SHIFT, which would
    soon be undone, pays for both ways.
    """

    costs: CostModel
    margin: float = COST_MARGIN

    def choose(self, plan: StepPlan, num_waiting: int, last_mode: Mode | None) -> Mode:
        """Compare the predictions for this plan."""
        work = work_of(plan)
        seconds = {mode: self.costs.device_seconds(mode, work) for mode in Mode}
        best = min(seconds, key=seconds.__getitem__)
        if last_mode is None or best is last_mode:
            return best
        doubt = self.margin * seconds[best] + self.costs.engine.switch_seconds
        if num_waiting:
            doubt = 2 * doubt if best is Mode.SHIFT else self.costs.engine.switch_seconds
        return best if seconds[last_mode] - seconds[best] > doubt else last_mode

    def modes(self, least: int, most: int) -> set[Mode]:
        """Both: the context counts as much as the tokens."""
        return set(Mode)


POLICIES: dict[str, Callable[[int, CostModel | None], Policy]] = {
    "threshold": lambda threshold, costs: ThresholdPolicy(threshold),
    "cost": lambda threshold, costs: _cost_policy(costs),
    "base": lambda threshold, costs: FixedPolicy(Mode.BASE),
    "shift": lambda threshold, costs: FixedPolicy(Mode.SHIFT),
}


def make_policy(name: str, threshold: int, costs: CostModel | None = None) -> Policy:
    """The policy of this name; `cost` needs `costs`. Raises `ValueError` with what is wrong."""
    if name not in POLICIES:
        raise ValueError(f"There is no policy {name!r}; choose one of {', '.join(POLICIES)}.")
    if threshold < 0:
        raise ValueError(f"The shift threshold must be at least 0 tokens, not {threshold}.")
    return POLICIES[name](threshold, costs)


def _cost_policy(costs: CostModel | None) -> CostPolicy:
    if costs is None:
        raise ValueError("The cost policy needs a cost model of the machine.")
    return CostPolicy(costs)
