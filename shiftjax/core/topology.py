"""Which groups of devices are at work: the seam for what opens and closes them. No JAX."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shiftjax.core.lane import Lane, load_of
from shiftjax.core.request import Request


class Topology:
    """Opens and closes lanes, and says which takes a request. This one keeps all of them open."""

    def __init__(self, lanes: Sequence[Lane]):
        self._every = lanes

    def find[T](self, kind: type[T]) -> T | None:
        """Return this if it is of a kind, else None."""
        return self if isinstance(self, kind) else None

    def turn(
        self, queue: Callable[[int], list[Request]], num_queued: int, num_seen: int, now: float
    ) -> None:
        """Called before every turn of the loop: lanes may be opened and closed.

        `queue(n)` returns the first n requests that no lane has, of `num_queued`; `num_seen` have
        come since the start.
        """

    def idle(self, num_queued: int) -> None:
        """Called when no lane has a step in flight, nor one to launch."""

    def lane_for(self, request: Request) -> Lane | None:
        """Return the lane for a request of the queue, or None if the request has to wait."""
        return min(self._every, key=load_of)

    def has_stepped(self, lane: Lane) -> None:
        """Called when a step of a lane has been committed."""

    def absorbs(self, lane: Lane, error: Exception) -> bool:
        """Return whether the failure of a lane's step is dealt with, so that no request ends."""
        return False

    def lost(self, lane: Lane) -> None:
        """Called when a step has failed: what the pools of a lane's devices held is lost."""

    def drain(self) -> None:
        """Called when the end has begun: lanes that wait for others must not wait any longer."""

    def states(self) -> Iterable[Any]:
        """Return what the lanes are doing, as values for `EngineStats.find`."""
        return ()

    def check(self) -> None:
        """Check what must hold between lanes. Raises RuntimeError at the first breach."""
