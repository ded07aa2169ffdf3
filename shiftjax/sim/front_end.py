"""The front end of a server, before its engine: requests are read one after the other. No JAX."""

from shiftjax.core.request import Request
from shiftjax.sim.arrivals import Arrivals


class FrontEnd(Arrivals):
    """Requests as an engine sees them: each `seconds` after the front end could begin with it.

    They still count from when they were sent. What is streamed costs the engine's host time
    (`EngineOverhead.stream_seconds`).
    """

    def __init__(self, sent: Arrivals, seconds: float):
        self._sent, self._seconds = sent, seconds
        self._free_at = 0.0

    @property
    def next_seconds(self) -> float:
        """When the next request has been read."""
        return max(self._sent.next_seconds, self._free_at) + self._seconds

    def take(self) -> Request:
        """The next one; the front end then begins with the one after it."""
        self._free_at = self.next_seconds
        return self._sent.take()

    def ended(self, seconds: float) -> None:
        """A request was answered then, or refused."""
        self._sent.ended(seconds)
