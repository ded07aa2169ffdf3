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


class Option(NamedTuple):
    """A size, and what it costs those who wait, until all that waits is done."""

    tokens: int
    step_seconds: float
    first_token_seconds: float  # until first tokens, summed over prompts, those to come too
    late_seconds: float  # that tokens of decodes come later, summed


class Choice(NamedTuple):
    """The size that was chosen, and the largest and the smallest that there were."""

    chosen: Option
    largest: Option
    smallest: Option
    num_decodes: int
    num_prompts: int
    reason: str

    @property
    def delay(self) -> float:
        """Seconds that a decode does not wait, because the step is no larger."""
        return self.largest.step_seconds - self.chosen.step_seconds

    @property
    def words(self) -> str:
        """The same in a sentence."""
        chosen, largest, smallest = self.chosen, self.largest, self.smallest
        words = f"{chosen.tokens:,} tokens: {1e3 * chosen.step_seconds:.0f} ms"
        if chosen == largest:
            words += ", the largest that there is work for"
        else:
            later = chosen.first_token_seconds / largest.first_token_seconds - 1
            when = "later" if later > 0 else "sooner"
            words += (
                f". {_would_take(largest)}: {self.num_decodes} decodes {1e3 * self.delay:.0f} ms "
                f"later; first tokens come {abs(later):.0%} {when} this way "
                f"(limit {SLACK:.0%} later)"
            )
        if smallest in (chosen, largest):
            return words
        times = smallest.first_token_seconds / chosen.first_token_seconds
        return f"{words}. {_would_take(smallest)}: first tokens {times:.1f} times as late"


def _would_take(option: Option) -> str:
    return f"{option.tokens:,} would take {1e3 * option.step_seconds:.0f} ms"


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
        total, reason = queue.ends[-1] + queue.more_tokens, _reason(found, best)

        def option(each: Candidate) -> Option:
            room = min(sizes[each.place] - queue.num_decodes, total)
            took = queue.depth * seconds(each.place, room)
            return Option(sizes[each.place], took, each.sized.first, each.sized.late)

        options = option(best), option(found[0]), option(found[-1])
        num_decodes = queue.num_decodes + queue.num_others
        self.last = Choice(*options, num_decodes, len(queue.ends) + queue.num_more, reason)
        self.steps[self.last.chosen.tokens, reason] += 1
        self.avoided_seconds += num_decodes * max(0.0, self.last.delay)


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


def plain_choice(choice: Choice) -> dict[str, Any]:
    """A choice as plain data: its sizes, the largest first."""
    sizes = dict.fromkeys((choice.largest, choice.chosen, choice.smallest))
    rows = [each._asdict() | {"is_chosen": each == choice.chosen} for each in sizes]
    rows.sort(key=lambda row: -row["tokens"])
    values = {"num_decodes": choice.num_decodes, "num_prompts": choice.num_prompts}
    return {"reason": choice.reason, "why": REASONS[choice.reason], **values, "sizes": rows}


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
