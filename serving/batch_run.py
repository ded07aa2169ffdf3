"""`shiftjax batch`: a file of requests through the engine that also serves them. No JAX.

A line is OpenAI's (`custom_id`, `method`, `url`, `body`) or plain (`prompt` or `messages` with
fields of either endpoint, and perhaps an `id`). Records keep the order of the lines; each is
written as soon as all before it are, so that what a broken run leaves is a beginning of the whole.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from serving.errors import ServeError
from serving.http.responses import Writer
from serving.service import Service
from shiftjax.options import ConfigError, shown

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
MAX_ID_CHARACTERS = 256
ID_PREFIX = "batch_req_"  # and the number of the line

Record = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One line that is not blank; `problem` if it cannot be run."""

    number: int  # in the input file, from 1
    name: str  # custom_id or id
    url: str
    body: Any
    problem: str | None = None


def read_lines(data: Iterable[bytes]) -> list[Line]:
    """Parse a file; what is wrong with a line is kept with it."""
    lines: list[Line] = []
    seen: dict[str, int] = {}
    for number, text in enumerate(data, start=1):
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
    if "body" not in values:
        url = ENDPOINTS["messages" in values]
        return Line(number, given, url, values)
    url, method = values.get("url"), values.get("method", "POST")
    if url not in ENDPOINTS or method != "POST":
        words = f"must be POST to one of {', '.join(ENDPOINTS)}"
        return Line(number, given, "", None, words)
    return Line(number, given, url, values["body"])


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
        if isinstance(line.body, dict) and line.body.get("stream"):
            raise ServeError("invalid", "stream has no meaning in a batch.", param="stream")
        start = service.chat if line.url == ENDPOINTS[1] else service.complete
        with await start(line.body, f"{ID_PREFIX}{line.number}") as generation:
            for handle in generation.handles:
                await handle.result()
            model, _ = service.running()
            body = Writer(generation, model.tokenizer).response()
    except ServeError as error:
        response = {"status_code": error.kind.status, "body": error.body()}
        return record | {"response": response, "error": error.body()["error"]}
    return record | {"response": {"status_code": 200, "body": body}, "error": None}


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
            if number < len(data):
                raise ConfigError([f"{path}, line {number}: no record of a batch; not resumed"])
            break
        done[key[0]] = key[1]
        end += len(text)
    with path.open("r+b") as file:
        file.truncate(end)
    return done


def _record_key(text: bytes) -> tuple[int, str] | None:
    try:
        record = msgspec.json.decode(text)
        number, name = int(record["id"].removeprefix(ID_PREFIX)), record["custom_id"]
    except (msgspec.MsgspecError, TypeError, KeyError, ValueError, AttributeError):
        return None
    return (number, name) if text.endswith(b"\n") and isinstance(name, str) else None
