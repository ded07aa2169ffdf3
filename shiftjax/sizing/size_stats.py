"""What is told of the sizes of steps with prompts: counters, and the last choice in a sentence.

No JAX.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shiftjax.metric import Metric, counter
from shiftjax.sizing.drain import SLACK, Candidate, Queue

REASONS = {
    "alone": "there was no other size",
    "least": "it costs least",
    "guard": "what costs less would delay first tokens beyond the limit",
    "targets": "more requests keep to their targets",
}


class Choice(NamedTuple):
    """A size, and the largest one there was; seconds of a step."""

    size: int  # tokens
    seconds: float
    largest: int
    largest_seconds: float
    num_decodes: int
    later: float  # the share by which first tokens come later than with the largest size

    @property
    def delay(self) -> float:
        """Seconds that a decode does not wait, because the step is no larger."""
        return self.largest_seconds - self.seconds

    @property
    def words(self) -> str:
        """The same in a sentence."""
        chosen = f"{self.size:,} tokens: {1e3 * self.seconds:.0f} ms"
        if self.size == self.largest:
            return f"{chosen}, the largest that there is work for"
        when = "later" if self.later > 0 else "sooner"
        return (
            f"{chosen}. {self.largest:,} would take {1e3 * self.largest_seconds:.0f} ms: "
            f"{self.num_decodes} decodes {1e3 * self.delay:.0f} ms later; first tokens come "
            f"{abs(self.later):.0%} {when} this way (limit {SLACK:.0%} later)"
        )


@dataclass(slots=True)
class SizeStats:
    """Steps with prompts since the start."""

    steps: Counter[tuple[int, str]] = field(default_factory=Counter)  # by size and reason
    avoided_seconds: float = 0.0  # of delay, over all decodes of these steps
    last: Choice | None = None

    def __add__(self, other: "SizeStats") -> "SizeStats":
        """Return what two groups have counted together."""
        avoided = self.avoided_seconds + other.avoided_seconds
        return SizeStats(self.steps + other.steps, avoided, self.last or other.last)

    def count(
        self,
        sizes: Sequence[int],
        queue: Queue,
        found: Sequence[Candidate],
        best: Candidate,
        seconds: Callable[[int, int], float],
    ) -> None:
        """Count the choice of `best` among what was `found`, the largest first."""
        largest, total = found[0], queue.ends[-1] + queue.more_tokens
        room = [min(sizes[each.place] - queue.num_decodes, total) for each in (best, largest)]
        self.last = Choice(
            sizes[best.place],
            queue.depth * seconds(best.place, room[0]),
            sizes[largest.place],
            queue.depth * seconds(largest.place, room[1]),
            queue.num_decodes + queue.num_others,
            best.sized.first / largest.sized.first - 1,
        )
        self.steps[sizes[best.place], _reason(found, best)] += 1
        self.avoided_seconds += self.last.num_decodes * max(0.0, self.last.delay)


def _reason(found: Sequence[Candidate], best: Candidate) -> str:
    if len(found) == 1:
        return "alone"
    cheaper = [each for each in found if each.sized.cost < best.sized.cost]
    if any(each.keeps for each in cheaper) or not best.keeps:
        return "targets"
    return "guard" if cheaper else "least"


def page_part(stats: SizeStats) -> dict[str, Any]:
    """What the page shows: steps by size, by reason, and the last choice."""
    by_size, by_reason = Counter[int](), Counter[str]()
    for (size, reason), num in stats.steps.items():
        by_size[size] += num
        by_reason[reason] += num
    words = "" if stats.last is None else stats.last.words
    sizes = {str(size): by_size[size] for size in sorted(by_size)}
    return {"steps": sizes, "reasons": dict(by_reason), "last": words}


def metrics(stats: SizeStats | None) -> Iterator[Metric]:
    """Counters; nothing where sizes are not chosen."""
    if stats is None:
        return
    found = {(str(size), why): num for (size, why), num in sorted(stats.steps.items())}
    words = "Steps with prompts, by their size and by what decided it: "
    words += "; ".join(f"{name}: {why}" for name, why in REASONS.items()) + "."
    yield counter("sized_steps", words, found, "tokens", "reason")
    words = "Seconds that decodes would have waited longer in the largest steps, summed over them."
    yield counter("avoided_decode_delay_seconds", words, stats.avoided_seconds)
