"""Sizes of steps by cost against the largest, in replays: docs/results/step_sizes.md.

    python scripts/labs/step_sizes.py llama70:code llama70:chat --seeds 0,1,2 \
        --azure AzureLLMInferenceTrace_code.csv --mooncake conversation_trace.jsonl

A cell is a model and a kind of traffic. Every seed is another window of a published trace, or
another draw. Prints one row for a cell: what changes in percent, the mean of its seeds' ratios.
With `--targets` it compares sizes by cost with those for the model's objectives as targets.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from shiftjax.deploy.deployment import Deployment
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import Replay, replay
from shiftjax.sim.replay_metrics import makespan
from shiftjax.sim.trace import (
    TraceRequest,
    arrival_times,
    load_trace,
    on_off_times,
    poisson,
    requests_at,
    scale_rate,
    window,
)

COLUMNS = ("ttft", "tpot", "completion")


class Model(NamedTuple):
    """What is served, on which machine, how many times the traffic, and its objectives."""

    name: str
    devices: int
    rate: float
    ttft: float  # seconds
    tpot: float
    deployment: str = ""  # settings beside the policy
    policy: str = "cost"


MODELS = {
    "llama70": Model("llama-70b", 8, 1.0, 1.0, 0.05),
    "llama70threshold": Model("llama-70b", 8, 1.0, 1.0, 0.05, policy="threshold"),
    "llama8": Model("llama-8b", 1, 1.0, 1.0, 0.05),
    "qwen32": Model("qwen-32b", 8, 1.8, 0.5, 0.03),
    "qwen30moe": Model("qwen-30b-a3b", 8, 4.0, 0.5, 0.025, "dp=2,sp=4,tp=1"),
}
Traffic = Callable[[float, int, argparse.Namespace], list[TraceRequest]]


def _rollouts(factor: float, seed: int, given: argparse.Namespace) -> list[TraceRequest]:
    """Four hundred at once, with long answers."""
    rng, spread = random.Random(seed), math.sqrt(math.log1p(0.8**2))

    def draw(mean: int) -> int:
        return max(4, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))

    return [TraceRequest(0.0, draw(512), min(16384, draw(1500))) for _ in range(400)]


TRAFFIC: dict[str, Traffic] = {
    "code": lambda k, seed, given: scale_rate(window(load_trace(given.azure), 600 * seed, 240), k),
    "moon": lambda k, seed, given: scale_rate(
        window(load_trace(given.mooncake), 300 * seed, 100 * k), 0.5 * k
    ),
    "bursty": lambda k, seed, given: requests_at(
        on_off_times(k, 12 * k, 60, 15, 60, seed), 4096, 250, 1.0, seed
    ),
    "chat": lambda k, seed, given: poisson(20 * k, 15, 600, 200, seed, 1.0),
    "steady": lambda k, seed, given: poisson(5 * k, 30, 3000, 250, seed, 1.0),
    "over": lambda k, seed, given: poisson(13 * k, 30, 4096, 250, seed, 1.0),
    "agents": lambda k, seed, given: poisson(1.2 * k, 60, 24000, 80, seed, 1.0),
    "conv": lambda k, seed, given: requests_at(
        arrival_times(16 * k, 40, 2.5, seed), 1155, 211, 1.0, seed
    ),
    "roll": _rollouts,
}


def deployed(model: Model, traffic: str, sizes: str) -> tuple[Target, Deployment]:
    """The target of a cell, and the engine with these sizes of steps, by cost for `targets`."""
    target = target_from({"model": model.name, "machine": "h200x8", "dtype": "fp8"})
    target = replace(target, machine=replace(target.machine, num_devices=model.devices))
    words = [model.policy, model.deployment]
    if sizes == "targets":
        words += [f"target_ttft={model.ttft}", f"target_tpot={model.tpot}"]
    else:
        words.append(f"step_sizes={sizes}")
    words += ["block_size=128"] if traffic == "moon" else []
    return target, deploy(target, ",".join(filter(None, words)))


def numbers(run: Replay, model: Model) -> dict[str, float]:
    """Means and p99, tokens per second, and the share of requests inside both objectives."""
    found: dict[str, float] = {}
    for column in COLUMNS:
        values = sorted(v for r in run.requests if (v := getattr(r, column)) is not None)
        found[column] = statistics.mean(values)
        found[f"{column} p99"] = values[int(0.99 * len(values))]
    tokens = sum(r.num_prompt_tokens + r.num_output_tokens for r in run.requests)
    found["tokens/s"] = tokens / makespan(run)
    good = [r.ttft <= model.ttft and (r.tpot or 0) <= model.tpot for r in run.requests]
    found["inside"] = sum(good) / (len(good) + run.num_refused)
    found["requests"] = len(run.requests)
    return found


def row_of(cell: str, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> str:
    """A line of the table: before, and what changes."""
    before = [statistics.mean(old[column] for old, _ in pairs) for column in COLUMNS]
    names = [f"{c}{tail}" for c in COLUMNS for tail in ("", " p99")] + ["tokens/s"]
    changes = [statistics.mean(new[n] / old[n] for old, new in pairs) - 1 for n in names]
    inside = [statistics.mean(pair[i]["inside"] for pair in pairs) for i in (0, 1)]
    cells = [
        f"{cell} ({len(pairs)}; {pairs[0][0]['requests']:.0f})",
        f"{before[0]:.3f} / {1e3 * before[1]:.1f} / {before[2]:.2f}",
        *(f"{100 * change:+.1f}" for change in changes),
        f"{inside[0]:.3f} > {inside[1]:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Replay every cell in two ways."""
    parser = argparse.ArgumentParser(description="Replay sizes of steps by cost.")
    parser.add_argument("cells", nargs="+")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--targets", action="store_true", help="with and without targets")
    parser.add_argument("--alone", action="store_true", help="rates of kernels timed alone")
    parser.add_argument("--azure", type=Path, help="AzureLLMInferenceTrace_code.csv")
    parser.add_argument("--mooncake", type=Path, help="conversation_trace.jsonl")
    given = parser.parse_args()
    for cell in given.cells:
        name, traffic = cell.split(":")
        model, pairs = MODELS[name], []
        for seed in map(int, given.seeds.split(",")):
            requests = TRAFFIC[traffic](model.rate, seed, given)
            runs = []
            for sizes in ("cost", "targets") if given.targets else ("largest", "cost"):
                target, deployment = deployed(model, traffic, sizes)
                if given.alone:
                    cool = replace(target.machine, sustained_efficiency=1.0)
                    target = replace(target, machine=cool)
                runs.append(numbers(replay(requests, target, deployment), model))
            pairs.append((runs[0], runs[1]))
            print(json.dumps({"cell": cell, "seed": seed, "runs": runs}), file=sys.stderr)
        print(row_of(cell, pairs), flush=True)


if __name__ == "__main__":
    main()
