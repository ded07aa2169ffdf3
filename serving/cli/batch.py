"""What `shiftjax batch` does: a file through the engine that also serves, resumable.

Records keep the order of the lines; each is written as soon as all before it are, so that what a
broken run leaves is a beginning of the whole.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from serving.cli.batch_formats import CHATS, FORMATS, ID_PREFIX, Format, Line, Record, read_lines
from serving.cli.batch_output import append, open_output
from serving.run.flags import given_sampling
from serving.run.progress import print_table, shown_progress, throughput
from serving.run.serve import served_model
from serving.run.start import open_llm
from serving.server.async_engine import AsyncEngine
from serving.server.errors import ServeError, internal_error
from serving.server.schema import Wish, read_chat, read_completion
from serving.server.service import Service
from shiftjax.config import EngineConfig
from shiftjax.control.request import SamplingParams, derive_seed
from shiftjax.options import ConfigError

if TYPE_CHECKING:
    from shiftjax.llm import LLM

logger = logging.getLogger(__name__)

QUEUE = 1 << 20  # sequences; a batch bounds itself


def run_batch(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Run a batch file; 1 if the output cannot be written to the end."""
    form = FORMATS[arguments.format]
    lines = _read_input(arguments)
    todo = open_output(arguments.output, lines, arguments.resume, form)
    llm = open_llm(config, arguments.server)
    start, counts = time.monotonic(), Counter[str]()
    try:
        asyncio.run(_run(llm, todo, arguments, counts))
    except OSError as error:
        print(f"{arguments.output}: {error.strerror}; --resume continues", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{arguments.output}: interrupted; --resume continues", file=sys.stderr)
        raise
    rows = {"lines": counts["lines"], "errors": counts["errors"]}
    rows |= {"with ignored fields": counts["ignoring"]} if counts["ignoring"] else {}
    rows |= {"left out": len(lines) - len(todo)} | llm.stats()
    print_table("batch", rows | throughput(counts["tokens"], time.monotonic() - start))
    return 0


def _read_input(arguments: argparse.Namespace) -> list[Line]:
    """The lines. Raises ConfigError for a file or a flag that cannot be used."""
    defaults = given_sampling(arguments)
    if defaults and arguments.format != "plain":
        given = ", ".join(defaults)
        raise ConfigError([f"{given}: only lines of --format plain have defaults"])
    try:
        with arguments.input.open("rb") as file:
            return read_lines(file, FORMATS[arguments.format], defaults)
    except OSError as error:
        raise ConfigError([f"{arguments.input}: {error.strerror}"]) from None


async def _run(
    llm: "LLM", lines: list[Line], arguments: argparse.Namespace, counts: Counter[str]
) -> None:
    service, form = Service(arguments.server), FORMATS[arguments.format]
    limits = replace(service.options, max_num_queued_reqs=QUEUE, max_num_queued_tokens=1 << 40)
    engine = AsyncEngine(llm.engine, llm.tokenizer, service.observers, limits)
    service.open(served_model(llm, service.options), engine)
    num_at_once, seed = 2 * llm.config.scheduler.max_num_seqs, llm.config.model.seed
    try:
        with arguments.output.open("ab", buffering=0) as file, shown_progress() as progress:
            async with aclosing(run_lines(service, lines, num_at_once, form, seed)) as records:
                async for record in records:
                    append(file, msgspec.json.encode(record) + b"\n")
                    counts["lines"] += 1
                    counts["errors"] += record.get("error") is not None
                    counts["ignoring"] += "ignored_fields" in record
                    counts["tokens"] += (form.usage(record) or {}).get("completion_tokens", 0)
                    progress("generating", counts["lines"], len(lines))
    finally:
        await service.close()


# ---------------------------------------------------------------- running


async def run_lines(
    service: Service, lines: Sequence[Line], num_at_once: int, form: Format, seed: int = 0
) -> AsyncGenerator[Record]:
    """Records in the order of the lines; never more than so many requests in the engine.

    What a line without a seed draws depends on `seed`, the engine's, and the line's number alone,
    so a run that is resumed goes on with the same draws.
    """
    waiting: asyncio.Queue[asyncio.Task[Record]] = asyncio.Queue(4 * num_at_once)
    room = asyncio.Semaphore(num_at_once)

    async def one(line: Line) -> Record:
        async with room:
            return await _run_line(service, line, form, derive_seed(seed, line.number))

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


async def _run_line(service: Service, line: Line, form: Format, seed: int) -> Record:
    if line.problem is not None:
        return form.failure(line, ServeError("invalid", line.problem))
    try:
        _check_fields(line, service.options.strict)
        name = f"{ID_PREFIX}{line.number}"
        reader = read_chat if line.url == CHATS else read_completion
        read = (lambda wish: wish) if isinstance(line.body, Wish) else reader
        with await service.start(read, line.body, name, seed=seed) as generation:
            for handle in generation.handles:
                with suppress(ServeError):  # the format says what becomes of it
                    await handle.result()
            return form.answer(service, line, generation)
    except ServeError as error:
        return form.failure(line, error)
    except Exception:  # a bug is that line's alone, as it is that request's in a server
        logger.exception("Line %d failed.", line.number)
        return form.failure(line, internal_error())


def _check_fields(line: Line, strict: bool) -> None:
    if line.unknown and strict:
        raise ServeError("invalid", f"{line.unknown[0]} is not a field of a line.")
    if isinstance(line.body, dict) and line.body.get("stream"):
        raise ServeError("invalid", "stream has no meaning in a batch.", param="stream")
