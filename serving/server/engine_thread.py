"""The one thread that touches the engine: commands go in, events come out. No text, no JAX."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.server.worker_thread import WorkerThread
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane, poll
from shiftjax.core.request import Event
from shiftjax.core.stats import EndedStep, EngineStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the engine brought. `num_commands` counts those obeyed since the start."""

    at: float  # time.monotonic() after it
    events: list[Event]
    stats: EngineStats
    num_commands: int
    steps: tuple[EndedStep, ...] = ()
    failure: BaseException | None = None  # the engine is of no more use


class EngineThread(WorkerThread[Engine, Turn]):
    """Runs `engine.step`; a command may return events, and what it raises is logged and mended."""

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, deliver: Callable[[Turn], None]
    ):
        super().__init__("engine", engine, loop, deliver)
        self._num_obeyed = 0
        self._events: list[Event] = []  # of commands since the last turn
        self._stats = engine.stats()
        self.after_turn: Callable[[], None] = lambda: None  # what it calls never waits
        engine.wait = self._wait

    def _obey_one(self, command: Callable[[Engine], list[Event] | None]) -> None:
        self._num_obeyed += 1
        try:
            self._events += command(self.engine) or ()
        except Exception as error:
            logger.exception("A command to the engine failed.")
            self._events += self.engine.mend(error)

    def _turn(self) -> Turn:
        events, self._events = self._events, []
        steps: tuple[EndedStep, ...] = ()
        if self.engine.has_work():
            events += self.engine.step(time.monotonic())
            self.progress_at = self.engine.waits_since(time.monotonic())
            steps = tuple(self.engine.ended_steps)
        self.after_turn()
        self._stats = self.engine.stats()
        return Turn(time.monotonic(), events, self._stats, self._num_obeyed, steps)

    def _last_turn(self, failure: BaseException) -> Turn:
        return Turn(time.monotonic(), [], self._stats, self._num_obeyed, failure=failure)

    def _wait(self, lanes: Sequence[Lane]) -> None:
        """Until one of these groups has a step ready, or a command may have work for another."""
        poll(
            lambda: (
                self._is_stopping
                or not self._commands.empty()
                or any(lane.is_ready for lane in lanes)
            )
        )
