"""Who comes when in a replay: at given moments, or when a user has an answer. No JAX."""

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import inf

from shiftjax.core.request import Request
from shiftjax.sim.closed_loop import ClosedLoop


class Arrivals(ABC):
    """Requests of a replay, in the order in which they come."""

    @property
    @abstractmethod
    def next_seconds(self) -> float:
        """When the next one comes; `inf`: none does, or none before another has ended."""

    @abstractmethod
    def take(self) -> Request:
        """The next one, which has come."""

    @abstractmethod
    def ended(self, seconds: float) -> None:
        """A request was answered then, or refused."""


class InOrder(Arrivals):
    """At the moments that the requests say, whatever becomes of others."""

    def __init__(self, requests: Iterable[Request]):
        self._coming = iter(requests)
        self._next = next(self._coming, None)

    @property
    def next_seconds(self) -> float:
        """Of the first that was not taken."""
        return inf if self._next is None else self._next.arrival_seconds

    def take(self) -> Request:
        """The next one."""
        found = self._next
        assert found is not None, "nobody comes any more"
        self._next = next(self._coming, None)
        return found

    def ended(self, seconds: float) -> None:
        """Changes nothing."""


class Returning(Arrivals):
    """When one of the loop's users is free, and has thought; `requests` are the loop's."""

    def __init__(self, loop: ClosedLoop, requests: Iterator[Request]):
        self._coming, self._next = requests, next(requests, None)
        self._think = _thinking(loop)
        self._free_at: list[float] = []  # a heap: when each idle user will ask
        for _ in range(loop.users):
            self.ended(0.0)

    @property
    def next_seconds(self) -> float:
        """When the first of the idle users asks."""
        return inf if self._next is None or not self._free_at else self._free_at[0]

    def take(self) -> Request:
        """The next request, from the user who is the first to ask."""
        found = self._next
        assert found is not None, "nobody comes any more"
        self._next = next(self._coming, None)
        return replace(found, arrival_seconds=heapq.heappop(self._free_at))

    def ended(self, seconds: float) -> None:
        """A user is free, and asks after a while."""
        heapq.heappush(self._free_at, seconds + self._think())


def _thinking(loop: ClosedLoop) -> Callable[[], float]:
    """What draws the seconds that a user thinks."""
    if not loop.think_seconds:
        return lambda: 0.0
    rng = random.Random(f"thinking {loop.seed}")
    return lambda: rng.expovariate(1 / loop.think_seconds)
