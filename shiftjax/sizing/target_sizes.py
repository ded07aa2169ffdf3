"""Sizes of steps with prompts where requests have latency targets. No JAX.

A size costs what `drain.py` says, and `PRICE` seconds of that for each request that would pass its
target (`misses.py`). First tokens may then come as late as the targets allow. Where nobody would
pass a target with the size that is best without them, it is that one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shiftjax.core.step_sizes import Demand
from shiftjax.sizing.cost_sizes import CostSizes, Known
from shiftjax.sizing.drain import Candidate, Queue, candidates, size_alone
from shiftjax.sizing.misses import Coming, Steps, num_missed, owed_to
from shiftjax.targets import Targets

PRICE = 10.0  # seconds of first tokens and of late ones, that a request inside its target is worth
FEWEST = 1e-3  # requests: fewer are none


class Decision(NamedTuple):
    """A size that targets have decided, and the one that there would be without them."""

    size: int  # tokens
    num_missed: float  # requests that would pass their targets, about
    usual: int
    usual_missed: float

    @property
    def words(self) -> str:
        """The same in a sentence."""
        passing = f"about {self.num_missed:.1f} requests would pass their targets"
        return f"{self.size:,} tokens: {passing}, with {self.usual:,} {self.usual_missed:.1f}"


@dataclass(slots=True)
class TargetStats:
    """The last decision of targets; `size_stats.py` counts them, among other reasons."""

    last: Decision | None = None

    def __add__(self, other: "TargetStats") -> "TargetStats":
        """Return what two groups tell together."""
        return TargetStats(self.last or other.last)

    @property
    def words(self) -> str:
        """What the page shows of it."""
        return "" if self.last is None else self.last.words


class TargetSizes(CostSizes):
    """As `CostSizes`, for requests that have targets."""

    def __init__(self, known: Known, targets: Targets, num_groups: int = 1):
        super().__init__(known, num_groups)
        self.targets = targets
        self.stats = TargetStats()

    def states(self) -> Iterator[Any]:
        """Return the counters."""
        yield from super().states()
        yield self.stats

    def best(self, demand: Demand, queue: Queue, seconds: Callable[[int, int], float]) -> int:
        """Return the size that is best for all, those counted who would pass their targets."""
        found = candidates(self.sizes, demand.most, queue, seconds)
        if not found:
            return demand.most
        missed = self._missed(demand, queue, seconds)
        usual = best = min((each for each in found if each.keeps), key=_cost)
        num = usual_missed = missed(usual)
        if num > FEWEST:
            least = _cost(usual) + PRICE * num
            for each in sorted(found, key=_cost):
                if _cost(each) >= least:
                    break
                if (cost := _cost(each) + PRICE * (other := missed(each))) < least:
                    best, num, least = each, other, cost
        if best is not usual:
            size, of_usual = self.sizes[best.place], self.sizes[usual.place]
            self.stats.last = Decision(size, num, of_usual, usual_missed)
        self.told.count(self.sizes, queue, found, best, seconds)
        return min(demand.most, self.sizes[best.place])

    def _missed(
        self, demand: Demand, queue: Queue, seconds: Callable[[int, int], float]
    ) -> Callable[[Candidate], float]:
        """How many requests would pass their targets with a size."""
        sizes, now = self.sizes, demand.turn.now
        owed = owed_to(demand.sequences, demand.decodes, self.targets, now)
        # Those in front of the groups have come, too.
        num_queued = demand.turn.num_queued / self.num_groups
        rate = self.rate(now) * (1 + num_queued / max(1, self.num_recent))
        top, answer = len(sizes) - 1, queue.answer
        token = seconds(top, sizes[top]) / sizes[top]
        coming = Coming(queue.num_more, rate, self.prompt, answer, token)
        ends, total = np.array(queue.ends, float), queue.ends[-1] + queue.more_tokens
        alone = seconds(size_alone(sizes, queue.num_decodes), 0)

        def missed(each: Candidate) -> float:
            p = sizes[each.place] - queue.num_decodes
            steps = Steps(p, seconds(each.place, min(p, total)), alone, each.sized.drain)
            return num_missed(owed, ends, coming, steps)

        return missed


def _cost(each: Candidate) -> float:
    return each.sized.cost
