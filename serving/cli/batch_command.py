"""What `shiftjax batch` does: load a model, run a file, write the records."""

import argparse
import asyncio
import os
import sys
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from serving.cli.batch_run import Line, open_output, read_lines, run_lines
from serving.run.progress import print_table, progress_bars, throughput
from serving.run.serve import served_model
from serving.run.start import open_llm
from serving.server.async_engine import AsyncEngine
from serving.server.options import ServerOptions
from serving.server.service import Service
from shiftjax.config import EngineConfig
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


def run_batch(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Run a batch file; 1 if the output cannot be written to the end."""
    lines = _read_input(arguments.input)
    todo = open_output(arguments.output, lines, arguments.resume)
    llm = open_llm(config)
    start, summary = time.monotonic(), Summary()
    try:
        asyncio.run(_run(llm, arguments.server, todo, arguments.output, summary))
    except OSError as error:
        print(f"{arguments.output}: {error.strerror}; --resume continues", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{arguments.output}: interrupted; --resume continues", file=sys.stderr)
        raise
    rows = {"lines": summary.lines, "errors": summary.errors}
    rows |= {"with ignored fields": summary.ignoring} if summary.ignoring else {}
    rows |= {"left out": len(lines) - len(todo)}
    print_table("batch", rows | throughput(summary.tokens, time.monotonic() - start))
    return 0


def _read_input(path: Path) -> list[Line]:
    try:
        with path.open("rb") as file:
            return read_lines(file)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None


async def _run(
    llm: "LLM", options: ServerOptions, lines: list[Line], output: Path, summary: Summary
) -> None:
    service = Service(options)
    unbounded = replace(options, max_num_queued_reqs=QUEUE, max_num_queued_tokens=1 << 40)
    engine = AsyncEngine(llm.engine, llm.tokenizer, service.observers, unbounded)
    service.open(served_model(llm, options), engine)
    num_at_once = 2 * llm.config.scheduler.max_num_seqs
    try:
        with output.open("ab", buffering=0) as file, progress_bars() as progress:
            async with aclosing(run_lines(service, lines, num_at_once)) as records:
                async for record in records:
                    _append(file, msgspec.json.encode(record) + b"\n")
                    _count(summary, record)
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


def _count(summary: Summary, record: dict) -> None:
    summary.lines += 1
    summary.errors += record["error"] is not None
    summary.ignoring += "ignored_fields" in record
    if record["error"] is None:
        summary.tokens += record["response"]["body"]["usage"]["completion_tokens"]
