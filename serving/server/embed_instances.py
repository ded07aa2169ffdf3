"""Threads that embed, over one runner: which of them gets a text, and what if one stalls. No JAX.

Every text comes out once: what comes late from an instance that was taken out is dropped, because
its texts belong to others by then.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from serving.server.embed_thread import EmbedThread, EmbedTurn
from shiftjax.core.engine import EngineStats
from shiftjax.embed.engine import EmbedEngine, EmbedRunner, EmbedStats, Text

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25  # between looks for instances that stall, while there is work


class Listener(Protocol):
    """Who hears of what comes out, on the loop."""

    def take(self, key: int, embedding: np.ndarray | None, error: str | None) -> None:
        """A text has come out: exactly one of `embedding` `[hidden]` and `error` is not None."""
        ...

    def turned(self, turn: EmbedTurn, before: EmbedStats) -> None:
        """An instance has finished a turn; `before` are its counters until then."""
        ...

    def moved(self, num_texts: int) -> None:
        """Texts of an instance that was taken out went to others."""
        ...

    def lost(self, failure: BaseException) -> None:
        """The last instance has ended."""
        ...


@dataclass(eq=False)
class _Instance:
    """A thread, and what the loop knows of it."""

    thread: EmbedThread
    num_tokens: int = 0  # of texts that it has and that have not come out
    stats: EmbedStats = field(default_factory=EmbedStats)
    is_out: bool = False  # stalled or dead: it gets no texts


@dataclass(eq=False)
class _Pending:
    """A text that has not come out."""

    text: Text
    instance: _Instance
    was_moved: bool = False


class Instances:
    """`number` threads over one runner. All methods are for the loop's thread.

    A text goes to the instance with the fewest outstanding tokens. One that has work and does
    nothing for `stall_seconds` is taken out while there is another, and its texts move on, once.
    """

    def __init__(self, runner: EmbedRunner, number: int, stall_seconds: float, listener: Listener):
        self._listener, self._stall_seconds = listener, stall_seconds
        self._loop = asyncio.get_running_loop()
        self._all = [
            _Instance(EmbedThread(i, runner, self._loop, self._deliver)) for i in range(number)
        ]
        for instance in self._all:
            instance.thread.start()
        self._pending: dict[int, _Pending] = {}
        self._look: asyncio.TimerHandle | None = None

    def put(self, texts: Iterable[Text]) -> None:
        """Embed texts, whose keys are whole numbers that were never used before."""
        entries = []
        for text in texts:
            assert isinstance(text.key, int)
            pending = self._pending[text.key] = _Pending(text, self._least_loaded())
            pending.instance.num_tokens += len(text.token_ids)
            entries.append(pending)
        self._post(entries)
        self._look_later()

    def cancel(self, keys: Iterable[int]) -> None:
        """Forget texts; those that have come out are no matter."""
        left = [pending for key in keys if (pending := self._pending.pop(key, None))]
        for pending in left:
            pending.instance.num_tokens -= len(pending.text.token_ids)
        for instance in {pending.instance for pending in left}:
            _cancel(instance, [each.text.key for each in left if each.instance is instance])

    def _post(self, entries: Sequence[_Pending]) -> None:
        """Hand texts to their instances, with a command for each of these."""
        for instance in self._all:
            texts = [each.text for each in entries if each.instance is instance]
            if texts:
                instance.thread.post(lambda engine, texts=texts: _add(engine, texts))

    def _least_loaded(self) -> _Instance:
        able = [each for each in self._all if not each.is_out] or self._all
        return min(able, key=lambda instance: instance.num_tokens)

    # ------------------------------------------------------------------ from the threads

    def _deliver(self, turn: EmbedTurn) -> None:
        instance = self._all[turn.instance]
        before, instance.stats = instance.stats, turn.stats
        for key, embedding, error, _ in turn.results:
            assert isinstance(key, int)
            pending = self._pending.get(key)
            if pending is None or pending.instance is not instance:
                continue  # cancelled, or another instance's by now
            del self._pending[key]
            instance.num_tokens -= len(pending.text.token_ids)
            self._listener.take(key, embedding, error)
        self._listener.turned(turn, before)
        if turn.failure is not None:
            self._lose(instance, turn.failure)
        elif turn.results and instance.is_out:
            logger.warning("Instance %d of the embedder is back.", turn.instance)
            instance.is_out = False

    # ------------------------------------------------------------------ health

    def _look_later(self) -> None:
        if self._look is None:
            self._look = self._loop.call_later(LOOK_SECONDS, self._look_now)

    def _look_now(self) -> None:
        """Take out what stalls while another instance could do its work."""
        self._look = None
        now = time.monotonic()
        for instance in self._all:
            is_late = now - instance.thread.progress_at > self._stall_seconds
            if instance.num_tokens and is_late and self._others(instance):
                number = instance.thread.number
                logger.error("Instance %d of the embedder stalls: taken out.", number)
                self._take_out(instance)
        if self.has_work:
            self._look_later()

    def _others(self, instance: _Instance) -> list[_Instance]:
        return [each for each in self._all if each is not instance and not each.is_out]

    def _lose(self, instance: _Instance, failure: BaseException) -> None:
        """A thread has ended: its texts go to the others, if there are any."""
        if self._others(instance):
            self._take_out(instance)
        else:
            self._listener.lost(failure)

    def _take_out(self, instance: _Instance) -> None:
        """Give its texts to others; those that were moved before have failed twice, and fail."""
        instance.is_out, instance.num_tokens = True, 0
        mine = [each for each in self._pending.values() if each.instance is instance]
        _cancel(instance, [each.text.key for each in mine])
        again = [each for each in mine if each.was_moved]
        moved = [each for each in mine if not each.was_moved]
        for pending in moved:
            pending.was_moved, pending.instance = True, self._least_loaded()
            pending.instance.num_tokens += len(pending.text.token_ids)
        self._post(moved)
        self._listener.moved(len(moved))
        for pending in again:
            key = pending.text.key
            assert isinstance(key, int)
            del self._pending[key]
            self._listener.take(key, None, "Two instances stalled with this text.")

    @property
    def num_tokens(self) -> int:
        """Tokens of texts that have not come out."""
        return sum(instance.num_tokens for instance in self._all)

    @property
    def has_work(self) -> bool:
        """Whether a text has not come out."""
        return bool(self._pending)

    @property
    def is_alive(self) -> bool:
        """Whether a thread runs."""
        return any(instance.thread.is_alive for instance in self._all)

    @property
    def progress_at(self) -> float:
        """When an instance last did anything, in seconds of `time.monotonic()`."""
        return max(instance.thread.progress_at for instance in self._all)

    @property
    def stats(self) -> EngineStats:
        """Texts that run and wait; there are no modes and no KV blocks."""
        each = [instance.stats for instance in self._all]
        running = min(sum(stats.num_running for stats in each), len(self._pending))
        failed = sum(stats.num_failed_steps for stats in each)
        waiting = len(self._pending) - running
        nothing = {}, 0, 0, 0, {}
        return EngineStats(running, waiting, self.num_tokens, 0.0, {}, {}, failed, *nothing)

    async def close(self) -> bool:
        """Leave the threads; False if a step hangs."""
        if self._look is not None:
            self._look.cancel()
        threads = [instance.thread for instance in self._all if instance.thread.is_alive]
        stops = (self._loop.run_in_executor(None, thread.stop) for thread in threads)
        return all(await asyncio.gather(*stops))


def _add(engine: EmbedEngine, texts: Iterable[Text]) -> None:
    for text in texts:
        engine.add(text)


def _cancel(instance: _Instance, keys: Collection[object]) -> None:
    def forget(engine: EmbedEngine) -> None:
        for key in keys:
            engine.cancel(key)

    if keys:
        instance.thread.post(forget)
