"""A thread that embeds: texts go in, turns come out. Several may share one runner. No JAX."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from serving.server.worker_thread import WorkerThread
from shiftjax.embed.engine import Embedded, EmbedEngine, EmbedRunner, EmbedStats


class EmbedTurn(NamedTuple):
    """What one turn of an instance brought."""

    instance: int
    at: float  # time.monotonic() after it
    results: list[Embedded]
    stats: EmbedStats
    failure: BaseException | None = None  # the thread has ended


class EmbedThread(WorkerThread[EmbedEngine, EmbedTurn]):
    """Runs an `EmbedEngine` of its own."""

    def __init__(
        self,
        number: int,
        runner: EmbedRunner,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[EmbedTurn], None],
    ):
        super().__init__(f"embed-{number}", EmbedEngine(runner), loop, deliver)
        self.number = number

    def _turn(self) -> EmbedTurn:
        results = self.engine.step(time.monotonic())
        self.progress_at = time.monotonic()
        return EmbedTurn(self.number, self.progress_at, results, self.engine.stats)

    def _last_turn(self, failure: BaseException) -> EmbedTurn:
        return EmbedTurn(self.number, time.monotonic(), [], self.engine.stats, failure)
