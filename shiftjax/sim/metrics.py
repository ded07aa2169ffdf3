"""What a replay amounts to: percentiles, throughput over time, steps by mode. No JAX."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shiftjax.sim.replay import Replay, RequestRecord

PERCENTILES = (50, 90, 99)
PEAK_SECONDS = 5.0  # the window in which the peak throughput is counted
METRICS: dict[str, Callable[[RequestRecord], float | None]] = {
    "queue": lambda r: r.queue,
    "ttft": lambda r: r.ttft,
    "tpot": lambda r: r.tpot,
    "completion": lambda r: r.completion,
}
"""Seconds of a request; TPOT only where there is a second token."""


def percentiles(replay: Replay, metric: str) -> list[float]:
    """p50, p90 and p99 of a metric, in seconds."""
    values = [v for r in replay.requests if (v := METRICS[metric](r)) is not None]
    return [float(v) for v in np.percentile(values, PERCENTILES)] if values else [0.0] * 3


def makespan(replay: Replay) -> float:
    """Seconds from the start of the trace to the last step's end."""
    return replay.steps[-1].done if replay.steps else 0.0


def throughput(replay: Replay) -> float:
    """Input and output tokens of all requests per second, over the whole replay."""
    tokens = sum(r.num_prompt_tokens + r.num_output_tokens for r in replay.requests)
    return tokens / makespan(replay) if replay.steps else 0.0


def throughput_over_time(
    replay: Replay, seconds: float, labels: Iterable[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(start of each window, tokens computed per second in it), of steps of all or some modes.

    Tokens that the prefix cache had are not computed, so they do not count here.
    """
    wanted = set(replay.labels if labels is None else labels)
    steps = [s for s in replay.steps if s.mode.label in wanted]
    edges = np.arange(0.0, makespan(replay) + seconds, seconds)
    done, tokens = [s.done for s in steps], [s.num_tokens for s in steps]
    totals, _ = np.histogram(done, bins=edges, weights=tokens)
    return edges[:-1], totals / seconds


def longest_mode(replay: Replay, seconds: float) -> tuple[list[float], list[str]]:
    """(start of each window with steps, mode that took most of the devices' time in it)."""
    times: dict[int, defaultdict[str, float]] = {}
    for step in replay.steps:
        spent = times.setdefault(int(step.done / seconds), defaultdict(float))
        spent[step.mode.label] += step.device_seconds
    windows = sorted(times)
    longest = [max(times[w], key=times[w].__getitem__) for w in windows]
    return [w * seconds for w in windows], longest


def peak_throughput(replay: Replay) -> float:
    """Tokens computed per second in the best window of `PEAK_SECONDS`."""
    return float(max(throughput_over_time(replay, PEAK_SECONDS)[1], default=0.0))


def summary(replay: Replay) -> dict[str, Any]:
    """One flat row: seconds, tokens per second, counts."""
    row: dict[str, Any] = {
        "name": replay.deployment.name,
        "dp": replay.deployment.dp,
        "sp": replay.deployment.sp,
        "tp": replay.deployment.tp,
        "policy": replay.deployment.policy,
        "requests": len(replay.requests),
        "refused": replay.num_refused,
        "makespan_seconds": makespan(replay),
        "tokens_per_second": throughput(replay),
        "peak_tokens_per_second": peak_throughput(replay),
    }
    for metric in METRICS:
        values = zip(PERCENTILES, percentiles(replay, metric), strict=True)
        row |= {f"{metric}_p{p}_seconds": value for p, value in values}
    completions = [r.completion for r in replay.requests]
    row["completion_mean_seconds"] = float(np.mean(completions)) if completions else 0.0
    steps = Counter(step.mode.label for step in replay.steps)
    row |= {"steps_base": steps.pop("base", 0), "steps_shift": steps.pop("shift", 0)}
    row["steps_between"] = sum(steps.values())
    row["mode_switches"] = replay.mode_switches
    row["preemptions"] = replay.num_preemptions
    prompts = sum(r.num_prompt_tokens for r in replay.requests)
    row["cached_share"] = sum(r.num_cached_tokens for r in replay.requests) / max(1, prompts)
    return row
