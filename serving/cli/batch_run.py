"""`shiftjax batch`: a file of requests through the engine that also serves them. No JAX.

A line is OpenAI's (`custom_id`, `method`, `url`, `body`) or plain (`prompt` or `messages` with
fields of either endpoint, and perhaps an `id`). A record of a line with fields that nobody knows
names them in `ignored_fields`. Records keep the order of the lines; each is
written as soon as all before it are, so that what a broken run leaves is a beginning of the whole.
"""

import asyncio
import codecs
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from serving.server.errors import ServeError, internal_error
from serving.server.responses import Writer
from serving.server.service import Service
from shiftjax.options import ConfigError, shown

logger = logging.getLogger(__name__)

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
MAX_ID_CHARACTERS = 256
ID_PREFIX = "batch_req_"  # and the number of the line
RECORD_START = f'{{"id":"{ID_PREFIX}'.encode()  # of every record

Record = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One line that is not blank; `problem` if it cannot be run."""

    number: int  # in the input file, from 1
    name: str  # custom_id or id
    url: str
    body: Any
    problem: str | None = None
    unknown: tuple[str, ...] = ()  # fields beside the body


def read_lines(data: Iterable[bytes]) -> list[Line]:
    """Parse a file; what is wrong with a line is kept with it."""
    lines: list[Line] = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(data, start=1):
        text = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if not text.strip():
            continue
        line = _read_line(number, text)
        if line.name in seen:
            words = f"the id {shown(line.name)} is also that of line {seen[line.name]}"
            line = Line(number, line.name, line.url, None, words)
        seen.setdefault(line.name, number)
        lines.append(line)
    return lines


def _read_line(number: int, text: bytes) -> Line:
    name = f"line-{number}"
    try:
        values = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        return Line(number, name, "", None, f"not JSON: {error}")
    if not isinstance(values, dict):
        return Line(number, name, "", None, "must be a JSON object")
    given = values.pop("custom_id", values.pop("id", name))
    if not (isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARACTERS):
        return Line(number, name, "", None, "custom_id must be text of 1 to 256 characters")
    return _line_of(number, given, values)


def _line_of(number: int, name: str, values: dict[str, Any]) -> Line:
    """OpenAI's line or a plain one."""
    if values.keys().isdisjoint(("method", "url", "body")):
        return Line(number, name, ENDPOINTS["messages" in values], values)
    url, method = values.pop("url", None), values.pop("method", "POST")
    if url not in ENDPOINTS or method != "POST":
        words = f"must be POST to one of {', '.join(ENDPOINTS)}"
        return Line(number, name, "", None, words)
    if "body" not in values:
        return Line(number, name, url, None, "body is missing")
    return Line(number, name, url, values.pop("body"), unknown=tuple(sorted(values)))


# ---------------------------------------------------------------- running


async def run_lines(
    service: Service, lines: Sequence[Line], num_at_once: int
) -> AsyncGenerator[Record]:
    """Records in the order of the lines; never more than so many requests in the engine."""
    waiting: asyncio.Queue[asyncio.Task[Record]] = asyncio.Queue(4 * num_at_once)
    room = asyncio.Semaphore(num_at_once)

    async def one(line: Line) -> Record:
        async with room:
            return await _run_line(service, line)

    async def start() -> None:
        for line in lines:
            await waiting.put(asyncio.create_task(one(line)))

    starter = asyncio.create_task(start())
    try:
        for _ in lines:
            yield await (await waiting.get())
    finally:
        starter.cancel()
        while not waiting.empty():
            waiting.get_nowait().cancel()


async def _run_line(service: Service, line: Line) -> Record:
    record: Record = {"id": f"{ID_PREFIX}{line.number}", "custom_id": line.name}
    if line.problem is not None:
        problem = ServeError("invalid", line.problem)
        return record | {"response": None, "error": problem.body()["error"]}
    try:
        body, ignored = await _answer(service, line)
    except ServeError as error:
        return record | _failure(error)
    except Exception:  # a bug is that line's alone, as it is that request's in a server
        logger.exception("Line %d failed.", line.number)
        return record | _failure(internal_error())
    record |= {"response": {"status_code": 200, "body": body}, "error": None}
    return record | ({"ignored_fields": ignored} if ignored else {})


def _failure(error: ServeError) -> Record:
    response = {"status_code": error.kind.status, "body": error.body()}
    return {"response": response, "error": error.body()["error"]}


async def _answer(service: Service, line: Line) -> tuple[Record, tuple[str, ...]]:
    """The body of the response, and the fields that were ignored. Raises `ServeError`."""
    if line.unknown and service.options.strict:
        raise ServeError("invalid", f"{line.unknown[0]} is not a field of a line.")
    if isinstance(line.body, dict) and line.body.get("stream"):
        raise ServeError("invalid", "stream has no meaning in a batch.", param="stream")
    start = service.chat if line.url == ENDPOINTS[1] else service.complete
    with await start(line.body, f"{ID_PREFIX}{line.number}") as generation:
        for handle in generation.handles:
            await handle.result()
        model, _ = service.running()
        body = Writer(generation, model.tokenizer).response()
    return body, (*line.unknown, *generation.wish.unknown)


# ---------------------------------------------------------------- resuming


def open_output(path: Path, lines: Sequence[Line], resume: bool) -> list[Line]:
    """The lines that `path` lacks; a record that was cut off is removed from it.

    Raises ConfigError for a file that is not of this batch, or that exists without `resume`.
    """
    try:
        if not path.exists() or path.stat().st_size == 0:
            path.touch()
            return list(lines)
        if not resume:
            raise ConfigError([f"{path} exists; --resume continues it, or remove it"])
        done = _repair(path)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    names = {line.number: line.name for line in lines}
    for number, name in done.items():
        if names.get(number) != name:
            raise ConfigError([f"{path} is of another input: it has {shown(name)} at {number}"])
    return [line for line in lines if line.number not in done]


def _repair(path: Path) -> Mapping[int, str]:
    """The id of every line with a record, by number; cuts off a last record that is not whole."""
    done: dict[int, str] = {}
    end = 0
    data = path.read_bytes().splitlines(keepends=True)
    for number, text in enumerate(data, start=1):
        key = _record_key(text)
        if key is None:
            # Only the beginning of a record is ours to remove; another file stays as it is.
            if number < len(data) or not _is_cut_off(text):
                raise ConfigError([f"{path}, line {number}: no record of a batch; not resumed"])
            break
        done[key[0]] = key[1]
        end += len(text)
    with path.open("r+b") as file:
        file.truncate(end)
    return done


def _is_cut_off(text: bytes) -> bool:
    """Whether a line is the beginning of a record."""
    start = text[: len(RECORD_START)]
    return not text.endswith(b"\n") and RECORD_START.startswith(start)


def _record_key(text: bytes) -> tuple[int, str] | None:
    try:
        record = msgspec.json.decode(text)
        number, name = int(record["id"].removeprefix(ID_PREFIX)), record["custom_id"]
    except (
        msgspec.MsgspecError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ):
        return None
    return (number, name) if text.endswith(b"\n") and isinstance(name, str) else None
