"""Explanations of an engine for front ends, which do not wait for a long step. No JAX."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from serving.server.errors import ServeError
from shiftjax.core.engine import Engine
from shiftjax.explain.explanation import explain, page_part

Ask = Callable[[Callable[[Engine], dict[str, Any]]], Future[dict[str, Any]]]
WHOLE_SECONDS, PAGE_SECONDS = 1.0, 0.1  # that the engine's thread has, before an older one is told
MAX_AGE = 0.25  # seconds for which an answer does for all who ask


class Explanations:
    """What the thread of an engine tells between steps; `ask` runs a function there."""

    def __init__(self, ask: Ask):
        self._whole = _Answers(lambda: ask(lambda engine: explain(engine, time.monotonic())))
        self._page = _Answers(lambda: ask(lambda engine: page_part(engine, time.monotonic())))

    async def whole(self) -> dict[str, Any]:
        """All of it, see `explain`. Raises ServeError: the engine's first step takes long."""
        told = await self._whole.get(WHOLE_SECONDS)
        if told is None:
            raise ServeError("busy", "A step takes long; ask again when it has ended.")
        return told

    async def page(self) -> dict[str, Any] | None:
        """What the page shows of it; None: nothing yet."""
        return await self._page.get(PAGE_SECONDS)


class _Answers:
    def __init__(self, ask: Callable[[], Future[dict[str, Any]]]):
        self._ask = ask
        self._asked: asyncio.Future[dict[str, Any]] | None = None
        self._last: dict[str, Any] | None = None
        self._told_at = -MAX_AGE

    async def get(self, patience: float) -> dict[str, Any] | None:
        """A new answer, or after so many seconds the last one; who comes meanwhile gets the same.

        Raises what making it raised.
        """
        now = asyncio.get_running_loop().time
        if now() - self._told_at < MAX_AGE:
            return self._last
        asked = self._asked = self._asked or asyncio.wrap_future(self._ask())
        await asyncio.wait([asked], timeout=patience)
        if asked.done():
            if self._asked is asked:
                self._asked = None
            self._last, self._told_at = asked.result(), now()
        return self._last
