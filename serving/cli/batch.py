"""What `shiftjax batch` does: load a model, run a file, write the records."""

import argparse
import asyncio
import os
import sys
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from io import FileIO
from typing import TYPE_CHECKING

from serving.cli.batch_lines import Line, read_lines
from serving.cli.batch_run import FORMATS, Format, open_output, run_lines, to_text
from serving.run.flags import given_sampling
from serving.run.progress import print_table, progress_bars, throughput
from serving.run.serve import served_model
from serving.run.start import open_llm
from serving.server.async_engine import AsyncEngine
from serving.server.service import Service
from shiftjax.config import EngineConfig
from shiftjax.control.request import SamplingParams
from shiftjax.options import ConfigError

if TYPE_CHECKING:
    from shiftjax.llm import LLM

QUEUE = 1 << 20  # sequences; a batch bounds itself


@dataclass
class Summary:
    """What a run amounts to."""

    lines: int = 0
    errors: int = 0
    ignoring: int = 0  # with fields that were ignored
    tokens: int = 0


def run_batch(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Run a batch file; 1 if the output cannot be written to the end."""
    form = FORMATS[arguments.format]
    lines = _read_input(arguments)
    todo = open_output(arguments.output, lines, arguments.resume, form)
    llm = open_llm(config)
    start, summary = time.monotonic(), Summary()
    try:
        asyncio.run(_run(llm, todo, arguments, summary))
    except OSError as error:
        print(f"{arguments.output}: {error.strerror}; --resume continues", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{arguments.output}: interrupted; --resume continues", file=sys.stderr)
        raise
    rows = {"lines": summary.lines, "errors": summary.errors}
    rows |= {"with ignored fields": summary.ignoring} if summary.ignoring else {}
    rows |= {"left out": len(lines) - len(todo)} | llm.stats()
    print_table("batch", rows | throughput(summary.tokens, time.monotonic() - start))
    return 0


def _read_input(arguments: argparse.Namespace) -> list[Line]:
    """The lines. Raises ConfigError for a file or a flag that cannot be used."""
    defaults = given_sampling(arguments)
    is_plain = arguments.format == "plain"
    if defaults and not is_plain:
        given = ", ".join(defaults)
        raise ConfigError([f"{given}: only lines of --format plain have defaults"])
    try:
        with arguments.input.open("rb") as file:
            return read_lines(file, defaults if is_plain else None)
    except OSError as error:
        raise ConfigError([f"{arguments.input}: {error.strerror}"]) from None


async def _run(
    llm: "LLM", lines: list[Line], arguments: argparse.Namespace, summary: Summary
) -> None:
    service, form = Service(arguments.server), FORMATS[arguments.format]
    limits = replace(service.options, max_num_queued_reqs=QUEUE, max_num_queued_tokens=1 << 40)
    engine = AsyncEngine(llm.engine, llm.tokenizer, service.observers, limits)
    service.open(served_model(llm, service.options), engine)
    num_at_once = 2 * llm.config.scheduler.max_num_seqs
    try:
        with arguments.output.open("ab", buffering=0) as file, progress_bars() as progress:
            async with aclosing(run_lines(service, lines, num_at_once, form)) as records:
                async for record in records:
                    _append(file, to_text(record))
                    _count(summary, record, form)
                    if progress:
                        progress("generating", summary.lines, len(lines))
    finally:
        await service.close()


def _append(file: FileIO, record: bytes) -> None:
    """Write all of a record, or nothing where the disk is full. Raises OSError."""
    end, rest = os.fstat(file.fileno()).st_size, record
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with suppress(OSError):  # a device or a pipe keeps what it has
            file.truncate(end)
        raise


def _count(summary: Summary, record: dict, form: Format) -> None:
    summary.lines += 1
    summary.errors += record.get("error") is not None
    summary.ignoring += "ignored_fields" in record
    usage = form.usage(record)
    summary.tokens += usage["completion_tokens"] if usage else 0
