"""What `shiftjax batch` does: a file through the engine that also serves, resumable.

Records keep the order of the lines; each is written as soon as all before it are, so that what a
broken run leaves is a beginning of the whole.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from serving.cli.batch_formats import FORMATS, Format, Line, read_lines
from serving.cli.batch_lines import run_lines
from serving.cli.batch_output import has_answer, open_output
from serving.cli.batch_phases import settle_phases
from serving.cli.batch_progress import shown_tally
from serving.cli.batch_tally import Tally
from serving.cli.batch_trial import Failure, failures_of_all, in_words
from serving.run.flags import given_sampling
from serving.run.progress import print_table, throughput
from serving.run.serve import served_model
from serving.run.start import look, open_llm
from serving.server.async_engine import AsyncEngine
from serving.server.service import Service
from serving.stored.appended import append
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.request import SamplingParams
from shiftjax.host_tier.extents import HostBlocks
from shiftjax.options import ConfigError, printable
from shiftjax.phases.resharding import Resharding

if TYPE_CHECKING:
    from shiftjax.llm import LLM

OK, FAILED = 0, 1
QUEUE = 1 << 20  # sequences; a batch bounds itself


def run_batch(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Run a batch file; 1 if all lines fail, or the output cannot be written to the end."""
    form, server = FORMATS[arguments.format], arguments.server
    lines = _read_input(arguments)
    todo = open_output(arguments.output, lines, arguments.resume, form)
    left_out = len(lines) - len(todo)
    if not todo:
        print(f"{arguments.input}: no line is left to run", file=sys.stderr)
        return _code(arguments, left_out) if lines else OK
    files = look(config, server, "generate")
    failures = failures_of_all(todo, files, config, server)
    if failures:
        return _refuse(failures, arguments, form) or _code(arguments, left_out)
    llm = open_llm(settle_phases(config, todo, server), server, files)
    start, counts = time.monotonic(), Counter[str]()
    try:
        asyncio.run(_run(llm, todo, arguments, counts))
    except OSError as error:
        print(f"{arguments.output}: {error.strerror}; --resume continues", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{arguments.output}: interrupted; --resume continues", file=sys.stderr)
        raise
    rows = {"lines": counts["lines"], "errors": counts["errors"]}
    rows |= {"with ignored fields": counts["ignoring"]} if counts["ignoring"] else {}
    rows |= {"left out": left_out} | llm.stats()
    print_table("batch", rows | throughput(counts["tokens"], time.monotonic() - start))
    return OK if counts["errors"] < counts["lines"] else _code(arguments, left_out)


def _code(arguments: argparse.Namespace, left_out: int) -> int:
    """The exit code of a run without an answer: OK only if a run before it had one."""
    if left_out and has_answer(arguments.output):
        return OK
    print(f"{arguments.output}: it has no answer: every line failed", file=sys.stderr)
    return FAILED


def _refuse(failures: Sequence[Failure], arguments: argparse.Namespace, form: Format) -> int:
    """Record lines that cannot be run, and say why; FAILED if the records cannot be written."""
    try:
        with arguments.output.open("ab", buffering=0) as file:
            for line, error in failures:
                append(file, msgspec.json.encode(form.failure(line, error)) + b"\n")
    except OSError as error:
        print(f"{arguments.output}: {error.strerror}; --resume continues", file=sys.stderr)
        return FAILED
    count = f"{len(failures):,} lines, of which none"
    print(f"{arguments.input}: {count} can be run, so no model is loaded:", file=sys.stderr)
    for words in in_words(failures):
        print(printable(words), file=sys.stderr)
    return OK


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
    tally = Tally(len(lines), 2 * llm.deployment.max_num_seqs, tier_tokens(llm.engine))
    engine = AsyncEngine(llm.engine, llm.tokenizer, (*service.observers, tally), limits)
    service.open(served_model(llm, service.options), engine)
    seed = llm.deployment.seed
    try:
        with arguments.output.open("ab", buffering=0) as file, shown_tally(tally):
            async with aclosing(run_lines(service, lines, tally, form, seed)) as records:
                async for record in records:
                    append(file, msgspec.json.encode(record) + b"\n")
                    counts["lines"] += 1
                    counts["errors"] += record.get("error") is not None
                    counts["ignoring"] += "ignored_fields" in record
                    counts["tokens"] += (form.usage(record) or {}).get("completion_tokens", 0)
    finally:
        await service.close()


def tier_tokens(engine: Engine) -> int:
    """Tokens whose KV the host holds between phases; 0: there are none.

    As many tokens of prompts are kept in the engine, so that a phase of prompts fills the host.
    """
    if engine.topology.find(Resharding) is None:
        return 0
    host = engine.lanes[0].scheduler.tables.tier
    assert isinstance(host, HostBlocks)
    return host.memory.num_bytes // host.block_bytes * host.block_size
