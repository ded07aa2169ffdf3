"""What steps really take beside what was predicted, learned while serving. No JAX."""

import math
from typing import NamedTuple

from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode

PRIOR_STEPS = 4.0  # what is known of all kinds weighs as much as so many steps of one
FILE_STEPS = 16.0  # what a machine's file says weighs as much as so many steps of all kinds
KIND_MEMORY, MEMORY = 256, 4096  # steps, of any kind, that means of one kind and of all go over
MOST_SURPRISE = 4.0  # a step counts as this many times what is expected of it, or its share


class StepKind(NamedTuple):
    """Steps of which a prediction errs alike: one program, the host hidden behind it or not."""

    mode: Mode
    num_tokens: int  # padded
    num_rows: int  # padded
    is_hidden: bool


def kind_of(costs: GroupCosts, mode: Mode, work: Work, is_hidden: bool) -> StepKind:
    """The kind of a step of this work."""
    return StepKind(mode, *costs.size_of(work), is_hidden)


def predicted(
    costs: GroupCosts,
    mode: Mode,
    last_mode: Mode | None,
    work: Work,
    is_hidden: bool,
    num_guessing: int = 0,
) -> float:
    """Seconds of a step after one in `last_mode`; `is_hidden`: it is planned while that runs.

    A model guesses for `num_guessing` sequences after it.
    """
    seconds = costs.paced_seconds(mode, work, 1, num_guessing, is_hidden=is_hidden)
    return seconds + switch_seconds(costs, mode, last_mode)


def switch_seconds(costs: GroupCosts, mode: Mode, last_mode: Mode | None) -> float:
    """Seconds that a step waits for a switch from `last_mode`; None: there was no step."""
    return (last_mode not in (None, mode)) * costs.engine.switch_seconds


class _Seen(NamedTuple):
    """Steps, old ones counting less."""

    weight: float = 0.0
    total: float = 0.0  # of the logarithms of their ratios
    at: int = 0  # number of the last step that is counted in

    def by(self, at: int, memory: int) -> "_Seen":
        """The same as it counts at a later step."""
        kept = (1 - 1 / memory) ** (at - self.at)
        return _Seen(self.weight * kept, self.total * kept, at)

    def more(self, ratio: float) -> "_Seen":
        """With one more."""
        return self._replace(weight=self.weight + 1.0, total=self.total + ratio)


class StepTimes:
    """Measured over predicted seconds: of each kind of step a mean that follows, 1 at first.

    The mean of a kind is drawn to that of all kinds, by `PRIOR_STEPS`, since a machine that is
    slower than its file says is slower at what it has not done yet, too. That one follows slowly:
    a kind that turns out dear is first believed to be so alone, and the others are tried. What was
    seen of a kind counts less with every step of any: one that nobody chooses any more, say
    because of a few slow steps, is by and by believed to be like the others, and tried again.
    Means are geometric (twice and half cancel out), and a step that took many times what is
    expected of it counts as `MOST_SURPRISE`: it waited for something else.
    """

    def __init__(self) -> None:
        self._kinds: dict[StepKind, _Seen] = {}
        self._all = _Seen(weight=FILE_STEPS)

    def factor(self, kind: StepKind) -> float:
        """What to multiply the predicted seconds of such a step by."""
        return math.exp(self._mean(kind))

    def learn(self, kind: StepKind, measured: float, predicted: float) -> None:
        """A step took `measured` seconds; what took no time, as without a clock, is passed over."""
        if min(measured, predicted) <= 0:
            return
        expected, most = self._mean(kind), math.log(MOST_SURPRISE)
        error = math.log(measured / predicted) - expected
        ratio = expected + min(max(error, -most), most)
        now = self._all.at + 1
        self._kinds[kind] = self._kinds.get(kind, _Seen()).by(now, KIND_MEMORY).more(ratio)
        self._all = self._all.by(now, MEMORY).more(ratio)

    def _mean(self, kind: StepKind) -> float:
        seen = self._kinds.get(kind, _Seen()).by(self._all.at, KIND_MEMORY)
        prior = self._all.total / self._all.weight
        return (seen.total + PRIOR_STEPS * prior) / (seen.weight + PRIOR_STEPS)
