"""Benchmarks, one case at a time.

    python scripts/bench.py                    the cases
    python scripts/bench.py CASE --help        what a case measures, and its options
    python scripts/bench.py CASE [options] [--out FILE]

A case is a module of `scripts/cases` or `scripts/labs` with a table `OPTIONS` (`option_table.py`)
and a function `measure(arguments)`, which yields rows as they are measured and returns what they
come to. Rows of a round below 0 warm up and are dropped. Rows are printed as lines of JSON, then a
table for people; the last line is JSON: the case, its options, the machine, and the result, or else
the rows. `--out` appends the lines to a file. The exit code is 1 if the result has `failures`.
"""

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Generator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from cases.machine import describe_machine
from option_table import add_options

from serving.cli.main import guarded
from serving.run.progress import print_table
from shiftjax.sim.experiments import as_text

Row = dict[str, Any]
NAMES = (
    *("throughput", "speculation", "embeddings", "overhead", "mesh", "fleet", "phases"),
    *("two_hosts", "host", "host_tier", "kv_events", "loads", "soak", "router", "forced_calls"),
    *("step_sizes", "lost_host", "disk_tier"),
)
CASES = {name: f"cases.{name}" for name in NAMES}
LABS = "call", "four_bits", "kv_positions", "lora", "numerics", "swiftkv"  # research
CASES |= {name: f"labs.{name}" for name in LABS}


def main(words: Sequence[str] | None = None) -> int:
    """Run a case, or say which there are; the exit codes are those of `shiftjax`."""
    words = sys.argv[1:] if words is None else words
    if words and words[0] in CASES:
        return guarded(lambda: run(words[0], words[1:]))
    for name in CASES:
        print(f"{name:14} {first_line(name)}")
    return 2 if words and not words[0].startswith("-") else 0


def first_line(name: str) -> str:
    """Return what a case measures, without importing it."""
    file = Path(__file__).parent / f"{CASES[name].replace('.', '/')}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def run(name: str, words: Sequence[str]) -> int:
    """Measure and report."""
    case = importlib.import_module(CASES[name])
    parser = argparse.ArgumentParser(
        prog=f"bench.py {name}",
        description=case.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, case.OPTIONS)
    parser.add_argument("--out", type=Path, help="a file to append the lines of JSON to")
    arguments = parser.parse_args(words)
    rows, result = all_of(case.measure(arguments))
    if result:
        print_table(name, result, stderr=False)
    else:
        print("\n".join(as_text(list(some)) for _, some in groupby(rows, key=tuple)))
    flags = {flag: value for flag, value in vars(arguments).items() if flag != "out"}
    last = {"benchmark": name, "flags": flags} | result | {"machine": describe_machine()}
    if arguments.out:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.writelines(as_line(row) + "\n" for row in (*rows, last))
    print(as_line(last if result else last | {"rows": rows}))
    return int(bool(result.get("failures")))


def all_of(measured: Generator[Row, None, Row | None]) -> tuple[list[Row], Row]:
    """Return the rows of a case, printed as they come, and what they come to."""
    rows: list[Row] = []
    while True:
        try:
            row = next(measured)
        except StopIteration as end:
            return rows, end.value or {}
        if row.get("round", 0) >= 0:
            rows.append(row)
            print(as_line(row), flush=True)


def as_line(row: Row) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(row, default=str)


if __name__ == "__main__":
    sys.exit(main())
