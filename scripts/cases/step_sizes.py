"""Sizes of steps by cost beside the largest ones, on devices here: a trace, measured and predicted.

    shiftjax bench steps --meshes 4x2 --out machine.yaml
    python scripts/bench.py step_sizes --machine machine.yaml \\
        --trace AzureLLMInferenceTrace_code.csv

Two engines differ in `step_sizes` alone. They serve the same window of a trace in turn, round by
round, with its arrivals at `--rate` times their own speed; a few of its requests come before, all
at once, to warm up. Before each round the prefix cache is emptied. A row is a run, in seconds; its
`other_cores` are what others used of the machine meanwhile. The result has the medians over rounds
of every column and of the ratios of pairs, cost / largest, and beside these the ratios that a
replay on `--machine` predicts.
"""

import argparse
import os
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cases.kit import Row, medians
from cases.machine import busy_core_seconds

from serving.bench.deployments import serve_all
from shiftjax.build import Built, build
from shiftjax.config import EngineConfig
from shiftjax.model_files import open_files
from shiftjax.settings import make_virtual_devices
from shiftjax.sim.columns import latencies
from shiftjax.sim.experiments import target_of
from shiftjax.sim.replay import RequestRecord, replay
from shiftjax.sim.trace import TraceRequest, load_trace, scale_rate, window

ENGINES = ("largest", "cost")
COLUMNS = ("ttft", "tpot", "completion")
WARM = 6  # requests
OPTIONS = {
    "--model": "smollm2-135m",
    "--sp": 4,
    "--tp": 2,
    "--policy": ("cost", "of modes"),
    "--machine": (str, {"required": True, "help": "what steps cost here"}),
    "--trace": (str, {"required": True}),
    "--rate": (0.1, "times as fast as the trace"),
    "--start": (420.0, "second of the trace"),
    "--seconds": (120.0, "of a run's arrivals"),
    "--lengths": (1.0, "times the lengths of the trace, for a slower machine"),
    "--max-model-len": 8192,
    "--max-num-seqs": 32,
    "--step-tokens": 1024,
    "--rounds": 3,
}


def config_of(args: argparse.Namespace, sizes: str) -> EngineConfig:
    """The settings of one of the engines."""
    return EngineConfig.from_options(
        model=args.model,
        sp=args.sp,
        tp=args.tp,
        policy=args.policy,
        machine=args.machine,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.step_tokens,
        controls={"step_sizes": sizes},
    )


def start(config: EngineConfig) -> Built:
    """An engine on virtual devices."""
    make_virtual_devices(config)
    files = open_files(config, "generate")
    return build(config, files.source, lambda *_: None, files.cache_dir)


def shortened(request: TraceRequest, part: float) -> TraceRequest:
    """The same request, `part` times as long."""
    lengths = request.num_prompt_tokens, request.num_output_tokens
    prompt, output = (max(1, round(part * length)) for length in lengths)
    return replace(request, num_prompt_tokens=prompt, num_output_tokens=output)


def numbers(records: Sequence[RequestRecord], seconds: float) -> Row:
    """Means and 90th percentiles in seconds, and tokens per second."""
    row: Row = {}
    for name in COLUMNS:
        values = sorted(latencies(records, name))
        row[name] = statistics.mean(values)
        row[f"{name}_p90"] = values[int(0.9 * len(values))]
    tokens = sum(each.num_prompt_tokens + each.num_output_tokens for each in records)
    return row | {"tokens_per_second": tokens / seconds}


def measured(built: Built, requests: Sequence[TraceRequest]) -> Row:
    """One run: its numbers, how many steps it took, and what others did meanwhile."""
    engine, vocab = built.engine, built.deployment.layout.model.vocab_size
    engine.flush_prefix_cache()
    asked = [(each, each.prompt(number, vocab)) for number, each in enumerate(requests)]
    steps, cpu, busy = _num_steps(built), time.process_time(), busy_core_seconds()
    run = serve_all(engine, asked)
    others = busy_core_seconds() - busy - (time.process_time() - cpu)
    row = numbers(run.records, run.seconds) | {"failed": run.num_refused, "seconds": run.seconds}
    row["other_cores"] = round(max(0.0, others) / run.seconds, 2)
    return row | {"steps": _num_steps(built) - steps}


def _num_steps(built: Built) -> int:
    return sum(built.engine.stats().steps.values())


def predicted(config: EngineConfig, built: Built, requests: Sequence[TraceRequest]) -> Row:
    """The same run in a replay on the machine's constants."""
    deployment = built.deployment
    target = target_of(config, deployment.layout.model, config.scheduler.machine or "cpu")
    here = replace(target.machine, num_devices=deployment.grid.num_devices)
    target = replace(target, machine=here, formats=deployment.formats)
    run = replay(requests, target, deployment)
    seconds = max(each.arrival + each.completion for each in run.requests)
    return numbers(run.requests, seconds) | {"steps": len(run.steps)}


def ratios(rows: Mapping[str, Sequence[Row]], columns: Sequence[str]) -> dict[str, float]:
    """Medians over rounds of cost / largest."""
    pairs = list(zip(rows["cost"], rows["largest"], strict=True))
    return {c: round(statistics.median(new[c] / old[c] for new, old in pairs), 3) for c in columns}


def measure(args: argparse.Namespace) -> Generator[Row, None, dict[str, Any]]:
    """Yield the predictions and a row for each run; return medians and ratios."""
    whole = load_trace(args.trace)
    part = window(whole, args.start, args.seconds * args.rate)
    requests = [shortened(each, args.lengths) for each in scale_rate(part, args.rate)]
    warm = [replace(each, arrival_seconds=0.0) for each in requests[:WARM]]
    configs = {name: config_of(args, name) for name in ENGINES}
    engines = {name: start(config) for name, config in configs.items()}
    runs: dict[str, list[Row]] = {name: [] for name in ENGINES}
    said: dict[str, list[Row]] = {}
    for name, built in engines.items():
        said[name] = [predicted(configs[name], built, requests)]
        yield {"engine": name, "what": "predicted", **said[name][0]}
    for number in range(-1, args.rounds):
        for name, built in engines.items():
            row = measured(built, warm if number < 0 else requests)
            yield {"engine": name, "what": "measured", "round": number, **row}
            if number >= 0:
                runs[name].append(row)
    columns = [name for name in said["cost"][0] if name != "steps"]
    return {
        "requests": len(requests),
        "cores": os.cpu_count(),
        **{name: medians(rows) for name, rows in runs.items()},
        "ratio": ratios(runs, columns),
        "predicted_ratio": ratios(said, columns),
        "failures": [
            f"{name}: {row['failed']} requests failed"
            for name, rows in runs.items()
            for row in rows
            if row["failed"]
        ],
    }
