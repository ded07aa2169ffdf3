"""Lines of a batch through a service: records in their order, one line's trouble its own."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from serving.cli.batch_formats import CHATS, ID_PREFIX, Format, Line, Record
from serving.cli.batch_tally import Tally
from serving.server.errors import ServeError, internal_error
from serving.server.handle import RequestHandle
from serving.server.schema import Wish, read_chat, read_completion
from serving.server.service import Service
from shiftjax.core.request import derive_seed

logger = logging.getLogger(__name__)


async def run_lines(
    service: Service, lines: Sequence[Line], tally: Tally, form: Format, seed: int = 0
) -> AsyncGenerator[Record]:
    """Records in the order of the lines; the tally says how many may be in the engine.

    What a line without a seed draws depends on `seed`, the engine's, and the line's number alone,
    so a run that is resumed goes on with the same draws.
    """
    begun: asyncio.Queue[asyncio.Task[Record]] = asyncio.Queue()

    async def start() -> None:
        for line in lines:
            await tally.room()
            own = derive_seed(seed, line.number)
            begun.put_nowait(asyncio.create_task(_run_line(service, line, tally, form, own)))

    starter = asyncio.create_task(start())
    try:
        for _ in lines:
            yield await (await begun.get())
            tally.written()
    finally:
        starter.cancel()
        while not begun.empty():
            begun.get_nowait().cancel()


async def _run_line(service: Service, line: Line, tally: Tally, form: Format, seed: int) -> Record:
    handles: Sequence[RequestHandle] | None = None
    try:
        if line.problem is not None:
            raise ServeError("invalid", line.problem)
        check_fields(line, service.options.strict)
        name = f"{ID_PREFIX}{line.number}"
        with await service.start(read_wish, line, name, seed=seed) as generation:
            handles = generation.handles
            tally.tokenized(handles)
            for handle in handles:
                with suppress(ServeError):  # the format says what becomes of it
                    await handle.result()
            return form.answer(service, line, generation)
    except ServeError as error:
        return form.failure(line, error)
    except Exception:  # a bug is that line's alone, as it is that request's in a server
        logger.exception("Line %d failed.", line.number)
        return form.failure(line, internal_error())
    finally:
        if handles is None:
            tally.tokenized([])
        tally.line_ended(handles or [])


def read_wish(line: Line) -> Wish:
    """What a line without a problem asks for. Raises `ServeError`."""
    if isinstance(line.body, Wish):
        return line.body
    return (read_chat if line.url == CHATS else read_completion)(line.body)


def check_fields(line: Line, strict: bool) -> None:
    """Refuse with `ServeError` fields that have no meaning for a line."""
    if line.unknown and strict:
        raise ServeError("invalid", f"{line.unknown[0]} is not a field of a line.")
    if isinstance(line.body, dict) and line.body.get("stream"):
        raise ServeError("invalid", "stream has no meaning in a batch.", param="stream")
