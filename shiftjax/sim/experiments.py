"""Comparisons and sweeps of deployments on a modelled machine: rows for files and reports."""

import csv
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import ALIASES, FORMATS, PACKED, formats_of
from shiftjax.config import EngineConfig
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.resolve import formats_in
from shiftjax.options import ConfigError, shown, unknown_name
from shiftjax.parallel.stored import with_packed_codes
from shiftjax.sim.closed_loop import ClosedLoop, closed_loop, num_requests
from shiftjax.sim.drafts import AcceptanceModel
from shiftjax.sim.hindsight import ORACLE, Oracle, best_in_hindsight, oracle_of
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.models import find_model
from shiftjax.sim.named import Phases, RoleSplit, deploy_named
from shiftjax.sim.replay import Replay, replay
from shiftjax.sim.replay_metrics import makespan, summary
from shiftjax.sim.trace import (
    TraceRequest,
    arrival_times,
    load_trace,
    on_off_times,
    requests_at,
    scale_rate,
)
from shiftjax.sim.trace import window as cut_window

CLOSED = "closed"  # users who ask again when they have an answer
OF_USERS = ("users", "think_seconds")  # of a closed loop, whatever has the lengths of its requests
SYNTHETIC: Mapping[str, Callable[..., list[float]]] = {
    "poisson": lambda rate, seconds, seed=0: arrival_times(rate, seconds, seed=seed),
    "gamma": lambda rate, cv, seconds, seed=0: arrival_times(rate, seconds, cv, seed),
    "on_off": on_off_times,
    CLOSED: lambda users, requests=None, think_seconds=0.0, seed=0: (
        [0.0] * num_requests(users, requests)
    ),
}
"""Moments of arrival; the other arguments of a synthetic trace are those of `requests_at`."""


def target_from(options: Mapping[str, Any]) -> Target:
    """A target from names: model, machine, hosts, engine, dtype, kv_cache_dtype.

    By default a model's matrices are what its checkpoint has, as the engine's are.

    Raises ConfigError for unknown ones, and for an encoder: no mesh splits it.
    """
    dtype = options.get("dtype") or "auto"
    kv = options.get("kv_cache_dtype") or "auto"
    kv = ALIASES.get(kv, kv)
    wrong = [name for name in (dtype, kv) if name not in (*FORMATS, "auto")]
    if kv in PACKED:
        raise ConfigError([f"kv_cache_dtype {kv!r} is of weights alone: use fp8"])
    if wrong:
        raise ConfigError([f"dtype {wrong[0]!r} is none of {', '.join(FORMATS)}"])
    model = find_model(options["model"])
    if model.encoder is not None:
        words = "is an encoder, which every device holds whole: there is no mesh to plan"
        raise ConfigError([f"{model.name} {words}; `shiftjax check` says what it takes"])
    formats = formats_of(dtype, kv)
    if dtype in PACKED:
        model = with_packed_codes(model, dtype)
    if dtype == "auto" and model.codes is not None:
        formats = replace(formats, weights=model.codes.format)
    machine, engine = options["machine"], options.get("engine") or "shiftjax"
    hosts = options.get("hosts")
    return Target(model, load_machine(machine, hosts), load_engine(engine), formats)


def target_of(
    config: EngineConfig,
    model: str | ModelConfig,
    machine: str,
    engine: str = "shiftjax",
    hosts: int | None = None,
) -> Target:
    """The target of an engine's settings, on as many machines of this name. Raises ConfigError."""
    named = {"model": model, "machine": machine, "engine": engine, "hosts": hosts}
    target = target_from(named)
    overlaps = target.engine.overlaps and config.scheduler.overlap
    engine_costs = replace(target.engine, overlaps=overlaps)
    return replace(target, engine=engine_costs, formats=formats_in(config, target.model))


def choose_deployments(
    target: Target, names: Sequence[str], **budgets: Any
) -> list[Deployment | Phases | RoleSplit | Oracle]:
    """Deployments by name (`sim/named.py`) with these budgets, and an oracle of all.

    Raises ConfigError with what is wrong with all names.
    """
    found: list[Deployment | Phases | RoleSplit | Oracle] = []
    problems: list[str] = []
    for name in names:
        try:
            by_name = name != ORACLE
            found.append(
                deploy_named(target, name, **budgets) if by_name else oracle_of(target, **budgets)
            )
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


@dataclass(frozen=True)
class SweepPoint:
    """One deployment at one rate, in requests per second, or with so many users."""

    rate: float | None  # None: all requests come at once, or as users ask
    replay: Replay
    users: int | None = None  # of a closed loop

    def row(self) -> dict[str, Any]:
        """For a table or a file."""
        load = {"rate": self.rate} if self.users is None else {"users": self.users}
        return load | summary(self.replay)


