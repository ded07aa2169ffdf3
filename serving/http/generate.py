"""The generation endpoints: a body in, one response or a stream of server-sent events out."""

import asyncio
import logging
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import msgspec
from starlette.types import Receive, Scope, Send

from serving.http.dialects import Dialect, DialectWriter
from serving.http.guard import read_body, send_json, warning_headers
from serving.server.dialects.asked import renamed
from serving.server.errors import ServeError, internal_error, invalid
from serving.server.handle import Delta
from serving.server.json_body import parse_json
from serving.server.served import Generation
from serving.server.service import Service
from serving.server.waiting import Place, tell_the_wait
from serving.server.write_limit import WriteLimit
from serving.stored.documents import owner_now
from serving.stored.responses import Exchange, Memory, NoMemory

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = b"x-request-timeout"  # seconds
MAX_TIMEOUT = 86400.0
_SECONDS = re.compile(rb"\d+(\.\d*)?([eE][+-]?\d+)?")
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generate:
    """An ASGI endpoint that speaks a dialect."""

    def __init__(self, service: Service, dialect: Dialect, memory: Memory | None = None):
        self._service, self._dialect = service, dialect
        self._memory = memory or NoMemory()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            body = await read_body(scope, receive, self._service.options.max_request_bytes)
            values, timeout = parse_json(body), timeout_of(scope)
            owner, request_id = owner_now(), scope["request_id"]
            exchange = await self._memory.begin(owner, request_id, values)
        except ServeError as error:
            self._service.refuse(error)
            raise
        read, names = self._dialect.read, self._dialect.names
        try:
            generation = await self._service.start(read, exchange.values, request_id, timeout)
        except ServeError as error:
            raise renamed(error, names) from None
        with generation:
            async with watching(receive, generation.cancel):
                if generation.wish.fields.stream:
                    await self._stream(generation, exchange, send, scope.get("abort"))
                else:
                    await self._answer(generation, exchange, send)

    async def _answer(self, generation: Generation, exchange: Exchange, send: Send) -> None:
        for handle in generation.handles:
            await handle.result()
        response = await self._service.write(lambda each: self._writer(each).encoded(), generation)
        await exchange.keep([response])
        await send_json(send, response, headers=_warnings(generation, exchange))

    async def _stream(
        self,
        generation: Generation,
        exchange: Exchange,
        send: Send,
        drop: Callable[[], None] | None,
    ) -> None:
        """Headers are sent with the first news, so that what fails before has its own status."""
        with WriteLimit(lambda: self._service.others_wait_for(generation)) as limit:
            headers = _warnings(generation, exchange)
            out = _EventStream(send, limit, self._dialect, headers, drop)
            await self._write_events(generation, exchange, out)

    async def _write_events(
        self, generation: Generation, exchange: Exchange, out: "_EventStream"
    ) -> None:
        writer = self._writer(generation)
        try:
            async with aclosing(_merged(generation)) as news:
                if generation.wish.fields.timeline:
                    _, engine = self._service.generating()
                    await tell_the_wait(generation.handles, engine.place_of, out.tell_place)
                async for number, deltas in news:
                    await out.write(writer.chunks(number, deltas))
            last = writer.last_chunks()
            await exchange.keep(last)
            await out.write(last)
        except ServeError as error:
            if not out.has_begun:
                raise
            await out.write(writer.failure(error))
        except ConnectionError:
            raise
        except Exception:
            if not out.has_begun:
                raise
            logger.exception("The stream of request %s failed.", generation.id)
            await out.write(writer.failure(internal_error()))
        await out.end()

    def _writer(self, generation: Generation) -> DialectWriter:
        model, _ = self._service.running()
        return self._dialect.writer(generation, model.tokenizer)


def _warnings(generation: Generation, exchange: Exchange) -> list[tuple[bytes, bytes]]:
    return warning_headers((*generation.wish.ignored, *exchange.ignored))


class _EventStream:
    """Writes server-sent events; a client that does not take them in time is dropped."""

    def __init__(
        self,
        send: Send,
        limit: WriteLimit,
        dialect: Dialect,
        headers: list[tuple[bytes, bytes]],
        drop: Callable[[], None] | None,
    ):
        self.has_begun = False
        self._send, self._limit, self._dialect = send, limit, dialect
        self._headers, self._drop = headers, drop

    async def write(self, objects: list[dict]) -> None:
        """Send objects, in one piece. Raises ConnectionError if the client does not read."""
        await self._begin()
        await self._send_body(b"".join(map(self._dialect.event, objects)), True)

    async def tell_place(self, place: Place) -> None:
        """Send a comment, which readers of events pass over. Raises as `write` does.

        The first one sends the headers: an error that comes later is an event of the stream.
        """
        await self._begin()
        body = b": waiting " + msgspec.json.encode(place._asdict()) + b"\n\n"
        await self._send_body(body, True)

    async def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = [*STREAM_HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def end(self) -> None:
        """Send the mark of the end."""
        await self._send_body(self._dialect.end, False)

    async def _send_body(self, body: bytes, more: bool) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": more}
        try:
            await self._limit(self._send(message))
        except TimeoutError:
            if self._drop is not None:
                self._drop()
            raise ConnectionError("The client does not read.") from None


async def _merged(generation: Generation) -> AsyncGenerator[tuple[int, list[Delta]]]:
    """(number of the prompt, deltas) as they come from all handles. Raises the first error."""
    if len(generation.handles) == 1:
        async for deltas in generation.handles[0]:
            yield 0, deltas
        return
    news: asyncio.Queue[tuple[int, list[Delta]] | ServeError | None] = asyncio.Queue(1)

    async def read(number: int) -> None:
        try:
            async for deltas in generation.handles[number]:
                await news.put((number, deltas))
            await news.put(None)
        except ServeError as error:
            await news.put(error)

    tasks = [asyncio.create_task(read(number)) for number in range(len(generation.handles))]
    try:
        num_open = len(tasks)
        while num_open:
            item = await news.get()
            if isinstance(item, ServeError):
                raise item
            num_open -= item is None
            if item is not None:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def watching(receive: Receive, cancel: Callable[[], object]) -> AsyncIterator[None]:
    """Call `cancel` as soon as the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def timeout_of(scope: Scope) -> float | None:
    """Seconds that the client gives, by header."""
    text = dict(scope["headers"]).get(TIMEOUT_HEADER)
    if text is None:
        return None
    seconds = float(text) if _SECONDS.fullmatch(text) else math.nan
    if not 0 <= seconds <= MAX_TIMEOUT:
        raise invalid("x-request-timeout", f"must be a number of seconds up to {MAX_TIMEOUT:g}")
    return seconds
