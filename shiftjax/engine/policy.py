"""Which parallel mode a step uses. A policy sees the plan and the queue, never JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shiftjax.engine.request import Mode, StepPlan


class Policy(Protocol):
    """Chooses the mode of every step."""

    def choose(self, plan: StepPlan, num_waiting: int) -> Mode:
        """The mode of this step; `num_waiting` sequences are not in it for want of room."""
        ...


@dataclass(frozen=True)
class ThresholdPolicy:
    """BASE for more than `threshold` scheduled tokens, else SHIFT (Shift Parallelism, 3.3)."""

    threshold: int

    def choose(self, plan: StepPlan, num_waiting: int) -> Mode:
        """Count prefill and decode tokens of the step alike."""
        return Mode.BASE if plan.num_tokens > self.threshold else Mode.SHIFT


@dataclass(frozen=True)
class FixedPolicy:
    """The same mode for every step: the controls that shifting is measured against."""

    mode: Mode

    def choose(self, plan: StepPlan, num_waiting: int) -> Mode:
        """Whatever the traffic."""
        return self.mode


POLICIES: dict[str, Callable[[int], Policy]] = {
    "threshold": ThresholdPolicy,
    "base": lambda threshold: FixedPolicy(Mode.BASE),
    "shift": lambda threshold: FixedPolicy(Mode.SHIFT),
}


def make_policy(name: str, threshold: int) -> Policy:
    """The policy of this name. Raises `ValueError` with the names that exist."""
    if name not in POLICIES:
        raise ValueError(f"There is no policy {name!r}; choose one of {', '.join(POLICIES)}.")
    if threshold < 0:
        raise ValueError(f"The shift threshold must be at least 0 tokens, not {threshold}.")
    return POLICIES[name](threshold)
