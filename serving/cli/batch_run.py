"""A batch through the engine that also serves: a record for every line, resumable. No JAX.

Records keep the order of the lines; each is written as soon as all before it are, so that what a
broken run leaves is a beginning of the whole.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from serving.cli.batch_lines import CHATS, Line
from serving.server.errors import ServeError, internal_error
from serving.server.responses import Writer
from serving.server.schema import Wish, read_chat, read_completion
from serving.server.service import Generation, Service
from shiftjax.control.request import TokenLogprobs
from shiftjax.options import ConfigError, shown
from shiftjax.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger(__name__)

ID_PREFIX = "batch_req_"  # and the number of the line

Record = dict[str, Any]


class Format(NamedTuple):
    """How lines are recorded."""

    refusal: Callable[[Line], Record]  # of a line with a problem
    failure: Callable[[Line, ServeError], Record]
    answer: Callable[[Service, Line, Generation], Record]  # may raise the failure
    key: Callable[[Record], tuple[int, Any]]  # number and name of the line; may raise anything
    start: bytes  # of every record
    usage: Callable[[Record], Record | None]  # tokens of an answer


# ---------------------------------------------------------------- running


async def run_lines(
    service: Service, lines: Sequence[Line], num_at_once: int, form: Format
) -> AsyncGenerator[Record]:
    """Records in the order of the lines; never more than so many requests in the engine."""
    waiting: asyncio.Queue[asyncio.Task[Record]] = asyncio.Queue(4 * num_at_once)
    room = asyncio.Semaphore(num_at_once)

    async def one(line: Line) -> Record:
        async with room:
            return await _run_line(service, line, form)

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


async def _run_line(service: Service, line: Line, form: Format) -> Record:
    if line.problem is not None:
        return form.refusal(line)
    try:
        _check_fields(line, service.options.strict)
        name = f"{ID_PREFIX}{line.number}"
        with await service.start(_reader_of(line), line.body, name) as generation:
            for handle in generation.handles:
                with suppress(ServeError):  # the format says what becomes of it
                    await handle.result()
            return form.answer(service, line, generation)
    except ServeError as error:
        return form.failure(line, error)
    except Exception:  # a bug is that line's alone, as it is that request's in a server
        logger.exception("Line %d failed.", line.number)
        return form.failure(line, internal_error())


def _reader_of(line: Line) -> Callable[[Any], Wish]:
    if isinstance(line.body, Wish):
        return lambda wish: wish
    return read_chat if line.url == CHATS else read_completion


def _check_fields(line: Line, strict: bool) -> None:
    if line.unknown and strict:
        raise ServeError("invalid", f"{line.unknown[0]} is not a field of a line.")
    if isinstance(line.body, dict) and line.body.get("stream"):
        raise ServeError("invalid", "stream has no meaning in a batch.", param="stream")


def to_text(record: Record) -> bytes:
    """A record as a line of the output."""
    return msgspec.json.encode(record) + b"\n"


# ---------------------------------------------------------------- OpenAI's records


def _openai_head(line: Line) -> Record:
    return {"id": f"{ID_PREFIX}{line.number}", "custom_id": line.name}


def _openai_refusal(line: Line) -> Record:
    problem = ServeError("invalid", line.problem or "")
    return _openai_head(line) | {"response": None, "error": problem.body()["error"]}


def _openai_failure(line: Line, error: ServeError) -> Record:
    response = {"status_code": error.kind.status, "body": error.body()}
    return _openai_head(line) | {"response": response, "error": error.body()["error"]}


def _openai_answer(service: Service, line: Line, generation: Generation) -> Record:
    """The server's response; fields that nobody knows are in `ignored_fields`."""
    for handle in generation.handles:
        if handle.error is not None:
            raise handle.error
    model, _ = service.running()
    response = {"status_code": 200, "body": Writer(generation, model.tokenizer).response()}
    record = _openai_head(line) | {"response": response, "error": None}
    ignored = (*line.unknown, *generation.wish.unknown)
    return record | ({"ignored_fields": ignored} if ignored else {})


