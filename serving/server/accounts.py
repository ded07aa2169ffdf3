"""What the engine as a service is bounded by, counts, and reports to. No JAX."""

from dataclasses import dataclass
from typing import Protocol

from serving.server.engine_thread import Turn
from serving.server.errors import ServeError
from serving.server.handle import RequestHandle


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of what the front ends may pile up in front of the engine."""

    max_num_queued_reqs: int = 256  # sequences that wait, over all requests
    max_num_queued_tokens: int = 1 << 20  # of their prompts
    max_buffered_tokens: int = 1 << 14  # generated, and not read by a stream's client
    stall_seconds: float = 10.0  # without a finished step while there is work: no progress


@dataclass
class Counts:
    """What became of requests since the start; `accepted` is the sum of the ends and the open."""

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0


class Observer(Protocol):
    """What metrics and the page want to hear of."""

    def rejected(self, error: ServeError) -> None:
        """A request was refused at the door."""
        ...

    def tokens(self, handle: RequestHandle, index: int, num: int, now: float) -> None:
        """One step brought `num` tokens of a continuation."""
        ...

    def ended(self, handle: RequestHandle, now: float) -> None:
        """A request has ended; `handle.error` says how."""
        ...

    def stepped(self, turn: Turn) -> None:
        """The engine has finished a turn."""
        ...
