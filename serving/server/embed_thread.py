"""A thread that embeds: texts go in, turns come out. Several may share one runner. No JAX."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from shiftjax.control.embed import Embedded, EmbedEngine, EmbedRunner, EmbedStats

logger = logging.getLogger(__name__)

Command = Callable[[EmbedEngine], None]


class EmbedTurn(NamedTuple):
    """What one turn of an instance brought."""

    instance: int
    at: float  # time.monotonic() after it
    results: list[Embedded]
    stats: EmbedStats
    failure: BaseException | None = None  # the thread has ended


class EmbedThread:
    """Runs an `EmbedEngine` of its own while there is work; `deliver` gets turns on the loop."""

    def __init__(
        self,
        number: int,
        runner: EmbedRunner,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[EmbedTurn], None],
    ):
        self.number = number
        self.progress_at = time.monotonic()  # when it last finished or began something
        self._engine = EmbedEngine(runner)
        self._loop, self._deliver = loop, deliver
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"embed-{number}", daemon=True)
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run a command on the thread, between steps."""
        self._commands.put(command)

    def stop(self, timeout: float = 5.0) -> bool:
        """Leave after the step that runs; False if it did not come back in time."""
        self._is_stopping = True
        self._commands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        failure = None
        try:
            while not self._is_stopping:
                self._obey()
                results = self._engine.step(time.monotonic()) if self._engine.has_work() else []
                self.progress_at = time.monotonic()
                self._publish(results)
        except BaseException as error:
            logger.critical("An instance of the embedder failed for good.", exc_info=error)
            failure = error
        if failure is not None:
            self._publish([], failure)

    def _obey(self) -> None:
        """Run the commands that wait; with nothing else to do, wait for one."""
        blocks = not self._engine.has_work()
        while not self._is_stopping:
            try:
                command = self._commands.get(blocks)
            except queue.Empty:
                return
            if blocks:
                self.progress_at = time.monotonic()
            blocks = False
            if command is not None:
                command(self._engine)

    def _publish(self, results: list[Embedded], failure: BaseException | None = None) -> None:
        now = time.monotonic()
        turn = EmbedTurn(self.number, now, results, self._engine.stats, failure)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, turn)
