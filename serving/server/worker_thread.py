"""A thread that steps what it was given while there is work: commands in, turns out. No JAX."""

import asyncio
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

MAX_UNDELIVERED = 32  # turns; then the thread waits for the event loop


class Works(Protocol):
    """What a thread steps."""

    def has_work(self) -> bool:
        """Whether a step has something to do."""
        ...


class WorkerThread[E: Works, T](ABC):
    """Makes turns while there is work and hands every one of them to `deliver` on the loop.

    Commands run between turns, in their order. A turn that the loop has not taken yet is kept; at
    `MAX_UNDELIVERED` of them the thread pauses, so nothing grows without bound.
    """

    def __init__(
        self, name: str, engine: E, loop: asyncio.AbstractEventLoop, deliver: Callable[[T], None]
    ):
        self.engine = engine
        self.progress_at = time.monotonic()  # when it last finished or began something
        self.num_posted = 0  # commands given, written by the loop only
        self._loop, self._deliver = loop, deliver
        self._commands: queue.SimpleQueue[Callable[[E], Any] | None] = queue.SimpleQueue()
        self._turns: deque[T] = deque()
        self._has_room = threading.Event()
        self._has_room.set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _turn(self) -> T:
        """Step if there is work, and say what came of it and of the commands before it."""

    @abstractmethod
    def _last_turn(self, failure: BaseException) -> T:
        """Say that the thread has ended."""

    def _obey_one(self, command: Callable[[E], Any]) -> None:
        command(self.engine)

    def start(self) -> None:
        """Begin to obey commands and to step."""
        self._thread.start()

    def post(self, command: Callable[[E], Any]) -> None:
        """Run a command on the thread, between turns."""
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
                self._obey()
                self._has_room.wait()
                self._publish(self._turn())
        except BaseException as error:
            logger.critical("The thread %s failed for good.", self._thread.name, exc_info=error)
            self._publish(self._last_turn(error))

    def _obey(self) -> None:
        """Run the commands that wait; with nothing else to do, wait for one."""
        blocks = not self.engine.has_work()
        while not self._is_stopping:
            try:
                command = self._commands.get(blocks)
            except queue.Empty:
                return
            if blocks:
                self.progress_at = time.monotonic()
            blocks = False
            if command is not None:
                self._obey_one(command)

    def _publish(self, turn: T) -> None:
        self._turns.append(turn)
        if len(self._turns) >= MAX_UNDELIVERED:
            self._has_room.clear()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain)

    # ------------------------------------------------------------------ on the loop

    def _drain(self) -> None:
        while self._turns:
            self._deliver(self._turns.popleft())
        self._has_room.set()
