"""Turns of the event loop: many requests at once leave room in it for those that come first."""

import asyncio
from collections import deque

MOST = 16  # requests that begin in one turn of the loop; each may take a millisecond


class Turns:
    """Lets tasks pass in their order, `MOST` in a turn of the loop; between, all else has its own.

    The loop runs what is ready in the order in which it became so: behind a thousand requests that
    come at once and are refused, a probe of health would wait for all of them.
    """

    def __init__(self) -> None:
        self._num = 0  # that have passed in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def pass_by(self) -> None:
        """Wait for this request's turn: at most `MOST` begin per turn of the event loop."""
        loop = asyncio.get_running_loop()
        if self._num < MOST and not self._waiting:
            self._num += 1
            if self._num == 1:
                loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        self._num = 0
        while self._waiting and self._num < MOST:
            turn = self._waiting.popleft()
            if not turn.done():  # as it is when its task was cancelled
                turn.set_result(None)
                self._num += 1
        if self._num:
            asyncio.get_running_loop().call_soon(self._next)
