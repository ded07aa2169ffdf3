"""What a replay amounts to: its row, throughput over time, steps by mode. No JAX."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from shiftjax.sim.columns import Row, latencies, percentiles, row_of_run
from shiftjax.sim.replay import Replay

PEAK_SECONDS = 5.0  # the window in which the peak throughput is counted


def makespan(replay: Replay) -> float:
    """Seconds from the start of the trace to the last step's end."""
    return replay.steps[-1].done if replay.steps else 0.0


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


def summary(replay: Replay) -> Row:
    """One flat row: the deployment, the columns of any run, and what only a replay knows."""
    deployment, requests = replay.deployment, replay.requests
    row: Row = {name: getattr(deployment, name) for name in ("name", "dp", "sp", "tp", "policy")}
    row |= row_of_run(requests, replay.num_refused, makespan(replay))
    row |= percentiles("queue", latencies(requests, "queue"))
    row["peak_tokens_per_second"] = peak_throughput(replay)
    steps = Counter(step.mode.label for step in replay.steps)
    row |= {"steps_base": steps.pop("base", 0), "steps_shift": steps.pop("shift", 0)}
    row["steps_between"] = sum(steps.values())
    row["mode_switches"] = replay.mode_switches
    row["preemptions"] = replay.num_preemptions
    prompts = sum(r.num_prompt_tokens for r in requests)
    row["drafted_tokens"] = sum(r.num_draft_tokens for r in requests)
    row["accepted_tokens"] = sum(r.num_accepted_tokens for r in requests)
    row["accepted_per_step"] = row["accepted_tokens"] / max(1, len(replay.steps))
    row["cached_share"] = sum(r.num_cached_tokens for r in requests) / max(1, prompts)
    return row
