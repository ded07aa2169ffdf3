"""Published measurements of serving systems: read from tables, predicted by the replay. No JAX.

A table is CSV with a row for each figure; `COLUMNS` says what stands in it. Rows that agree in all
but metric and value are one run, which is replayed once. Figures of `benchmarks/published/fit.csv`
may be used to fit constants. Those of `check.csv` only measure what the fit is worth.
"""

import csv
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shiftjax.options import ConfigError, unknown_name
from shiftjax.sim.closed_loop import closed_loop
from shiftjax.sim.columns import latencies
from shiftjax.sim.experiments import target_from
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import Replay, RequestRecord, replay
from shiftjax.sim.replay_metrics import makespan
from shiftjax.sim.trace import TraceRequest, arrival_times, requests_at

COLUMNS = (
    "source",  # where the figure was published
    "system",  # who measured: vllm, sglang, tensorrt_llm, nim, mlperf
    "version",
    "engine",  # the preset of `shiftjax/costs/engines` that predicts it
    "machine",
    "model",
    "dtype",
    "kv",
    "settings",  # of the deployment, as `sim/named.py` reads them
    "load",  # one of LOADS
    "requests",
    "input",  # mean tokens of a prompt
    "output",  # mean tokens of an answer
    "cv",  # of lengths that are log-normal; 0: all alike
    "metric",  # one of METRICS
    "value",
    "api",  # chat or completions; a table without this column has chats
)
APIS = ("chat", "completions")

LOADS = {
    "offline": "all at once, without a front end",
    "all": "all at once, each a stream of a server",
    "users": "users:8 is a closed loop of so many",
    "rate": "rate:4 are Poisson arrivals, per second",
}
IN_STEP = ("vllm", "sglang")  # systems that are measured with their own clients
LONGEST = 5  # times the mean, of lengths that vary


class Run(NamedTuple):
    """What was measured together: a system, a model, a machine and a load."""

    source: str
    system: str
    version: str
    engine: str
    machine: str
    model: str
    dtype: str
    kv: str
    settings: str
    load: str
    requests: int
    input: int
    output: int
    cv: float
    api: str = "chat"

    @property
    def label(self) -> str:
        """The run in words, for tables."""
        degrees = ",".join(x for x in self.settings.split(",") if x[:2] in ("dp", "pp", "sp", "tp"))
        machine, kv = (
            Path(self.machine).stem.partition("x8")[0],
            f"/{self.kv}" * (self.kv != self.dtype),
        )
        lengths = f"{self.input} in, {self.output} out"
        names = f"{self.system} {self.version}, {self.model} {self.dtype}{kv}, {machine}"
        return f"{names}, {degrees}, {self.load} ({self.requests}), {lengths}"

    @property
    def kind(self) -> str:
        """The kind of load."""
        return self.load.partition(":")[0]

    @property
    def level(self) -> float:
        """Users, or requests per second."""
        return float(self.load.partition(":")[2] or 0)


class Figure(NamedTuple):
    """One published number."""

    run: Run
    metric: str
    value: float


def _settled(run: Replay) -> list[RequestRecord]:
    """Requests of the time after the start: all that came after time 0, or simply all.

    In a closed loop everybody starts at once, and later ones find what a long run has.
    """
    later = [each for each in run.requests if each.arrival > 0]
    return later or run.requests


def _of(name: str, amount: Callable[[list[float]], float]) -> Callable[[Replay], float]:
    def milliseconds(run: Replay) -> float:
        return 1e3 * amount(latencies(_settled(run), name))

    return milliseconds


def _rate(count: Callable[[RequestRecord], int]) -> Callable[[Replay], float]:
    return lambda run: sum(map(count, run.requests)) / makespan(run)


_COUNTS: Mapping[str, Callable[[RequestRecord], int]] = {
    "output_tokens_per_second": lambda each: each.num_output_tokens,
    "tokens_per_second": lambda each: each.num_prompt_tokens + each.num_output_tokens,
    "requests_per_second": lambda _: 1,
}
METRICS: Mapping[str, Callable[[Replay], float]] = {
    **{name: _rate(count) for name, count in _COUNTS.items()},
    "ttft_mean_ms": _of("ttft", statistics.fmean),
    "ttft_median_ms": _of("ttft", statistics.median),
    "tpot_mean_ms": _of("tpot", statistics.fmean),
    "tpot_median_ms": _of("tpot", statistics.median),
    "completion_mean_ms": _of("completion", statistics.fmean),
}
KIND_OF: Mapping[str, str] = {
    name: "throughput" if name in _COUNTS else "ttft" if name.startswith("ttft") else "tpot"
    for name in METRICS
}
"""Of each metric, the one of `error_bands` that it counts for: a batch's completion is its TPOT."""


