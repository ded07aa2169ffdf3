"""Seconds that requests should keep to, by their priority. No JAX."""

import math
from typing import NamedTuple

from shiftjax.options import shown

NONE = "none"


class Target(NamedTuple):
    """Seconds to the first token, and of each later one as a mean of the request; inf: any."""

    ttft: float = math.inf
    tpot: float = math.inf

    def is_met(self, ttft: float | None, tpot: float | None) -> bool:
        """Whether a request that took so long has kept to both; None: it had no such token."""
        return (ttft or 0.0) <= self.ttft and (tpot or 0.0) <= self.tpot


class Targets(NamedTuple):
    """The target of most requests, and of those from a priority on; a deployment's are one."""

    default: Target = Target()
    by_priority: tuple[tuple[int, Target], ...] = ()  # ascending

    def of(self, priority: int) -> Target:
        """Return the target of the requests of a priority."""
        found = self.default
        for least, target in self.by_priority:
            if priority < least:
                break
            found = target
        return found

    @property
    def are_none(self) -> bool:
        """Whether every request may take as long as it likes."""
        return all(each == Target() for each in (self.default, *(t for _, t in self.by_priority)))


NO_TARGETS = Targets()


def make_targets(ttft: float | None, tpot: float | None, by_priority: str | None) -> Targets:
    """Return what the three settings say. Raises ValueError for a text that is wrong."""
    default = Target(ttft or math.inf, tpot or math.inf)
    return Targets(default, parse_classes(by_priority) if by_priority else ())


def parse_classes(text: str) -> tuple[tuple[int, Target], ...]:
    """Return (priority, target) of `1:2.5/0.2,1000:none/none`, ascending. Raises ValueError."""
    found: dict[int, Target] = {}
    for entry in text.split(","):
        priority, _, pair = entry.strip().partition(":")
        wrong = f"must be PRIORITY:TTFT/TPOT, with commas, got {shown(entry)}"
        try:
            ttft, tpot = map(_seconds, pair.split("/"))
            number = int(priority)
        except ValueError:
            raise ValueError(wrong) from None
        if number in found:
            raise ValueError(wrong)
        found[number] = Target(ttft, tpot)
    return tuple(sorted(found.items()))


def _seconds(text: str) -> float:
    if text.strip() == NONE:
        return math.inf
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError("no seconds")
    return seconds
