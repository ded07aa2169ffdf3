"""Batch generation: JSON lines in, a record per line out, in the same order.

    python scripts/generate.py --prompts prompts.jsonl --output out.jsonl --sp 2 --tp 4

An input line is {"prompt": ...} or {"messages": [...]}, with an `id` and fields of SamplingParams
if wanted; the sampling flags are the defaults of lines without them. A line that cannot be run
gives {"id", "line", "error"} in its place. Records are written as soon as all before them are;
--resume continues a run that was cut off.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.cli.batch import (
    Job,
    Record,
    Refused,
    in_order,
    left_to_do,
    parse_jobs,
    repair,
    result_record,
    write_record,
)
from serving.cli.main import guarded
from serving.run.flags import (
    EXIT_CODES,
    UsageParser,
    add_config_flags,
    add_sampling_flags,
    given_sampling,
    parse_args,
    settle,
)
from serving.run.progress import print_table, progress_bars, throughput
from serving.run.start import open_llm
from shiftjax.control.request import RequestError
from shiftjax.options import ConfigError
from shiftjax.settings import dump_yaml
from shiftjax.text.errors import ChatTemplateError

if TYPE_CHECKING:
    from shiftjax.llm import LLM


def main(argv: Sequence[str] | None = None) -> int:
    """Run the batch; exit codes as for `shiftjax`."""
    return guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def make_parser() -> argparse.ArgumentParser:
    """The flags of this script, the settings among them."""
    parser = UsageParser(
        description=__doc__,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--resume", action="store_true", help="do what the output file lacks")
    add_sampling_flags(parser)
    add_config_flags(parser)
    return parser


def _run(argv: list[str]) -> int:
    arguments = parse_args(make_parser(), argv)
    config, _ = settle(arguments)
    if arguments.print_config:
        sys.stdout.write(dump_yaml(config))
        return 0
    entries = _entries(arguments.prompts, arguments.output, arguments.resume, arguments)
    llm = open_llm(config)
    start = time.monotonic()
    try:
        num_tokens, num_errors = _write_all(llm, entries, arguments.output)
    except OSError as error:
        print(f"{arguments.output}: {error.strerror}; --resume continues", file=sys.stderr)
        return 1
    rows = {"lines": len(entries), "errors": num_errors} | llm.stats()
    print_table("summary", rows | throughput(num_tokens, time.monotonic() - start))
    return 0


def _entries(
    prompts: Path, output: Path, resume: bool, arguments: argparse.Namespace
) -> list[Job | Refused]:
    """What is to be done; raises ConfigError for files that cannot be used."""
    try:
        with prompts.open("rb") as file:
            entries = parse_jobs(file, given_sampling(arguments))
        if output.is_dir():
            raise ConfigError([f"{output} is a directory"])
        if not output.exists() or output.stat().st_size == 0:
            output.touch()
            return entries
        if not resume:
            raise ConfigError([f"{output} exists; --resume continues it, or remove it"])
        return left_to_do(entries, repair(output), output)
    except OSError as error:
        raise ConfigError([f"{error.filename}: {error.strerror}"]) from None


def _write_all(llm: "LLM", entries: list[Job | Refused], output: Path) -> tuple[int, int]:
    """Append a record per entry; returns the numbers of sampled tokens and of errors."""
    num_tokens = num_errors = 0
    with output.open("ab") as file, progress_bars() as progress:
        for done, record in enumerate(in_order(run_jobs(llm, entries)), start=1):
            write_record(file, record)
            num_tokens += record.get("usage", {}).get("completion_tokens", 0)
            num_errors += "error" in record
            if progress:
                progress("generating", done, len(entries))
    return num_tokens, num_errors


def run_jobs(llm: "LLM", entries: list[Job | Refused]) -> Iterator[tuple[int, Record]]:
    """(place in `entries`, record) pairs: what is refused first, the others as they finish."""
    accepted: list[tuple[int, Job, list[int]]] = []
    for place, entry in enumerate(entries):
        prepared = _prepare(llm.validate, entry)
        if isinstance(prepared, Refused):
            yield place, prepared.record()
        else:
            accepted.append((place, *prepared))
    prompts = [token_ids for _, _, token_ids in accepted]
    with closing(llm.stream(prompts, [job.sampling for _, job, _ in accepted])) as stream:
        for index, _, output in stream:
            if output is not None:
                place, job, _ = accepted[index]
                yield place, result_record(job, output)


def _prepare(
    validate: Callable[[Any, Any], list[int]], entry: Job | Refused
) -> Refused | tuple[Job, list[int]]:
    """The token ids of a job that the engine would accept."""
    if isinstance(entry, Refused):
        return entry
    try:
        return entry, validate(entry.prompt or entry.messages, entry.sampling)
    except (RequestError, ChatTemplateError, ValueError) as error:
        return Refused(entry.line, entry.id, str(error))


if __name__ == "__main__":
    sys.exit(main())
