"""Some of the steps that have ended, and what each mode would have made of them. No JAX.

Of each group and mode a step is kept every half second: its work, not its sequences. It is priced
when somebody looks, on the thread of the engine, by the costs that decisions believe.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from shiftjax.core.lane import Flight, Lane
from shiftjax.core.policy import work_of
from shiftjax.costs.step_times import predicted
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Group, Mode

EVERY_SECONDS = 0.5  # of a group and mode a step
KEPT = 128  # of them
PRICED_AT_ONCE = 32  # for who looks at all of them: the rest follows at the next look


@dataclass(slots=True)
class Sample:
    """A step that has ended; `at` is when, by the clock of the engine."""

    at: float
    seconds: float  # that it took
    lane: Lane
    mode: Mode
    last_mode: Mode | None
    num_waiting: int
    is_hidden: bool  # it was planned while another ran
    has_guesses: bool
    work: Work
    _predicted: dict[str, float] | None = None

    @property
    def is_priced(self) -> bool:
        """Whether somebody has looked at it."""
        return self._predicted is not None or self.lane.costs is None

    @property
    def predicted(self) -> dict[str, float]:
        """Seconds by the label of each mode of the group, base first; empty: costs are unknown.

        As the step was: after its last mode, with the host hidden or not, and its guesses.
        """
        costs = self.lane.costs
        if costs is None:
            return {}
        if self._predicted is None:
            guess = costs.guess_seconds(self.work.num_sequences) if self.has_guesses else 0.0
            step = self.last_mode, self.work, self.is_hidden
            modes = self.lane.modes
            self._predicted = {m.label: predicted(costs, m, *step) + guess for m in modes}
        return self._predicted


class StepSamples:
    """A watcher of the engine that keeps some steps of each group and mode."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Group, Mode], deque[Sample]] = {}

    def __call__(self, lane: Lane, flight: Flight, seconds: float, at: float) -> None:
        """Keep a step, if none of its group and mode has been kept of late."""
        kept = self._kept.get((lane.group, flight.mode))
        if kept is None:
            kept = self._kept[lane.group, flight.mode] = deque(maxlen=KEPT)
        if kept and at - kept[-1].at < EVERY_SECONDS:
            return
        plan = flight.plan
        chosen = flight.mode, flight.last_mode, flight.num_waiting, flight.is_ahead
        kept.append(Sample(at, seconds, lane, *chosen, plan.num_guesses > 0, work_of(plan)))

    def latest(self) -> list[Sample]:
        """The last of each group and mode, the newest first."""
        return _newest([kept[-1] for kept in self._kept.values()])

    def since(self, at: float) -> list[Sample]:
        """Those that ended later, the oldest first; of many that nobody has seen the newest."""
        found = [each for each in chain(*self._kept.values()) if each.at > at]
        unseen = _newest([each for each in found if not each.is_priced])
        late = {id(each) for each in unseen[PRICED_AT_ONCE:]}
        return _newest([each for each in found if id(each) not in late])[::-1]


def _newest(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda each: -each.at)


def plain_sample(sample: Sample, reason: str, allowed: Sequence[Mode]) -> dict[str, Any]:
    """A step as plain data: what it computed, why so, and what each mode takes for it."""
    lane, work = sample.lane, sample.work
    labels = {mode.label for mode in allowed}
    return {
        "first": lane.group.first,
        "width": lane.group.width,
        "mode": sample.mode.label,
        "reason": reason,
        "last_mode": "" if sample.last_mode is None else sample.last_mode.label,
        "num_waiting": sample.num_waiting,
        "is_hidden": sample.is_hidden,
        "work": work._asdict(),
        "measured_seconds": sample.seconds,
        "predicted": [
            {"mode": label, "seconds": seconds, "is_allowed": label in labels}
            for label, seconds in sample.predicted.items()
        ],
    }