def sweep(
    requests: Sequence[TraceRequest],
    target: Target,
    deployments: Sequence[Deployment | Phases | RoleSplit | Oracle],
    factors: Iterable[float],
    acceptance: AcceptanceModel | None = None,
) -> list[SweepPoint]:
    """Every deployment at every multiple of the trace's own rate, an oracle after all others.

    Of a closed loop, multiples are of its users. Raises ConfigError for multiples of a trace whose
    requests all come at once, and for an oracle of a closed loop, which has no windows of arrivals.
    """
    factors, span = list(factors), requests[-1].arrival_seconds
    is_closed = isinstance(requests, ClosedLoop)
    if span == 0 and len(factors) > 1 and not is_closed:
        raise ConfigError(["all requests of this trace come at once: there is no rate to multiply"])
    if is_closed and any(isinstance(each, Oracle) for each in deployments):
        words = "when users ask depends on the deployment: drop it, or use a trace of arrivals"
        raise ConfigError([f"{ORACLE} compares windows of arrivals, and {words}"])

    def run(factor: float) -> list[SweepPoint]:
        if isinstance(requests, ClosedLoop):
            scaled = requests.times(factor)
        else:
            scaled = scale_rate(requests, factor)

        def served(each: Deployment | Phases | RoleSplit) -> Replay:
            return replay(scaled, target, each, acceptance=acceptance)

        oracles = [each for each in deployments if isinstance(each, Oracle)]
        replays = [served(each) for each in deployments if not isinstance(each, Oracle)]
        for oracle in oracles:
            others = (each for each in oracle.deployments if each not in deployments)
            replays.append(best_in_hindsight([*replays, *map(served, others)]))
        users = scaled.users if isinstance(scaled, ClosedLoop) else None
        rate = factor * len(requests) / span if span else None
        return [SweepPoint(rate, each, users) for each in replays]

    return [point for factor in factors for point in run(factor)]


def saturation_rate(
    target: Target, deployment: Deployment, prompt_tokens: int, output_tokens: int
) -> float:
    """Requests per second that a deployment finishes when all are there at once.

    They have been read: in a long run the front end reads while devices compute.
    """
    engine = replace(target.engine.completions, request_seconds=0.0)
    target, count = replace(target, engine=engine), 4 * deployment.max_num_seqs * deployment.dp
    batch = [TraceRequest(0.0, prompt_tokens, output_tokens)] * count
    return count / makespan(replay(batch, target, deployment))


def breakdown_by_context(
    target: Target, deployment: Deployment, contexts: Iterable[int]
) -> list[dict[str, Any]]:
    """Seconds by kind of a prompt of each length, computed in one step, in every mode."""
    costs = cost_model(target, deployment)
    return [
        {"context": context, "mode": mode.label} | costs.breakdown(mode, work)._asdict()
        for context in contexts
        for mode in costs.layout.modes
        for work in [Work.prefill(context)]
    ]


# ------------------------------------------------------------------ traces of a config file


def trace_from(options: Any) -> Sequence[TraceRequest]:
    """A trace from `{file, start, seconds}` or `{kind, ...arguments of a synthetic trace}`.

    With `users`, and `think_seconds`, beside a file it is a closed loop.

    Raises ConfigError, also where no request is left.
    """
    if not isinstance(options, Mapping) or not {"file", "kind"} & set(options):
        raise ConfigError([f"trace must map file or kind to something, got {shown(options)}"])
    try:
        requests = _from_file(options) if "file" in options else _synthetic(**options)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([f"trace: {error}"]) from None
    if not requests:
        raise ConfigError(["the trace has no request in this window"])
    return requests


def _from_file(options: Mapping[str, Any]) -> Sequence[TraceRequest]:
    known = ("file", "start", "seconds", *OF_USERS)
    wrong = [unknown_name(str(name), known) for name in options if name not in known]
    if wrong:
        raise ConfigError([f"trace: {problem}" for problem in wrong])
    start, seconds = options.get("start", 0.0), options.get("seconds", float("inf"))
    requests = cut_window(load_trace(options["file"]), float(start), float(seconds))
    of_users = {name: options[name] for name in OF_USERS if name in options}
    return closed_loop(requests, **of_users) if of_users else requests


def _synthetic(kind: str, **arguments: Any) -> Sequence[TraceRequest]:
    if not isinstance(kind, str) or kind not in SYNTHETIC:
        raise ConfigError([unknown_name(str(kind), SYNTHETIC, "kind of trace")])
    of_times = inspect.signature(SYNTHETIC[kind]).parameters
    of_lengths = dict(inspect.signature(requests_at).parameters)
    del of_lengths["times"]
    known = of_lengths | of_times
    needed = [name for name, each in known.items() if each.default is each.empty]
    wrong = [unknown_name(name, known, f"argument of {kind}") for name in arguments.keys() - known]
    wrong += [f"{kind} needs {name}" for name in needed if name not in arguments]
    if wrong:
        raise ConfigError([f"trace: {problem}" for problem in sorted(wrong)])
    times = SYNTHETIC[kind](**{n: value for n, value in arguments.items() if n in of_times})
    lengths = {name: value for name, value in arguments.items() if name in of_lengths}
    requests = requests_at(times, **lengths)
    if kind != CLOSED:
        return requests
    of_users = (*OF_USERS, "seed")
    return closed_loop(requests, **{n: arguments[n] for n in of_users if n in arguments})


# ------------------------------------------------------------------ files


def write_rows(directory: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """`name`.jsonl and `name`.csv, one row each; columns in the order of the first row."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(directory / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A plain table; columns are those of the first row, numbers short enough to read."""
    columns = list(rows[0]) if rows else []
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
