"""Which parallel mode a step uses. A policy sees the plan and the queue, never JAX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shiftjax.core.request import ScheduledSequence, StepPlan
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.stages import GroupCosts
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode

COST_MARGIN = 0.02  # of a step: what the other mode must save before a switch is worth trusting


def work_of(plan: StepPlan) -> Work:
    """What a plan computes, as the cost model counts it."""
    return work_of_items(plan.scheduled, len(plan.scheduled) - len(plan.chunks))


def work_of_items(items: Sequence[ScheduledSequence], num_rowwise: int) -> Work:
    """The same of a plan's items; tokens of the first `num_rowwise` attend one by one."""
    sizes = [(item.start, item.num_tokens) for item in items]
    pairs = [count * start + count * (count + 1) // 2 for start, count in sizes]
    return Work(
        num_tokens=sum([count for _, count in sizes]),
        num_rows=sum([item.num_rows for item in items]),
        num_sequences=len(items),
        context_tokens=sum(pairs[:num_rowwise]),
        chunk_context_tokens=sum([start + count for start, count in sizes[num_rowwise:]]),
        attention_pairs=sum(pairs[num_rowwise:]),
        num_decodes=sum([count for _, count in sizes[:num_rowwise]]),
    )


class Policy(Protocol):
    """Chooses the mode of every step among those of its group, `modes`: base first, shift last."""

    def choose(
        self, plan: StepPlan, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """The mode of this step; `num_waiting` sequences are not in it for want of room.

        `last_mode` is that of the group's step before; None: there was none.
        """
        ...

    def mode_of(
        self, work: Work, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """What `choose` will say of a plan with this work."""
        ...

    def wanted(self, modes: Sequence[Mode], least: int, bucket: Bucket) -> list[Mode]:
        """The modes it may choose for steps of `least` tokens or more in a bucket.

        These are compiled ahead of traffic.
        """
        ...


@dataclass(frozen=True)
class ThresholdPolicy:
    """BASE for more than `threshold` scheduled tokens, else SHIFT (Shift Parallelism, 3.3)."""

    threshold: int

    def choose(
        self, plan: StepPlan, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """Count prefill and decode tokens of the step alike."""
        return self._mode(modes, plan.num_tokens)

    def mode_of(
        self, work: Work, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """The same of what a plan would compute."""
        return self._mode(modes, work.num_tokens)

    def wanted(self, modes: Sequence[Mode], least: int, bucket: Bucket) -> list[Mode]:
        """One, but for the bucket that holds the threshold."""
        return list(dict.fromkeys(self._mode(modes, n) for n in (bucket.tokens, least)))

    def _mode(self, modes: Sequence[Mode], num_tokens: int) -> Mode:
        return modes[0] if num_tokens > self.threshold else modes[-1]


@dataclass(frozen=True)
class FixedPolicy:
    """The same mode for every step: the controls that shifting is measured against."""

    place: int  # among the modes: 0 is base, -1 shift

    def choose(
        self, plan: StepPlan, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """Whatever the traffic."""
        return modes[self.place]

    def mode_of(
        self, work: Work, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """Whatever the work."""
        return modes[self.place]

    def wanted(self, modes: Sequence[Mode], least: int, bucket: Bucket) -> list[Mode]:
        """The one."""
        return [modes[self.place]]


@dataclass(frozen=True)
class CostPolicy:
    """The mode that the cost model predicts to be quickest, with hysteresis.

    The plan is the same in every mode, so the quickest is best for latency and throughput alike.
    Attention costs the same in all of them, so it is left out: the choice depends on the size of
    the step alone. A switch must save more than its own cost and `margin` of what the modes
    differ in, by which much the model may be wrong. The queue says what comes next: while
    sequences wait, a full step follows as soon as there is room, so a switch to a mode that
    splits tokens needs no margin and one to SHIFT, which would soon be undone, pays both ways.
    """

    costs: GroupCosts
    margin: float = COST_MARGIN

    def choose(
        self, plan: StepPlan, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """Compare the predictions for a step of this size."""
        return self.mode_of(work_of(plan), modes, num_waiting, last_mode)

    def mode_of(
        self, work: Work, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """What `choose` will say of a plan with this work."""
        return self._choose(self.costs.size_of(work), modes, num_waiting > 0, last_mode)

    def wanted(self, modes: Sequence[Mode], least: int, bucket: Bucket) -> list[Mode]:
        """Those that some queue and some step before would lead to."""
        lasts = (None, *modes)
        cases = [(queue, last) for queue in (False, True) for last in lasts]
        found = {self._choose((bucket.tokens, bucket.rows), modes, *case) for case in cases}
        return [mode for mode in modes if mode in found]

    def _choose(
        self, size: tuple[int, int], modes: Sequence[Mode], is_queue: bool, last: Mode | None
    ) -> Mode:
        seconds = {mode: self.costs.mode_seconds(mode, size) for mode in modes}
        best = min(seconds, key=seconds.__getitem__)
        if last is None or last not in seconds or best == last:
            return best
        doubt = self.margin * seconds[best] + self.costs.engine.switch_seconds
        if is_queue:
            doubt = 2 * doubt if best.sp == 1 else self.costs.engine.switch_seconds
        return best if seconds[last] - seconds[best] > doubt else last


def shift_threshold(costs: GroupCosts, most: int = 1 << 16) -> int:
    """The largest step, in tokens, that is quicker in SHIFT, if all larger ones are in BASE.

    For prompt tokens; a step of decodes moves the crossing little, because attention costs the
    same in both modes. 0 where SHIFT never wins, `most` where it always does.
    """

    base, shift = costs.layout.base, costs.layout.shift

    def shift_wins(num_tokens: int) -> bool:
        work = Work.prefill(num_tokens)
        return costs.device_seconds(shift, work) < costs.device_seconds(base, work)

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if shift_wins(middle) else (low, middle - 1)
    return low


def _by_threshold(threshold: int | None, costs: GroupCosts | None) -> Policy:
    return ThresholdPolicy(shift_threshold(_known(costs)) if threshold is None else threshold)


POLICIES: dict[str, Callable[[int | None, GroupCosts | None], Policy]] = {
    "threshold": _by_threshold,
    "cost": lambda threshold, costs: CostPolicy(_known(costs)),
    "greedy": lambda threshold, costs: CostPolicy(_known(costs), margin=0.0),  # of simulations
    "base": lambda threshold, costs: FixedPolicy(0),
    "shift": lambda threshold, costs: FixedPolicy(-1),
}


def make_policy(name: str, threshold: int | None, costs: GroupCosts | None = None) -> Policy:
    """The policy of this name; `cost` needs `costs`, and so does a threshold that follows from it.

    Raises `ValueError` with what is wrong.
    """
    if name not in POLICIES:
        raise ValueError(f"There is no policy {name!r}; choose one of {', '.join(POLICIES)}.")
    if threshold is not None and threshold < 0:
        raise ValueError(f"The shift threshold must be at least 0 tokens, not {threshold}.")
    return POLICIES[name](threshold, costs)


def wanted_modes(
    policy: Policy, buckets: Sequence[Bucket], modes: Sequence[Mode]
) -> dict[Bucket, list[Mode]]:
    """The modes that a policy may choose in each bucket; the smallest bucket comes first."""
    wanted: dict[Bucket, list[Mode]] = {}
    for bucket in buckets:
        smaller = (one.tokens for one in wanted if one.tokens < bucket.tokens)
        wanted[bucket] = policy.wanted(modes, 1 + max(smaller, default=0), bucket)
    return wanted


def _known(costs: GroupCosts | None) -> GroupCosts:
    if costs is None:
        raise ValueError("The policy needs a cost model of the machine.")
    return costs
