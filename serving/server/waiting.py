"""Where requests stand in the queue, and about how long they will wait there. No JAX."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from serving.server.handle import RequestHandle

Queue = Sequence[tuple[str, int]]  # requests in their order, with their numbers of sequences

MAX_AGE = 0.25  # seconds for which an answer of the engine does for all who ask
FIRST_SECONDS, EVERY_SECONDS = 0.5, 1.0  # at which a stream tells its place
SHARE = 1 / 16  # of the newest request in the mean


class Place(NamedTuple):
    """The position of a request in the queue, with an estimate of its wait."""

    position: int  # 1: the next
    of: int  # requests that wait
    expected_seconds: float | None  # an estimate; None: nothing has ended that it could rest on


class Waits:
    """Places in the queue. `ask` asks the engine who waits, between two steps."""

    def __init__(self, ask: Callable[[], Awaitable[Queue]]):
        self._ask = ask
        self._lock = asyncio.Lock()  # who comes meanwhile gets the same answer
        self._asked_at = -MAX_AGE
        self._places: dict[str, tuple[int, int]] = {}  # (position, sequences up to there)
        self._service_seconds: float | None = None  # of a request, mean

    def served(self, seconds: float) -> None:
        """Update the mean service time: a request ended `seconds` after its first step."""
        mean = seconds if self._service_seconds is None else self._service_seconds
        self._service_seconds = mean + SHARE * (seconds - mean)

    async def place_of(self, name: str, num_running: int) -> Place | None:
        """The place of a request; None: it does not wait. `num_running` are sequences.

        The estimate is Little's law: as many sequences as run leave in the mean time of one.
        """
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() - self._asked_at >= MAX_AGE:
                self._places, ahead = {}, 0
                for position, (each, num_sequences) in enumerate(await self._ask(), start=1):
                    ahead += num_sequences
                    self._places[each] = position, ahead
                self._asked_at = loop.time()
        if name not in self._places:
            return None
        position, ahead = self._places[name]
        mean = self._service_seconds
        seconds = None if mean is None else round(mean * ahead / max(1, num_running), 3)
        return Place(position, len(self._places), seconds)


async def tell_the_wait(
    handles: Sequence[RequestHandle],
    place_of: Callable[[RequestHandle], Awaitable[Place | None]],
    tell: Callable[[Place], Awaitable[None]],
) -> None:
    """Tell the first request's place now and then, until one of them has news."""
    news = [asyncio.create_task(handle.has_news()) for handle in handles]
    try:
        seconds = FIRST_SECONDS
        while not (await _first_of(news, seconds)):
            place = await place_of(handles[0])
            if place is not None and not any(task.done() for task in news):
                await tell(place)
            seconds = EVERY_SECONDS
    finally:
        for task in news:
            task.cancel()


async def _first_of(tasks: Sequence[asyncio.Task[None]], seconds: float) -> bool:
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)
