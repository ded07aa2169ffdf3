"""A closed loop of users: each asks, waits for the answer, thinks, and asks again. No JAX.

Benchmarks with a bound on concurrency are such loops without time to think. The load follows the
engine: a slower one is asked less often, and no queue grows beyond the number of users.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from shiftjax.options import shown
from shiftjax.sim.trace import MOST_REQUESTS, TraceRequest

REQUESTS_OF_A_USER = 10  # on average, unless the number of requests is said


@dataclass(frozen=True)
class ClosedLoop(Sequence[TraceRequest]):
    """Requests that `users` take in turn, whoever is free first; moments of arrival do not count.

    A user thinks for `think_seconds` before each request, exponentially distributed by `seed`.
    Without them all users ask at once in the beginning, and again as soon as they have an answer.

    Raises:
        ValueError: there are no users, or less than no seconds.
    """

    requests: tuple[TraceRequest, ...]
    users: int
    think_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_users(self.users)
        think = self.think_seconds
        if type(think) not in (int, float) or not 0 <= think < math.inf:
            raise ValueError(f"think_seconds must be 0 or more, and finite, got {shown(think)}")

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, place: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TraceRequest, ...]: ...
    def __getitem__(self, place: int | slice) -> TraceRequest | tuple[TraceRequest, ...]:
        return self.requests[place]

    def times(self, factor: float) -> "ClosedLoop":
        """The same requests from `factor` times as many users, one at least."""
        return replace(self, users=max(1, round(factor * self.users)))


def closed_loop(requests: Iterable[TraceRequest], users: int, **more: Any) -> ClosedLoop:
    """A loop over the lengths, prefixes and priorities of a trace; `more` as of `ClosedLoop`."""
    return ClosedLoop(tuple(replace(r, arrival_seconds=0.0) for r in requests), users, **more)


def num_requests(users: int, requests: int | None = None) -> int:
    """How many requests are made up for so many users. Raises ValueError for wrong numbers."""
    _check_users(users)
    count = REQUESTS_OF_A_USER * users if requests is None else requests
    if type(count) is not int or not 0 < count <= MOST_REQUESTS:
        raise ValueError(f"there can be 1 to {MOST_REQUESTS:,} requests, not {shown(count)}")
    return count


def _check_users(users: int) -> None:
    if type(users) is not int or not 1 <= users <= MOST_REQUESTS:
        raise ValueError(f"users must be a whole number from 1 on, got {shown(users)}")