OPENAI = Format(
    _openai_refusal,
    _openai_failure,
    _openai_answer,
    key=lambda record: (int(record["id"].removeprefix(ID_PREFIX)), record["custom_id"]),
    start=f'{{"id":"{ID_PREFIX}'.encode(),
    usage=lambda record: (record["response"] or {}).get("body", {}).get("usage"),
)


# ---------------------------------------------------------------- plain records


def _plain_failure(line: Line, message: str) -> Record:
    return {"id": line.name, "line": line.number, "error": message}


def _plain_answer(service: Service, line: Line, generation: Generation) -> Record:
    (handle,) = generation.handles
    record = plain_record(line, handle.output)
    if handle.error is not None:
        record.setdefault("error", handle.error.message)
    return record


def plain_record(line: Line, output: RequestOutput) -> Record:
    """All that came for a line; `error` is there if a continuation failed."""
    record: Record = {
        "id": line.name,
        "line": line.number,
        "outputs": [_completion(one) for one in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(one.token_ids) for one in output.outputs),
        },
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_logprobs(entry) for entry in output.prompt_logprobs]
    errors = [one.error for one in output.outputs if one.error]
    return record | {"error": errors[0]} if errors else record


def _completion(output: CompletionOutput) -> Record:
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    record = {name: getattr(output, name) for name in names}
    if output.logprobs is not None:
        record["logprobs"] = [_logprobs(entry) for entry in output.logprobs]
    return record


def _logprobs(entry: TokenLogprobs | None) -> Record | None:
    return None if entry is None else entry._asdict()


PLAIN = Format(
    lambda line: _plain_failure(line, line.problem or ""),
    lambda line, error: _plain_failure(line, error.message),
    _plain_answer,
    key=lambda record: (record["line"], record["id"]),
    start=b'{"id":',
    usage=lambda record: record.get("usage"),
)
FORMATS: Mapping[str, Format] = {"openai": OPENAI, "plain": PLAIN}


# ---------------------------------------------------------------- resuming


def open_output(path: Path, lines: Sequence[Line], resume: bool, form: Format) -> list[Line]:
    """The lines that `path` lacks; a record that was cut off is removed from it.

    Raises ConfigError for a file that is not of this batch, or that exists without `resume`.
    """
    try:
        if path.is_dir():
            raise ConfigError([f"{path} is a directory"])
        if not path.exists() or path.stat().st_size == 0:
            path.touch()
            return list(lines)
        if not resume:
            raise ConfigError([f"{path} exists; --resume continues it, or remove it"])
        done = repair(path, form)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    names = {line.number: line.name for line in lines}
    for number, name in done.items():
        if names.get(number) != name:
            raise ConfigError([f"{path} is of another input: it has {shown(name)} at {number}"])
    return [line for line in lines if line.number not in done]


def repair(path: Path, form: Format) -> dict[int, str]:
    """The id of every line with a record, by number; cuts off a last record that is not whole.

    Raises ConfigError for a file that does not begin with records: it is not ours to continue.
    """
    done: dict[int, str] = {}
    end = 0
    data = path.read_bytes().splitlines(keepends=True)
    for number, text in enumerate(data, start=1):
        key = _record_key(text, form)
        if key is None:
            is_begun = text.startswith(form.start[: len(text)]) and not text.endswith(b"\n")
            if number < len(data) or not (done or is_begun):
                raise ConfigError([f"{path}, line {number}: no record of a batch; not resumed"])
            break
        done[key[0]] = key[1]
        end += len(text)
    with path.open("r+b") as file:
        file.truncate(end)
    return done


def _record_key(text: bytes, form: Format) -> tuple[int, str] | None:
    try:
        number, name = form.key(msgspec.json.decode(text))
    except (
        msgspec.MsgspecError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ):
        return None
    is_whole = text.endswith(b"\n") and isinstance(number, int) and isinstance(name, str)
    return (number, name) if is_whole else None
