"""What a stream says while its requests wait: their place in the queue, as a comment."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from serving.server.handle import RequestHandle
from serving.server.service import Service

FIRST_SECONDS, EVERY_SECONDS = 0.5, 1.0


async def tell_the_wait(
    handles: Sequence[RequestHandle], service: Service, comment: Callable[[str], Awaitable[None]]
) -> None:
    """Write the first request's place now and then, until one of them has news.

    The first comment sends the headers: an error that comes later is an event of the stream.
    """
    _, engine = service.generating()
    news = [asyncio.create_task(handle.has_news()) for handle in handles]
    try:
        seconds = FIRST_SECONDS
        while not (await _first_of(news, seconds)):
            place = await engine.place_of(handles[0])
            if place is not None and not any(task.done() for task in news):
                await comment(f"waiting {msgspec.json.encode(place._asdict()).decode()}")
            seconds = EVERY_SECONDS
    finally:
        for task in news:
            task.cancel()


async def _first_of(tasks: Sequence[asyncio.Task[None]], seconds: float) -> bool:
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)
