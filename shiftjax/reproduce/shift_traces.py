"""Shift Parallelism, section 4.2: bursts, and 15 minutes of two published traces."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shiftjax.reproduce.figures import Curve, Figure, Options, Published
from shiftjax.reproduce.measures import by_name, target
from shiftjax.reproduce.trace_files import find_trace
from shiftjax.sim.replay import Replay, replay
from shiftjax.sim.replay_metrics import makespan, summary
from shiftjax.sim.trace import (
    MOONCAKE_TICK_SECONDS,
    TraceRequest,
    on_off_times,
    requests_at,
)

NAMES = {"dp": "dp", "tp": "tp", "sp": "sp", "shift": "shift"}
TRACE_BUDGETS: dict[str, Any] = {"max_num_batched_tokens": 131_072, "prefix_caching": False}
AZURE_REQUESTS, MOONCAKE_REQUESTS = 2832, 2727  # that figure 8 counts
SHARES = (10, 50, 90, 99)  # percentiles of a curve
OWN_BURSTS = (
    "Its mix of HumanEval and an agent's requests is not published. Ours: 4,096 in, 250 out, 1/s, "
    "and 10/s for 30 s of every 120 s, four times."
)
PEAKS = (
    "Published peaks count tokens that a cache had, as an agent's prompts begin alike: DP's is 1.6 "
    "times that of figure 12c. Ours are computed."
)


def bursts(paper: Published, options: Options) -> Iterator[Figure]:
    """Table 5: a quiet stream with four bursts."""
    period, count = (30, 1) if options.quick else (120, 4)
    times = on_off_times(1, 10, period, period / 4, period * count)
    requests, of = requests_at(times, 4096, 250), target("llama-70b")
    names = {name: NAMES[name] for name in ("dp", "tp", "shift")}
    rows = {
        name: summary(replay(requests, of, each))
        for name, each in by_name(of, names, threshold=512).items()
    }
    for name, row in rows.items():
        yield paper.beside(f"bursts-ttft-{name}", 1e3 * row["ttft_p50_seconds"], OWN_BURSTS)
        yield paper.beside(f"bursts-tpot-{name}", 1e3 * row["tpot_p50_seconds"], OWN_BURSTS)
        peak = row["peak_tokens_per_second"]
        yield paper.beside(f"bursts-peak-{name}", peak, PEAKS)
    for metric in ("ttft", "tpot"):
        dp, shift = (rows[name][f"{metric}_p50_seconds"] for name in ("dp", "shift"))
        yield paper.beside(f"bursts-{metric}-dp-over-shift", dp / shift, OWN_BURSTS)


def azure(paper: Published, options: Options) -> Iterator[Figure | Curve]:
    """Figures 9 and 11a: the first 2,832 requests of Azure's code trace."""
    requests = find_trace("azure", options.traces)
    count = 200 if options.quick else AZURE_REQUESTS
    if not isinstance(requests, str):
        requests = requests[:count]
    yield from _replayed(paper, "azure", requests, options.quick)


def mooncake(paper: Published, options: Options) -> Iterator[Figure | Curve]:
    """Figures 10 and 11b: the first 2,727 requests of Mooncake's conversations, on its ticks."""
    requests = find_trace("mooncake", options.traces)
    count = 60 if options.quick else MOONCAKE_REQUESTS
    if not isinstance(requests, str):
        requests = [on_tick(each) for each in requests[:count]]
    yield from _replayed(paper, "mooncake", requests, options.quick)


def on_tick(request: TraceRequest) -> TraceRequest:
    """As it was recorded and sent: all of a tick at once."""
    tick = MOONCAKE_TICK_SECONDS
    at = tick * int(request.arrival_seconds / tick + 1e-9)
    return replace(request, arrival_seconds=at)


def _replayed(
    paper: Published, name: str, requests: Sequence[TraceRequest] | str, cut: bool
) -> Iterator[Figure | Curve]:
    """Minutes beside the published ones, and ours alone: percentiles of what pictures show."""
    if isinstance(requests, str):
        for each in NAMES:
            yield paper.beside(f"{name}-minutes-{each}", None, requests)
        return
    of = target("llama-70b") if name == "azure" else target("qwen-32b", kv="fp8")
    runs = {
        each: replay(requests, of, deployment)
        for each, deployment in by_name(of, NAMES, threshold=512, **TRACE_BUDGETS).items()
    }
    for each, run in runs.items():
        note = WHY.get((name, each), "")
        minutes = None if cut else makespan(run) / 60
        yield paper.beside(f"{name}-minutes-{each}", minutes, CUT if cut else note)
    number = "11a" if name == "azure" else "11b"
    for each, run in runs.items():
        row = summary(run)
        for metric in ("ttft", "tpot", "completion"):
            what = f"{name}, {each}: median {metric}"
            value = 1e3 * row[f"{metric}_p50_seconds"]
            yield paper.alone(number, what, value, "ms", "A picture that could not be read.")
    for metric in ("ttft", "tpot", "completion"):
        lines = {each: _percentiles(run, metric) for each, run in runs.items()}
        yield Curve(f"{name}, {metric} by percentile", "ms", "percent of requests", lines)


CUT = "Not run to its end with --quick."
WHY = {
    ("mooncake", "tp"): (
        "Ours is too quick for this checkpoint (TTFT of figure 12c): its TP keeps up, and preempts "
        "nothing. Slowed to that TTFT it takes longer, but not an hour: the rest is not explained."
    ),
    ("mooncake", "dp"): (
        "DP falls behind here, too, as its replicas step together; less so, as it is too quick for "
        "this checkpoint (TTFT of figure 12c)."
    ),
}


def _percentiles(run: Replay, metric: str) -> list[tuple[float, float]]:
    """(milliseconds, percent of requests that take less)."""
    values = sorted(1e3 * (getattr(each, metric) or 0.0) for each in run.requests)
    return [(values[min(len(values) - 1, len(values) * p // 100)], float(p)) for p in SHARES]
