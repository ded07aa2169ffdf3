"""An embedder as a service on an event loop: requests, deadlines, drain. No JAX.

It stands where `AsyncEngine` stands for a decoder, and has its methods but those of generations.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from serving.server.async_requests import AsyncRequests, Watches
from serving.server.embed_thread import EmbedThread, EmbedTurn
from serving.server.errors import ServeError
from serving.server.options import ServerOptions
from shiftjax.core.limits import RequestLimits
from shiftjax.core.stats import EngineStats
from shiftjax.embed.embed_engine import EmbedEngine, EmbedRunner, EmbedStats, Text

logger = logging.getLogger(__name__)


class EmbedObserver(Watches, Protocol):
    """What metrics and the page want to hear of."""

    def embedded(self, turn: EmbedTurn, before: EmbedStats) -> None:
        """A turn has ended; `before` are the counters until then."""
        ...

    def embedding_ended(self, num_tokens: int, seconds: float, error: ServeError | None) -> None:
        """A request has ended."""
        ...


@dataclass(eq=False)
class Job:
    """A request: its texts' embeddings as they come."""

    name: str
    found: np.ndarray  # [texts, dim] float32
    num_left: int
    future: "asyncio.Future[None]"

    @property
    def is_ended(self) -> bool:
        """Whether its end is known."""
        return self.future.done()

    def fail(self, error: ServeError) -> None:
        """End with an error; does nothing after the end."""
        if not self.future.done():
            self.future.set_exception(error)


class _Place(NamedTuple):
    """The request and the row of its matrix that a text's embedding belongs to."""

    job: Job
    row: int
    num_tokens: int


