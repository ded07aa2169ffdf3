"""What requests of all kinds have in common on the event loop: counts, health, drain. No JAX."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from serving.server.errors import ServeError
from serving.server.options import ServerOptions

logger = logging.getLogger(__name__)

CANCELS = ("cancelled", "aborted", "slow_reader", "deadline")


@dataclass
class Counts:
    """What became of requests since the start; `accepted` is the sum of the ends and the open."""

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0


class Open(Protocol):
    """A request whose end has not been delivered yet."""

    @property
    def is_ended(self) -> bool:
        """Whether there is nothing left to do but to hand it over."""
        ...

    def fail(self, error: ServeError, /) -> None:
        """End with an error; does nothing after the end."""
        ...


class Threads(Protocol):
    """The threads that run steps."""

    @property
    def is_alive(self) -> bool:
        """Whether a thread is running."""
        ...

    @property
    def progress_at(self) -> float:
        """When a thread last made progress, in seconds of `time.monotonic()`."""
        ...


class Watches(Protocol):
    """The event that every observer handles."""

    def rejected(self, error: ServeError) -> None:
        """Called when a request is refused before it is accepted."""
        ...


class AsyncRequests[H: Open, O: Watches](ABC):
    """Open requests by id, and the threads behind them. All methods are for the loop's thread."""

    _threads: Threads  # each kind has its own

    def __init__(self, observers: Sequence[O], options: ServerOptions | None):
        self.counts = Counts()
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        self.handles: dict[str, H] = {}
        self.is_leaving = False  # the end is near: nobody should send more
        self.is_draining = False  # it has begun: nothing more is taken
        self._options = options or ServerOptions()
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._quiet = asyncio.Event()  # no request is open
        self._quiet.set()

    @abstractmethod
    async def _leave(self) -> bool:
        """End the threads; False if a step hangs."""

    # ------------------------------------------------------------------ requests

    def refuse(self, error: ServeError) -> None:
        """Count a request that was refused."""
        self.counts.rejected += 1
        self._tell(lambda observer: observer.rejected(error))

    def _check_open(self) -> None:
        """Refuse with `ServeError` what comes at a bad time."""
        if self.failure is not None:
            raise ServeError("restarting", "The engine has failed and is being restarted.")
        if self.is_draining:
            raise ServeError("draining", "The server is shutting down and takes no new requests.")

    def _count_end(self, error: ServeError | None) -> None:
        is_cancel = error is not None and error.kind_name in CANCELS
        self.counts.finished += error is None
        self.counts.cancelled += is_cancel
        self.counts.failed += error is not None and not is_cancel

    def _tell(self, tell: Callable[[O], None]) -> None:
        """Tell the observers; what goes wrong there is no request's fault."""
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:
                logger.exception("Counting failed.")

    def _end_all(self, kind: str, message: str) -> None:
        for handle in list(self.handles.values()):
            handle.fail(ServeError(kind, message))

    def lost(self, failure: BaseException) -> None:
        """End everything: no thread is left to do the work."""
        if self.failure is not None:
            return
        self.failure = failure
        self._end_all("restarting", "The engine failed; the request did not finish.")
        if self.on_failure is not None:
            self.on_failure()

    # ------------------------------------------------------------------ health

    @property
    def is_ready(self) -> bool:
        """Whether new requests are welcome."""
        return self.failure is None and not self.is_leaving and self._threads.is_alive

    def stalled_seconds(self) -> float:
        """How long unfinished requests have waited for a step; 0 if there are none."""
        is_busy = any(not handle.is_ended for handle in self.handles.values())
        return max(0.0, self.last_step_age) if is_busy else 0.0

    @property
    def makes_progress(self) -> bool:
        """Whether steps finish, if there is work."""
        return self.stalled_seconds() < self._options.stall_timeout

    @property
    def last_step_age(self) -> float:
        """Seconds since anything was last done."""
        return time.monotonic() - self._threads.progress_at

    # ------------------------------------------------------------------ the end

    def stop_accepting(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        self.is_leaving = self.is_draining = True

    async def drain(self, timeout: float) -> bool:
        """Wait for the requests in flight; after `timeout` end the rest. False if there were any.

        What is cut short ends with SERVER_DRAINING, a stream after the text that it had.
        """
        self.stop_accepting()
        try:
            async with asyncio.timeout(timeout):
                await self._quiet.wait()
            return True
        except TimeoutError:
            self._stop_all()
            return False

    async def close(self) -> bool:
        """End everything and leave the threads; False if a step hangs."""
        self.stop_accepting()
        self._stop_all()
        return await self._leave()

    def _stop_all(self) -> None:
        self._end_all("draining", "The server shut down before the request ended.")
