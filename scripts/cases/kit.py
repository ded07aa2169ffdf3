"""What cases share: time that was spent, medians, requests, engines for a comparison."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shiftjax.arch.config import ModelConfig
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import make_policy
from shiftjax.core.request import Request, SamplingParams
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.parallel.grid import Group
from shiftjax.settings import compile_cache_dir, make_virtual_devices
from shiftjax.sim.echo import EchoRunner
from shiftjax.weights.random import RandomSource

if TYPE_CHECKING:
    from shiftjax.build import Built

Row = dict[str, Any]
SPENT = ("seconds", "cpu_seconds")
VOCAB_SIZE, BLOCK_SIZE, THRESHOLD = 49_152, 16, 256


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


def greedy(name: str | int, prompt: list[int], num_tokens: int) -> Request:
    """Return a request for exactly so many tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return Request(str(name), prompt, sampling)


def random_engine(model: ModelConfig, **options: Any) -> "Built":
    """Return an engine on virtual devices with random weights."""
    config = EngineConfig.from_options(**options)
    make_virtual_devices(config)
    from shiftjax.build import build

    return build(config, RandomSource(model), lambda *_: None, compile_cache_dir(config))