class AsyncEmbedder(AsyncRequests[Job, EmbedObserver]):
    """Texts go in through `embed` on the event loop, and come back as a matrix.

    `options` say how much may wait. All methods are for the loop's thread.
    """

    def __init__(
        self,
        runner: EmbedRunner,
        vocab_size: int,
        observers: Sequence[EmbedObserver] = (),
        options: ServerOptions | None = None,
    ):
        super().__init__(observers, options)
        longest = runner.shape.widths[-1]
        self.request_limits = RequestLimits(vocab_size, longest, num_kv_tokens=longest)
        self.dim = runner.shape.dim
        self._threads = self._thread = EmbedThread(runner, self._loop, self._deliver)
        self._thread.start()
        self._keys = itertools.count()
        self._places: dict[Hashable, _Place] = {}  # of texts that have not come out
        self._num_tokens = 0  # of these texts
        self._embed_stats = EmbedStats()
        self._num_coming = 0  # requests that are being tokenized

    # ------------------------------------------------------------------ requests

    def check_room(self, num_requests: int, num_tokens: int = 0) -> None:
        """Refuse with `ServeError` what would not fit the queue, or comes at a bad time."""
        self._check_open()
        num_open = self._num_coming + len(self.handles)
        if num_requests and num_open >= self._options.max_num_queued_reqs:
            raise ServeError("queue_full", f"The queue is full: {num_open} requests wait.")
        waiting = self._num_tokens
        if waiting and waiting + num_tokens > self._options.max_num_queued_tokens:
            raise ServeError("queue_full", f"The queue is full: {waiting} tokens wait.")

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Hold a place in the queue for a request whose tokens are not known yet."""
        self.check_room(1)
        self._num_coming += 1
        try:
            yield
        finally:
            self._num_coming -= 1

    async def embed(
        self,
        name: str,
        texts: Sequence[Sequence[int]],
        *,
        priority: int = 0,
        timeout: float | None = None,
        seconds: Sequence[int | None] = (),
    ) -> np.ndarray:
        """Return the embeddings of token ids, float32 `[texts, dim]`; `timeout` in seconds.

        `seconds`: for each that is a pair, the place in its ids where its second text begins.
        Whoever is cancelled while waiting takes the texts that are left with it.
        Raises ServeError: duplicate id, queue full, draining, deadline, a text that failed.
        """
        num_tokens, arrival = sum(map(len, texts)), time.monotonic()
        try:
            self._admit(name, num_tokens)
        except ServeError as error:
            self.refuse(error)
            raise
        found = np.empty((len(texts), self.dim), np.float32)
        job = self.handles[name] = Job(name, found, len(texts), self._loop.create_future())
        self.counts.accepted += 1
        self._quiet.clear()
        keys = [next(self._keys) for _ in texts]
        places = (_Place(job, row, len(ids)) for row, ids in enumerate(texts))
        self._places.update(zip(keys, places, strict=True))
        self._num_tokens += num_tokens
        error: ServeError | None = ServeError("cancelled", "The client closed the request.")
        try:
            rows = zip(keys, texts, seconds or [None] * len(texts), strict=True)
            asked = [Text(key, ids, priority, arrival, second) for key, ids, second in rows]
            self._thread.post(lambda engine: _add(engine, asked))
            async with asyncio.timeout(timeout):
                await job.future
            error = None
            return found
        except TimeoutError:
            error = ServeError("deadline", "The deadline passed before the request was complete.")
            raise error from None
        except ServeError as known:
            error = known
            raise
        finally:
            left = [key for key in keys if self._leave_place(key) is not None]
            if left:
                self._thread.post(lambda engine: _cancel(engine, left))
            self._close(job, num_tokens, time.monotonic() - arrival, error)

    def _admit(self, name: str, num_tokens: int) -> None:
        if name in self.handles:
            words = "There is an unfinished request with this id."
            raise ServeError("duplicate", words, param="request_id")
        self.check_room(1, num_tokens)

    def _close(self, job: Job, num_tokens: int, seconds: float, error: ServeError | None) -> None:
        del self.handles[job.name]
        self._count_end(error)
        self._tell(lambda observer: observer.embedding_ended(num_tokens, seconds, error))
        reason = "finished" if error is None else error.code
        words = "embedding ended: id=%s reason=%s texts=%d tokens=%d"
        logger.info(words, job.name, reason, len(job.found), num_tokens)
        if not self.handles:
            self._quiet.set()

    def abort(self, request_id: str) -> str:
        """End a request from outside; says ABORTED or NOT_FOUND."""
        job = self.handles.get(request_id)
        if job is None:
            return "NOT_FOUND"
        job.fail(ServeError("aborted", "The request was aborted by an administrator."))
        return "ABORTED"

    def _leave_place(self, key: Hashable) -> _Place | None:
        """Stop waiting for a text and return its place; None if it was cancelled."""
        place = self._places.pop(key, None)
        if place is not None:
            self._num_tokens -= place.num_tokens
        return place

    # ------------------------------------------------------------------ from the thread

    def _deliver(self, turn: EmbedTurn) -> None:
        before, self._embed_stats = self._embed_stats, turn.stats
        for key, embedding, error, _ in turn.results:
            place = self._leave_place(key)
            if place is not None:  # else it was cancelled
                self._enter(place, embedding, error)
        self._tell(lambda observer: observer.embedded(turn, before))
        if turn.failure is not None:
            self.lost(turn.failure)

    def _enter(self, place: _Place, embedding: np.ndarray | None, error: str | None) -> None:
        """Store a text's embedding in its request, or fail the request with `error`."""
        job = place.job
        if embedding is None:
            job.fail(ServeError("internal", f"input[{place.row}]: {error}"))
            return
        job.found[place.row] = embedding
        job.num_left -= 1
        if not job.num_left and not job.future.done():
            job.future.set_result(None)

    # ------------------------------------------------------------------ the thread

    @property
    def stats(self) -> EngineStats:
        """Texts that run and wait; there are no modes and no KV blocks."""
        stats = self._embed_stats
        running = min(stats.num_running, len(self._places))
        waiting = len(self._places) - running
        failed = stats.num_failed_steps
        return EngineStats(running, waiting, self._num_tokens, 0.0, {}, {}, failed, {}, 0, 0, {})

    async def _leave(self) -> bool:
        return not self._thread.is_alive or await self._loop.run_in_executor(
            None, self._thread.stop
        )


def _add(engine: EmbedEngine, texts: Sequence[Text]) -> None:
    for text in texts:
        engine.add(text)


def _cancel(engine: EmbedEngine, keys: Sequence[Hashable]) -> None:
    for key in keys:
        engine.cancel(key)