def read_figures(path: Path) -> list[Figure]:
    """The figures of a table. Raises ConfigError, with the line, for what is none."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) not in (COLUMNS, COLUMNS[:-1]):
            raise ConfigError([f"{path}: the columns must be {', '.join(COLUMNS)}"])
        return [_figure(row, path, f"{path}:{reader.line_num}") for row in reader]


def _figure(row: Mapping[str, str], path: Path, where: str) -> Figure:
    if row["metric"] not in METRICS:
        raise ConfigError([f"{where}: {unknown_name(row['metric'], METRICS, 'metric')}"])
    try:
        texts = [row[name] for name in Run._fields[:10]]
        counts = [int(row[name]) for name in ("requests", "input", "output")]
        run = Run._make([*texts, *counts, float(row["cv"]), row.get("api", APIS[0])])
        if run.machine.endswith(".yaml"):  # beside the table
            run = run._replace(machine=str(path.parent / run.machine))
        figure = Figure(run, row["metric"], float(row["value"]))
    except (TypeError, ValueError) as error:
        raise ConfigError([f"{where}: {error}"]) from None
    if run.kind not in LOADS or not figure.value > 0:
        raise ConfigError([f"{where}: a load is one of {', '.join(LOADS)}, a value above 0"])
    if run.api not in APIS:
        raise ConfigError([f"{where}: an api is one of {', '.join(APIS)}, got {run.api}"])
    return figure


def runs_of(figures: Iterable[Figure]) -> dict[Run, list[Figure]]:
    """Figures by the run that they are of, in their order."""
    found: dict[Run, list[Figure]] = {}
    for figure in figures:
        found.setdefault(figure.run, []).append(figure)
    return found


def requests_of(run: Run, most: int | None = None) -> list[TraceRequest]:
    """Its requests, or the first `most` of them. Lengths that vary are at most `LONGEST` means.

    Data sets of conversations are cut so: of ShareGPT, benchmarks take prompts of up to 1,024
    tokens, and up to 2,048 with the answer, for means of 200 to 220.
    """
    count = min(run.requests, most or run.requests)
    times = [0.0] * count
    if run.kind == "rate":
        times = arrival_times(run.level, 2 * count / run.level)[:count]
    drawn = requests_at(times, run.input, run.output, run.cv)
    if not run.cv:
        return drawn
    prompts = _cut([each.num_prompt_tokens for each in drawn], run.input)
    outputs = _cut([each.num_output_tokens for each in drawn], run.output)
    return [
        replace(each, num_prompt_tokens=prompt, num_output_tokens=output)
        for each, prompt, output in zip(drawn, prompts, outputs, strict=True)
    ]


def _cut(lengths: list[int], mean: int) -> list[int]:
    """None longer than `LONGEST` means, and of this mean again."""
    cut = [min(length, LONGEST * mean) for length in lengths]
    scale = mean * len(cut) / sum(cut)
    return [max(1, round(scale * length)) for length in cut]


def replay_of(run: Run, most: int | None = None) -> Replay:
    """The run, simulated: `most` requests of it at most. Raises ConfigError.

    Answers of a closed loop's first round are cut, each somewhere, so that later requests come as
    after a long time, when users are at phases that have nothing to do with each other. Users of
    vLLM's and SGLang's own benchmarks begin together, and those with equal lengths stay together.
    """
    named = run._asdict()
    options = {name: named[name] for name in ("machine", "model", "engine", "dtype")}
    target = target_from(options | {"kv_cache_dtype": run.kv})
    if run.kind == "offline":
        target = replace(target, engine=target.engine.offline)
    elif run.api == "completions":
        target = replace(target, engine=target.engine.completions)
    requests = requests_of(run, most)
    if run.kind != "users":
        return replay(requests, target, deploy(target, run.settings))
    users = int(run.level)
    if not run.cv and run.system in IN_STEP:
        return replay(closed_loop(requests, users), target, deploy(target, run.settings))
    rng = random.Random(f"phases of {users}")
    for number, each in enumerate(requests[:users]):
        output = max(1, round(each.num_output_tokens * rng.random()))
        requests[number] = replace(each, num_output_tokens=output)
    return replay(closed_loop(requests, users), target, deploy(target, run.settings))


def predicted(run: Run, metric: str, found: Replay) -> float:
    """What the replay of a run says of a metric. Of a closed loop, rates are by Little's law."""
    if run.kind != "users" or not metric.endswith("_per_second"):
        return METRICS[metric](found)
    settled = _settled(found)
    per_request = _COUNTS[metric]
    seconds = statistics.fmean(each.completion for each in settled)
    return run.level * statistics.fmean(map(per_request, settled)) / seconds


def error_rows(figures: Iterable[Figure], most: int | None = None) -> Iterator[dict[str, Any]]:
    """A row for each figure: what it is, what was published and predicted, and the error."""
    for run, group in runs_of(figures).items():
        found = replay_of(run, most)
        for figure in group:
            simulated = predicted(run, figure.metric, found)
            yield {
                "system": run.system,
                "metric": KIND_OF[figure.metric],
                "load": run.kind,
                "what": run.label + ": " + figure.metric,
                "published": figure.value,
                "predicted": float(f"{simulated:.4g}"),
                "error": round(simulated / figure.value - 1, 3),
            }
