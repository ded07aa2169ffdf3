"""The one thread that touches the engine: commands go in, events come out. No text, no JAX."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shiftjax.control.engine import Engine, EngineStats
from shiftjax.control.lane import Lane, poll
from shiftjax.control.request import Event

logger = logging.getLogger(__name__)

Command = Callable[[Engine], list[Event] | None]
MAX_UNDELIVERED = 32  # turns; then the engine waits for the event loop


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the engine brought. `num_commands` counts those obeyed since the start."""

    at: float  # time.monotonic() after it
    events: list[Event]
    stats: EngineStats
    num_commands: int
    steps: tuple[tuple[str, float], ...] = ()  # that ended: mode, seconds
    failure: BaseException | None = None  # the engine is of no more use


class EngineThread:
    """Runs `engine.step` while there is work and hands every turn to `deliver` on the loop.

    Commands run between steps, in their order. A turn that the loop has not taken yet is kept; at
    `MAX_UNDELIVERED` of them the engine pauses, so nothing grows without bound.
    """

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, deliver: Callable[[Turn], None]
    ):
        self.engine = engine
        self.progress_at = time.monotonic()  # when the engine last finished or began something
        self.num_posted = 0  # commands given, written by the loop only
        self._loop, self._deliver = loop, deliver
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._num_obeyed = 0
        self._stats = engine.stats()
        self._turns: deque[Turn] = deque()
        self._has_room = threading.Event()
        self._has_room.set()
        self._is_stopping = False
        engine.wait = self._wait
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to obey commands and to step."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run a command on the engine's thread, soon; what it raises is logged and mended."""
        self.num_posted += 1
        self._commands.put(command)

    def stop(self, timeout: float = 5.0) -> bool:
        """Leave after the step that runs; False if it did not come back in time."""
        self._is_stopping = True
        self._commands.put(None)
        self._has_room.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                events = self._obey()
                self._has_room.wait()
                self._publish(self._turn(events))
        except BaseException as error:
            logger.critical("The engine failed for good.", exc_info=error)
            turn = Turn(time.monotonic(), [], self._stats, self._num_obeyed, failure=error)
            self._publish(turn)

    def _obey(self) -> list[Event]:
        """Run the commands that wait; with nothing else to do, wait for one."""
        events: list[Event] = []
        blocks = not self.engine.has_work()
        while not self._is_stopping:
            try:
                command = self._commands.get(blocks)
            except queue.Empty:
                break
            if blocks:
                self.progress_at = time.monotonic()
            blocks = False
            if command is not None:
                self._num_obeyed += 1
                try:
                    events += command(self.engine) or ()
                except Exception as error:
                    logger.exception("A command to the engine failed.")
                    events += self.engine.mend(error)
        return events

    def _turn(self, events: list[Event]) -> Turn:
        """Step if there is work, and say how things are."""
        steps: tuple[tuple[str, float], ...] = ()
        if self.engine.has_work():
            events += self.engine.step(time.monotonic())
            self.progress_at = self.engine.waits_since(time.monotonic())
            steps = tuple(self.engine.ended_steps)
        self._stats = self.engine.stats()
        return Turn(time.monotonic(), events, self._stats, self._num_obeyed, steps)

    def _wait(self, lanes: Sequence[Lane]) -> None:
        """Until one of these groups has a step ready, or a command may have work for another."""
        poll(
            lambda: (
                self._is_stopping
                or not self._commands.empty()
                or any(lane.is_ready for lane in lanes)
            )
        )

    def _publish(self, turn: Turn) -> None:
        self._turns.append(turn)
        if len(self._turns) >= MAX_UNDELIVERED:
            self._has_room.clear()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain)

    # ------------------------------------------------------------------ on the loop

    def _drain(self) -> None:
        while self._turns:
            turn = self._turns.popleft()
            self._deliver(turn)
        self._has_room.set()
