"""What cases share: options, time that was spent, medians, an engine that makes up tokens."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import make_policy
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.parallel.grid import Group
from shiftjax.sim.echo import EchoRunner

Row = dict[str, Any]
SPENT = ("seconds", "cpu_seconds")
VOCAB_SIZE, BLOCK_SIZE, THRESHOLD = 49_152, 16, 256


def add_options(parser: argparse.ArgumentParser, table: Mapping[str, Any]) -> None:
    """Add the options of a case: name -> default, or (default, help or more keywords).

    A default says the type; False is a switch, a list takes several values, a type has no default.
    """
    for name, given in table.items():
        default, more = given if isinstance(given, tuple) else (given, {})
        one = default[0] if isinstance(default, list) else default
        keywords: Row = {"type": one} if isinstance(one, type) else {"type": type(one)}
        keywords |= {} if isinstance(one, type) else {"default": default}
        keywords |= {"nargs": "+"} if isinstance(default, list) else {}
        keywords = {"action": "store_true"} if default is False else keywords
        keywords |= {"help": more} if isinstance(more, str) else more
        parser.add_argument(name, **keywords)


def spent[T](call: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """Return what a call gives, and the seconds of the clock and of all threads that it took."""
    begin, cpu = time.perf_counter(), time.process_time()
    result = call()
    taken = time.perf_counter() - begin, time.process_time() - cpu
    return result, dict(zip(SPENT, taken, strict=True))


def medians(rows: Iterable[Mapping[str, float]], digits: int = 4) -> dict[str, float]:
    """Return the median of every column; all rows have the same."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: round(statistics.median(each), digits) for name, each in columns.items()}


def compared(rows: Sequence[Row], over: str, under: str) -> Row:
    """Return the medians of `SPENT` by engine, and the median over rounds of over / under.

    Rows have an `engine`, one of the two, and come in the same order for both; those of rounds
    below 0 do not count.
    """
    rows = [row for row in rows if row.get("round", 0) >= 0]
    result: Row = {}
    for what in SPENT:
        values = {name: [r[what] for r in rows if r["engine"] == name] for name in (over, under)}
        ratios = [a / b for a, b in zip(values[over], values[under], strict=True)]
        result[what] = {name: round(statistics.median(each), 4) for name, each in values.items()}
        result[f"ratio_{what}"] = round(statistics.median(ratios), 3)
    return result


def echo_engine(
    runners: Sequence[EchoRunner], num_seqs: int, step_tokens: int, length: int, num_blocks: int
) -> Engine:
    """Return an engine without a model, a group of two devices for each runner.

    A group has `num_blocks` blocks for up to `num_seqs` sequences of up to `length` tokens, and
    steps of `step_tokens`.
    """
    config = SchedulerConfig(num_blocks, BLOCK_SIZE, num_seqs, step_tokens)
    limits = RequestLimits(VOCAB_SIZE, length, (num_blocks - 1) * BLOCK_SIZE)
    lanes = [Lane(Scheduler(config), runner, Group(0, 2).modes) for runner in runners]
    return Engine(lanes, make_policy("threshold", THRESHOLD), limits, clock=time.monotonic)
