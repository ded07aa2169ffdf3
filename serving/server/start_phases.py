"""What a start does, phase by phase: for the log, /health and /metrics while it lasts. No JAX."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """A part of a start: `done` of `total` pieces. Times are of the clock of its `Phases`."""

    name: str
    done: int
    total: int
    began: float
    counted: float  # when the latest piece was done

    def expected_seconds(self, now: float) -> float | None:
        """Until the phase ends, if its pieces take what they took; None: none is done yet."""
        if not self.done:
            return None
        each, left = (self.counted - self.began) / self.done, self.total - self.done
        # The next piece may take longer than those before: no less is left than all after it.
        return max(each * left - (now - self.counted), each * max(0, left - 1))


class Phases:
    """The phases of one start, in their order; the time between two belongs to the first.

    The thread that starts calls it as the progress of `LLM` and `Embedder`, any thread may read:
    what is read is replaced, never changed. `on_change` hears of every call: the phase that is
    now, and what was before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.seconds: Mapping[str, float] = MappingProxyType({})  # of those that have ended
        self.current: Phase | None = None  # None: not begun, or complete
        self.on_change: Callable[[Phase | None, Phase | None], None] = lambda now, before: None
        self._clock = clock
        self._plan: tuple[str, ...] = ()
        self._before: Mapping[str, float] = {}

    def plan(self, names: Sequence[str], before: Mapping[str, float]) -> None:
        """Say which phases are to come, and the seconds that each took at the last start."""
        self._plan, self._before = tuple(names), before

    def coming(self) -> list[tuple[str, float | None]]:
        """Planned phases that have not begun, each with the seconds that it took at last."""
        begun = {*self.seconds, *([self.current.name] if self.current else [])}
        last = max((i for i, name in enumerate(self._plan) if name in begun), default=-1)
        return [(name, self._before.get(name)) for name in self._plan[last + 1 :]]

    def end_seconds(self) -> float | None:
        """Seconds until the start is complete, if all goes as at the last one; None: unknown."""
        rest, state = [seconds for _, seconds in self.coming()], self.state()
        if state is None or None in rest or not self._before:
            return None
        now = state["expected_seconds"]
        if now is None:
            now = max(0.0, self._before.get(state["phase"], 0.0) - state["phase_seconds"])
        return now + sum(seconds or 0.0 for seconds in rest)

    def __call__(self, name: str, done: int, total: int) -> None:
        """`done` of `total` pieces of a phase are done; with the first call it begins."""
        before, now = self.current, self._clock()
        if before is not None and before.name == name:
            counted = now if done > before.done else before.counted
            self.current = Phase(name, done, total, before.began, counted)
        else:
            self._end(now)
            self.current = Phase(name, done, total, now, now)
        self.on_change(self.current, before)

    def end(self) -> None:
        """The start is complete."""
        before = self.current
        self._end(self._clock())
        self.current = None
        self.on_change(None, before)

    def _end(self, now: float) -> None:
        """Count the seconds of the phase that ends; one that comes back adds to its own."""
        if (phase := self.current) is not None:
            total = self.seconds.get(phase.name, 0.0) + now - phase.began
            self.seconds = MappingProxyType({**self.seconds, phase.name: total})

    def state(self) -> dict[str, Any] | None:
        """The phase that is now, for machines; None: there is no start.

        `expected_seconds` are those until the phase ends, not the start.
        """
        phase, before, now = self.current, sum(self.seconds.values()), self._clock()
        if phase is None:
            return None
        seconds, expected = now - phase.began, phase.expected_seconds(now)
        return {
            "phase": phase.name,
            "done": phase.done,
            "total": phase.total,
            "phase_seconds": round(seconds, 3),
            "seconds": round(before + seconds, 3),
            "expected_seconds": None if expected is None else round(expected, 3),
        }

    def words(self) -> str:
        """Return the current phase of the start with its progress, for logs and messages."""
        state = self.state()
        if state is None:
            return "starting"
        parts = [state["phase"]]
        if state["total"] > 1:
            parts.append(f"{state['done']} of {state['total']}")
        parts.append(f"{state['phase_seconds']:.0f} s so far")
        if (state["expected_seconds"] or 0.0) >= 1.0:
            parts.append(f"about {state['expected_seconds']:.0f} s left")
        return ", ".join(parts)
