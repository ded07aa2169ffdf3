"""The policies that there are, by name. The settings read `POLICIES`.

What the settings need not know is imported for its types alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from shiftjax.core.policy import Policy
from shiftjax.costs.crossing import shift_threshold
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode

if TYPE_CHECKING:
    from shiftjax.core.request import StepPlan
    from shiftjax.costs.buckets import Bucket
    from shiftjax.costs.group_costs import GroupCosts

COST_MARGIN = 0.02  # of a step: what the other mode must save before a switch is worth trusting


@dataclass(frozen=True)
class ThresholdPolicy(Policy):
    """BASE for more than `threshold` scheduled tokens, else SHIFT (Shift Parallelism, 3.3)."""

    threshold: int
    name: ClassVar[str] = "threshold"
    has_threshold: ClassVar[bool] = True

    @classmethod
    def made(cls, threshold: int | None, costs: "GroupCosts | None") -> Self:
        """Without a number the one that the costs say pays."""
        return cls(shift_threshold(_known(costs)) if threshold is None else threshold)

    @classmethod
    def needs_costs(cls, threshold: int | None) -> bool:
        """Without a number."""
        return threshold is None

    @classmethod
    def modes_used(cls, modes: Sequence[Mode]) -> Sequence[Mode]:
        """The first and the last, which may be one."""
        return tuple(dict.fromkeys((modes[0], modes[-1])))

    @classmethod
    def in_words(cls, threshold: int | None) -> str:
        """With the number, where it is known."""
        return "shift where it pays" if threshold is None else f"shift to {threshold}"

    @property
    def most_shifted(self) -> int:
        """The threshold."""
        return self.threshold

    def mode_of(
        self, work: Work, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """Count prefill and decode tokens of the step alike."""
        return self._mode(modes, work.num_tokens)

    def choose(
        self, plan: "StepPlan", modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """The same without summing up the work, which takes longer."""
        return self._mode(modes, plan.num_tokens)

    def reason(self, mode: Mode, work: Work, modes: Sequence[Mode], last_mode: Mode | None) -> str:
        """The number of tokens beside the threshold."""
        if len(modes) == 1:
            return "the only mode"
        side = "more than" if work.num_tokens > self.threshold else "up to"
        tokens = f"{work.num_tokens:,} token{'s' * (work.num_tokens != 1)}"
        return f"{tokens}, {side} the threshold of {self.threshold:,}"

    def wanted(self, modes: Sequence[Mode], least: int, bucket: "Bucket") -> list[Mode]:
        """One, but for the bucket that holds the threshold."""
        return list(dict.fromkeys(self._mode(modes, n) for n in (bucket.tokens, least)))

    def _mode(self, modes: Sequence[Mode], num_tokens: int) -> Mode:
        return modes[0] if num_tokens > self.threshold else modes[-1]


@dataclass(frozen=True)
class FixedPolicy(Policy):
    """The same mode for every step: the controls that shifting is measured against."""

    place: int  # among the modes: 0 is base, -1 shift

    @classmethod
    def in_words(cls, threshold: int | None) -> str:
        """By the name of the mode."""
        return f"always {cls.name}"

    def mode_of(
        self, work: Work, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """Whatever the work."""
        return modes[self.place]

    def choose(
        self, plan: "StepPlan", modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """The same without summing up the work."""
        return modes[self.place]

    def reason(self, mode: Mode, work: Work, modes: Sequence[Mode], last_mode: Mode | None) -> str:
        """Whatever the work."""
        return f"always {self.name}"

    def wanted(self, modes: Sequence[Mode], least: int, bucket: "Bucket") -> list[Mode]:
        """The one."""
        return [modes[self.place]]


@dataclass(frozen=True)
class BasePolicy(FixedPolicy):
    """Every step in BASE: no weights of SHIFT are needed."""

    place: int = 0
    name: ClassVar[str] = "base"

    @classmethod
    def modes_used(cls, modes: Sequence[Mode]) -> Sequence[Mode]:
        """The first."""
        return modes[:1]


@dataclass(frozen=True)
class ShiftPolicy(FixedPolicy):
    """Every step in SHIFT."""

    place: int = -1
    name: ClassVar[str] = "shift"

    @classmethod
    def modes_used(cls, modes: Sequence[Mode]) -> Sequence[Mode]:
        """The last."""
        return modes[-1:]


@dataclass(frozen=True)
class CostPolicy(Policy):
    """The mode that the cost model predicts to be quickest, with hysteresis.

    The plan is the same in every mode, so the quickest is best for latency and throughput alike.
    Attention costs the same in all of them, so it is left out: the choice depends on the size of
    the step alone. A switch must save more than its own cost and `margin` of what the modes
    differ in, by which much the model may be wrong. The queue says what comes next: while
    sequences wait, a full step follows as soon as there is room, so a switch to a mode that
    splits tokens needs no margin and one to SHIFT, which would soon be undone, pays both ways.
    Predictions may change while steps run, say with what was counted of them: a size that was asked
    for in `wanted` keeps to the modes that were found then.
    """

    costs: "GroupCosts"
    margin: float = COST_MARGIN
    _wanted: dict[tuple[int, int], set[Mode]] = field(
        default_factory=dict, repr=False, compare=False
    )
    name: ClassVar[str] = "cost"

    @classmethod
    def made(cls, threshold: int | None, costs: "GroupCosts | None") -> Self:
        """By these costs, whatever the threshold."""
        return cls(_known(costs))

    @classmethod
    def needs_costs(cls, threshold: int | None) -> bool:
        """Always."""
        return True

    def mode_of(
        self, work: Work, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """Compare the predictions for a step of this size."""
        return self._choose(self.costs.size_of(work), modes, num_waiting > 0, last_mode)

    def reason(self, mode: Mode, work: Work, modes: Sequence[Mode], last_mode: Mode | None) -> str:
        """Whether it is predicted to be quickest, by what is predicted now."""
        if len(modes) == 1:
            return "the only mode"
        size = self.costs.size_of(work)
        best = min(modes, key=lambda each: self.costs.mode_seconds(each, size))
        if mode == best:
            return "predicted to be quickest"
        if mode == last_mode:
            return f"{best.label} would be quicker by less than a switch is worth"
        return f"{best.label} is predicted to be quicker by now, or is not compiled for this size"

    def wanted(self, modes: Sequence[Mode], least: int, bucket: "Bucket") -> list[Mode]:
        """Those that some queue and some step before would lead to."""
        lasts = (None, *modes)
        cases = [(queue, last) for queue in (False, True) for last in lasts]
        size = bucket.tokens, bucket.rows
        found = {self._choose(size, modes, *case) for case in cases}
        self._wanted.setdefault(size, found)
        return [mode for mode in modes if mode in found]

    def _choose(
        self, size: tuple[int, int], modes: Sequence[Mode], is_queue: bool, last: Mode | None
    ) -> Mode:
        wanted = self._wanted.get(size)
        seconds = {
            mode: self.costs.mode_seconds(mode, size)
            for mode in modes
            if wanted is None or mode in wanted
        }
        best = min(seconds, key=seconds.__getitem__)
        if last is None or last not in seconds or best == last:
            return best
        doubt = self.margin * seconds[best] + self.costs.engine.switch_seconds
        if is_queue:
            doubt = 2 * doubt if best.sp == 1 else self.costs.engine.switch_seconds
        return best if seconds[last] - seconds[best] > doubt else last


@dataclass(frozen=True)
class GreedyPolicy(CostPolicy):
    """The quickest mode at once, by the true costs: what a perfect cost model would come to."""

    margin: float = 0.0
    name: ClassVar[str] = "greedy"
    is_simulated: ClassVar[bool] = True

    @classmethod
    def in_words(cls, threshold: int | None) -> str:
        """By what it knows."""
        return "mode by true cost"


_CLASSES: tuple[type[Policy], ...] = (
    ThresholdPolicy,
    CostPolicy,
    BasePolicy,
    ShiftPolicy,
    GreedyPolicy,
)
POLICIES: dict[str, type[Policy]] = {each.name: each for each in _CLASSES}
"""Every policy by its name; the settings and `--compare` offer what is here."""
DEFAULT_POLICY = ThresholdPolicy.name


def make_policy(name: str, threshold: int | None, costs: "GroupCosts | None" = None) -> Policy:
    """The policy of this name; `costs` may be None where it needs none.

    Raises `ValueError` with what is wrong.
    """
    if name not in POLICIES:
        raise ValueError(f"There is no policy {name!r}; choose one of {', '.join(POLICIES)}.")
    if threshold is not None and threshold < 0:
        raise ValueError(f"The shift threshold must be at least 0 tokens, not {threshold}.")
    return POLICIES[name].made(threshold, costs)


def _known(costs: "GroupCosts | None") -> "GroupCosts":
    if costs is None:
        raise ValueError("The policy needs a cost model of the machine.")
    return costs
