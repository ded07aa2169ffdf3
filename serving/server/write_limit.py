"""A time limit for each write of a stream that costs nothing per write. No JAX."""

import asyncio
from collections.abc import Awaitable, Callable

WRITE_SECONDS = 30.0  # until a client that does not read is dropped
BUSY_SECONDS = 5.0  # the same while others wait for what it holds


class WriteLimit:
    """Use as a context manager in the task that writes; `await limit(write)` raises TimeoutError.

    One timer looks now and then whether a write has taken more than `WRITE_SECONDS`, or
    `BUSY_SECONDS` while `others_wait`, so a late write ends up to half of the latter later.
    (`asyncio.timeout` around every token's write took a tenth of the server's time.)
    """

    def __init__(self, others_wait: Callable[[], bool] = lambda: False):
        self._others_wait = others_wait
        self._seconds, self._busy_seconds = WRITE_SECONDS, min(WRITE_SECONDS, BUSY_SECONDS)
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the write that runs began
        self._is_late = False

    def __enter__(self) -> "WriteLimit":
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._busy_seconds / 2, self._look)
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()

    async def __call__(self, write: Awaitable[None]) -> None:
        """Await a write."""
        self._since = self._loop.time()
        try:
            await write
        except asyncio.CancelledError:
            if not self._is_late:
                raise
            assert self._task is not None
            self._task.uncancel()
            raise TimeoutError from None
        finally:
            self._since = None

    def _look(self) -> None:
        seconds = 0.0 if self._since is None else self._loop.time() - self._since
        is_busy = seconds >= self._busy_seconds and self._others_wait()
        if is_busy or seconds >= self._seconds:
            assert self._task is not None
            self._is_late = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._busy_seconds / 2, self._look)
