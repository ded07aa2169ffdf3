"""What a run amounts to: a row, queue times, errors; as JSON and plots. No JAX."""

import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving.bench.client import Sample
from serving.bench.load import Outcome
from shiftjax.options import ConfigError
from shiftjax.sim.columns import LATENCIES, PERCENTILES, Row, latencies, percentiles, row_of_run

_BUCKET = re.compile(rb'\w+:request_queue_time_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)')


def summary(
    outcome: Outcome, ttft_limit: float | None = None, tpot_limit: float | None = None
) -> Row:
    """One flat row: the columns of any run, and the gaps between events with tokens."""
    good = outcome.answered
    num_failed = len(outcome.samples) - len(good)
    row = row_of_run(good, num_failed, outcome.seconds, ttft_limit, tpot_limit)
    return row | percentiles("itl", _gaps(good))


def _gaps(samples: Sequence[Sample]) -> list[float]:
    return [gap for sample in samples for gap in sample.gaps]


def queue_times(before: bytes, after: bytes) -> dict[str, float | None]:
    """Percentiles of the queue time between two readings of /metrics, as bounds of buckets."""
    first, last = _buckets(before), _buckets(after)
    counts = [(bound, count - first.get(bound, 0.0)) for bound, count in sorted(last.items())]
    total = counts[-1][1] if counts else 0.0
    row: dict[str, float | None] = {}
    for p in PERCENTILES:
        reached = (bound for bound, count in counts if count >= total * p / 100)
        row[f"queue_p{p}_at_most_seconds"] = next(reached, None) if total else None
    return row


def _buckets(text: bytes) -> dict[float, float]:
    return {float(bound): float(count) for bound, count in _BUCKET.findall(text)}


def open_results(json_file: str | None, plots: str | None = None) -> None:
    """Raise ConfigError, before anything is measured, where results could not be written."""
    problems = []
    try:
        if json_file not in (None, "-"):
            Path(json_file).open("ab").close()
    except OSError as error:
        problems.append(f"--json {json_file}: {error.strerror}")
    try:
        if plots is not None:
            importlib.import_module("matplotlib")
            Path(plots).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problems.append(f"--plots {plots}: {error.strerror}")
    except ModuleNotFoundError:
        problems.append("--plots needs matplotlib: pip install 'shiftjax[plots]'")
    if problems:
        raise ConfigError(problems)


def write_json(path: str, row: dict[str, Any]) -> None:
    """Write a row to a file; - is stdout."""
    text = json.dumps(row, indent=2)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")


def errors(outcome: Outcome) -> dict[str, int]:
    """How often each error came."""
    words = [sample.error for sample in outcome.samples if sample.error is not None]
    return {word: words.count(word) for word in dict.fromkeys(words)}


def plot(outcome: Outcome, directory: Path) -> list[Path]:
    """Distributions of every metric, and output tokens per second over time, as SVG files."""
    good = outcome.answered
    columns = {name: latencies(good, name) for name in LATENCIES} | {"itl": _gaps(good)}
    made = [_new_axes(name, f"{name} (s)", "share of values") for name in columns]
    for axes, values in zip(made, columns.values(), strict=True):
        axes.plot(sorted(values), np.linspace(0, 1, len(values)))
    times = [time for sample in good for time in sample.token_times]
    start = min((sample.sent_at for sample in good), default=0.0)
    counts, edges = np.histogram(np.array(times) - start, bins=60)
    made.append(_new_axes("throughput", "time (s)", "token events per second"))
    made[-1].stairs(counts / np.diff(edges), edges)
    paths = [directory / f"{axes.get_title()}.svg" for axes in made]
    for axes, path in zip(made, paths, strict=True):
        axes.figure.savefig(path)
    return paths


def _new_axes(title: str, x: str, y: str) -> Any:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6, 4), layout="constrained").subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    return axes
