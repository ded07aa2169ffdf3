"""What `shiftjax bench serve` does. No JAX."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from serving.bench.client import FAILURES, Target, get, parse_url
from serving.bench.flags import LOADS
from serving.bench.load import Outcome, run_load
from serving.bench.report import errors, open_results, plot, queue_times, summary, write_json
from serving.run.flags import read_secret_lines
from serving.run.progress import print_table
from shiftjax.config import EngineConfig
from shiftjax.core.sampling_params import SamplingParams
from shiftjax.options import ConfigError
from shiftjax.sim.trace import (
    TraceRequest,
    arrival_times,
    load_trace,
    requests_at,
    scale_rate,
    window,
)


def run(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Run the load and report; 1 if a request failed."""
    keys = read_secret_lines("--key-file", arguments.key_file) if arguments.key_file else [None]
    target = parse_url(arguments.url, keys[0])
    requests = _requests(arguments)
    if not requests:
        raise ConfigError(["the load has no requests: more seconds, or a higher rate"])
    open_results(arguments.json, arguments.plots)
    outcome, queue = asyncio.run(_measure(target, requests, arguments))
    row = summary(outcome, arguments.ttft_limit, arguments.tpot_limit) | queue
    failures = errors(outcome)
    print_table("load", row, stderr=arguments.json == "-")
    if failures:
        print_table("errors", failures)
    if arguments.json:
        write_json(arguments.json, row | {"errors": failures})
    if arguments.plots:
        plot(outcome, Path(arguments.plots))
    return 1 if failures else 0


def _requests(arguments: argparse.Namespace) -> list[TraceRequest]:
    is_loop = arguments.clients is not None
    kind = "trace" if arguments.trace else "clients" if is_loop else "rate"
    values = _load(arguments, kind)
    if kind == "trace":
        scaled = scale_rate(load_trace(arguments.trace), values["speed"])
        return window(scaled, 0.0, values["seconds"])
    lengths = values["prompt_tokens"], values["output_tokens"]
    if kind == "clients":
        return [TraceRequest(0.0, *lengths)] * values["requests"]
    rate, cv, seconds, seed = (values[name] for name in ("rate", "cv", "seconds", "load_seed"))
    return requests_at(arrival_times(rate, seconds, cv, seed), *lengths, seed=seed)


def _load(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    """What shapes this kind of load. Raises ConfigError, also for what shapes another."""
    names = {"clients", *(name for load in LOADS.values() for name in load)}
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    values = LOADS[kind] | given
    problems = [
        f"--{_flag(name)} has no meaning for a load of --{kind}"
        for name in sorted(given.keys() - LOADS[kind].keys() - {kind})
    ]
    limits = {name: getattr(arguments, name) for name in ("ttft_limit", "tpot_limit")}
    problems += [
        f"--{_flag(name)} must be more than 0, got {value}"
        for name, value in (values | limits).items()
        if name != "load_seed" and value is not None and not 0 < value < 1e9
    ]
    if problems:
        raise ConfigError(problems)
    return values


def _flag(name: str) -> str:
    return name.replace("_", "-")


async def _measure(
    target: Target, requests: list[TraceRequest], arguments: argparse.Namespace
) -> tuple[Outcome, dict[str, Any]]:
    try:
        _, before = await get(target, "/metrics")
    except FAILURES as error:
        words = getattr(error, "strerror", None) or error
        problem = f"{arguments.url}: no server answers ({words})"
        raise ConfigError([problem]) from None
    outcome = await run_load(target, requests, arguments.served_model, arguments.clients)
    try:
        _, after = await get(target, "/metrics")
    except FAILURES:  # it has gone, as the samples say
        after = b""
    return outcome, queue_times(before, after)
