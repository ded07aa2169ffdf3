"""A thread that embeds: texts go in, turns come out. No JAX."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from serving.server.worker_thread import WorkerThread
from shiftjax.embed.embed_engine import Embedded, EmbedEngine, EmbedRunner, EmbedStats


class EmbedTurn(NamedTuple):
    """The results and counters of one turn."""

    at: float  # time.monotonic() after it
    results: list[Embedded]
    stats: EmbedStats
    failure: BaseException | None = None  # the thread has ended


class EmbedThread(WorkerThread[EmbedEngine, EmbedTurn]):
    """Runs an `EmbedEngine`."""

    def __init__(
        self,
        runner: EmbedRunner,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[EmbedTurn], None],
    ):
        super().__init__("embed", EmbedEngine(runner), loop, deliver)

    def _turn(self) -> EmbedTurn:
        results = self.engine.step(time.monotonic())
        self.progress_at = time.monotonic()
        return EmbedTurn(self.progress_at, results, self.engine.stats)

    def _last_turn(self, failure: BaseException) -> EmbedTurn:
        return EmbedTurn(time.monotonic(), [], self.engine.stats, failure)
