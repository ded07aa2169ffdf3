"""Groups with roles against groups that do both, in replays: docs/results/simulator_roles.md.

    python scripts/labs/roles.py llama70:poisson:2/0.05 --azure FILE --mooncake FILE

A cell is a model, a kind of traffic and targets, TTFT/TPOT in seconds. Goodput is the highest
multiple of the traffic at which 90% of the requests keep both (DistServe, arXiv 2401.09670,
section 2.2), found to 4% by halving. Of deployments without roles the best is found first. Those
with roles are then replayed at that load, and the best of both kinds are searched, too. A replay
ends when too many have missed their targets. All deployments know these. Prints a line of JSON for
each replay, and a row of the table for a cell.

With `--best-case` groups with roles are servers of their own, whose hosts work side by side, and
their KV moves in no time.
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

from shiftjax.core.request import Event
from shiftjax.costs.machine import Transfer
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.options import ConfigError
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.named import deploy_named
from shiftjax.sim.replay import Replay, replay
from shiftjax.sim.trace import TraceRequest, load_trace, poisson, scale_rate, window

SHARE = 0.9  # of the requests, that keep both targets
AGENT_TURNS = 16
STEP = 1.3  # a factor between loads, until one is kept and another is not
MOST_STEPS = 9
EXACT = 1.04  # a factor, to which the highest load is found
SEARCHED = 1  # of the deployments with roles, those that keep most at the best load without
SHARED = (
    *("cost", "cost,max_num_batched_tokens=1024", "dp", "tp", "shift"),
    *("dp2sp4,policy=cost", "dp4sp2,policy=cost", "fleet"),
)
SPLITS = {
    "1:7": ("dp1+dp7",),
    "2:6": ("sp2+dp3sp2", "dp2+dp6"),
    "4:4": ("sp4+sp4", "sp4+dp2sp2", "dp2sp2+dp2sp2", "dp4+dp4"),
    "6:2": ("dp3sp2+sp2", "dp6+dp2"),
    "by cost": ("dp8", "dp4sp2", "dp2sp4"),
}


class MissedError(Exception):
    """More requests have missed their targets than may."""


class Model(NamedTuple):
    """What is served on what; positions of a later release, if not the preset's."""

    name: str
    machine: str
    dtype: str
    positions: int = 0


MODELS = {
    "llama70": Model("llama-70b", "h200x8", "fp8"),
    "qwen30moe": Model("qwen3-30b-a3b", "h200x8", "fp8"),
    "qwen30long": Model("qwen3-30b-a3b", "h200x8", "fp8", 262_144),  # the release of July 2025
    "llama8a10": Model("llama-8b", "a10x8", "bfloat16"),
}


def agents(num: int, seed: int) -> list[TraceRequest]:
    """Agents as in vLLM's issue 57103: 142,000 tokens in, 444 out, 96% of them known.

    That is the mean of 43 turns of 5,680 new tokens each, after 22,700. Here sessions have
    the first `AGENT_TURNS` of these, and begin within 20 s; a tool takes 4 s on average, and the
    next turn comes at least 4 s after the last.
    """
    rng, new, first = random.Random(seed), 5680, 22_700
    found = []
    for session in range(num):
        at = rng.uniform(0.0, 20.0)
        for turn in range(AGENT_TURNS):
            length = first + turn * new
            ids = tuple(1000 * (session + 1) + n for n in range(-(-length // 512)))
            found.append(TraceRequest(at, length, rng.randint(144, 744), ids))
            at += 4.0 + rng.expovariate(1 / 4.0)
    return sorted(found, key=lambda each: each.arrival_seconds)


Traffic = Callable[[float, int, argparse.Namespace], list[TraceRequest]]


def _drawn(prompt: int, output: int, rate: float, seed: int, num: int) -> list[TraceRequest]:
    """Requests of a Poisson process, at `rate` per second, with log-normal lengths."""
    return poisson(rate, num / rate, prompt, output, seed, 1.0)


TRAFFIC: dict[str, Traffic] = {
    "poisson": lambda k, seed, given: _drawn(4096, 250, k, seed, given.requests),
    "chat": lambda k, seed, given: _drawn(1155, 211, k, seed, given.requests),
    "answers": lambda k, seed, given: _drawn(512, 1000, k, seed, given.requests),
    "short": lambda k, seed, given: _drawn(1024, 200, k, seed, given.requests),
    "code": lambda k, seed, given: scale_rate(
        window(load_trace(given.azure), 600 * seed, 240 * max(1.0, k)), k
    ),
    "moon": lambda k, seed, given: scale_rate(
        window(load_trace(given.mooncake), 300 * seed, 200 * max(1.0, k)), k
    ),
    "agents": lambda k, seed, given: agents(round(k), seed),
}


def target_of(model: Model, best_case: bool = False) -> Target:
    """The target; at best hosts are side by side, and moves free."""
    names = {"model": model.name, "machine": model.machine, "dtype": model.dtype}
    target = target_from(names)
    if model.positions:
        longer = replace(target.model, max_position_embeddings=model.positions)
        target = replace(target, model=longer)
    if best_case:
        free = (Transfer(0.0, math.inf),)
        engine = replace(target.engine, replicas_in_step=True)
        machine = replace(target.machine, point_to_point=free)
        target = replace(target, engine=engine, machine=machine)
    return target


STARTS = {"code": 1.0, "moon": 0.5, "agents": 12.0, "answers": 8.0}  # loads; of others 6


class Cell:
    """Replays of one model under one traffic, with targets."""

    def __init__(self, text: str, given: argparse.Namespace):
        name, self.traffic, limits = text.split(":")
        self.text, self.model, self.given = text, MODELS[name], given
        self.ttft, self.tpot = map(float, limits.split("/"))
        self.start = STARTS.get(self.traffic, 6.0)
        self.seeds = [int(seed) for seed in given.seeds.split(",")]
        self.runs: dict[tuple[str, float], dict[str, float]] = {}

    def at(self, name: str, load: float) -> dict[str, float]:
        """What the requests of a deployment got under a load; an empty dict if it cannot serve."""
        if (name, load) not in self.runs:
            self.num_ended = 0
            target = target_of(self.model, self.given.best_case and name.startswith("roles"))
            words = [name, f"target_ttft={self.ttft}", f"target_tpot={self.tpot}"]
            words += ["block_size=128"] if self.traffic in ("moon", "agents") else []
            try:
                deployment = deploy_named(target, ",".join(words))
                traffic = TRAFFIC[self.traffic]
                requests = [traffic(load, seed, self.given) for seed in self.seeds]
                hear = self.ender(sum(map(len, requests)))
                found = [replay(each, target, deployment, hear=hear) for each in requests]
            except ConfigError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return {}
            except MissedError:
                found = []
            row = self.row(found) if found else {"lasted": float(self.num_ended)}
            self.runs[name, load] = row
            told = {"cell": self.text, "name": name, "load": load, **row}
            print(json.dumps(told), file=sys.stderr, flush=True)
        return self.runs[name, load]

    def ender(self, num: int) -> Callable[[Event], None]:
        """What ends a search's replay, when too many of its requests have missed their targets."""
        missed = -num if "@" in (self.given.only or "") else 0

        def hear(event: Event) -> None:
            nonlocal missed
            if (metrics := event.metrics) is not None:
                self.num_ended += 1
                first, later = metrics.ttft_seconds or 0.0, metrics.tpot_seconds or 0.0
                missed += first > self.ttft or later > self.tpot
                if missed > (1 - SHARE) * num:
                    raise MissedError

        return hear

    def row(self, runs: Sequence[Replay]) -> dict[str, float]:
        """Of all seeds together."""
        requests = [request for run in runs for request in run.requests]
        num = len(requests) + sum(run.num_refused for run in runs)
        inside = sum(r.ttft <= self.ttft and (r.tpot or 0.0) <= self.tpot for r in requests)
        row = {"requests": num, "inside": inside / num}
        row["per_second"] = num / sum(run.requests[-1].arrival for run in runs)
        for column in ("ttft", "tpot", "completion"):
            values = sorted(v for r in requests if (v := getattr(r, column)) is not None)
            row[f"mean_{column}"] = statistics.mean(values)
            row[f"p99_{column}"] = values[int(0.99 * len(values))]
        row["preemptions"] = sum(run.num_preemptions for run in runs)
        row["turns"] = sum(len(run.roles.turns) for run in runs if run.roles)
        row["sent"] = sum(run.roles.num_sent for run in runs if run.roles)
        return row

    def keeps(self, name: str, load: float) -> bool:
        """Whether enough requests keep both targets."""
        return self.at(name, load).get("inside", 0.0) >= SHARE

    def highest(self, name: str, low: float, exact: float = EXACT) -> float:
        """The highest load that a deployment keeps, searched from one on; 0: far less."""
        high = math.inf
        for _ in range(MOST_STEPS):
            if self.keeps(name, low):
                break
            high, low = low, low / STEP
        else:
            return 0.0
        while high == math.inf:
            if self.keeps(name, low * STEP):
                low *= STEP
            else:
                high = low * STEP
        while high > low * exact:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.keeps(name, middle) else (low, middle)
        return low

    def shown(self, name: str, load: float) -> str:
        """A deployment, and the requests per second of a load that it keeps; 0: of none."""
        return f"{name} {self.runs[name, load]['per_second']:.3g}" if load else f"{name} none"

    def best(self, names: Sequence[str], start: float) -> tuple[str, float]:
        """The deployment of these that keeps most, and how much."""
        found, load = "", 0.0
        for name in names:
            if not found or self.keeps(name, load * EXACT):
                highest = self.highest(name, load * EXACT if load else start)
                found, load = (name, highest) if highest > load else (found, load)
        return found, load


def compare(cell: Cell) -> None:
    """Print the row of a cell."""
    own, load = cell.best(SHARED, cell.start)
    if not own:
        print(f"| {cell.text} | nobody keeps the targets |")
        return
    names = [f"roles:{name}" for names in SPLITS.values() for name in names]
    found = {name: cell.at(name, load) for name in names}
    shares = {n: (row.get("inside", 0.0), row.get("lasted", 0.0)) for n, row in found.items()}
    fixed = [name for name in names if "+" in name]
    fixed.sort(key=shares.__getitem__, reverse=True)
    rest = [name for name in names if "+" not in name]
    rest.sort(key=shares.__getitem__, reverse=True)
    lines = [(own, load)]
    for some in (fixed[:SEARCHED], rest[:1]):
        at_least = [(name, cell.highest(name, load)) for name in some]
        lines.append(max(at_least, key=lambda each: each[1]))
    shown = [cell.shown(*line) for line in lines]
    ratios = [f"{at / load:.2f}" for _, at in lines[1:]]
    print(f"| {cell.text} | {' | '.join(shown)} | {' | '.join(ratios)} |", flush=True)


def print_steps(model: Model, num_decodes: int) -> None:
    """Print milliseconds of a step of decodes, and of a prompt, by the devices of a group."""
    whole = target_of(model)
    for num in (1, 2, 4, 8):
        target = replace(whole, machine=replace(whole.machine, num_devices=num))
        deployment = deploy_named(target, "cost" if num > 1 else "dp")
        assert isinstance(deployment, Deployment)
        costs = cost_model(target, deployment)
        works = Work.decode(num_decodes, 4300), Work.prefill(4096)
        took = [min(costs.device_seconds(m, work) for m in costs.layout.modes) for work in works]
        print(num, *(f"{1e3 * seconds:.1f}" for seconds in took))


def main() -> None:
    """Compare in every cell."""
    parser = argparse.ArgumentParser(description="Replay groups with roles.")
    parser.add_argument("cells", nargs="+")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--requests", type=int, default=300, help="of a draw")
    parser.add_argument("--best-case", action="store_true", help="hosts side by side, free moves")
    text = "these alone, commas between several: their highest loads, or a replay at one"
    parser.add_argument("--only", metavar="NAMES[@LOAD]", help=text)
    text = "print what a step of so many decodes, and a prompt, take in the cells' models"
    parser.add_argument("--steps", type=int, metavar="DECODES", help=text)
    parser.add_argument("--azure", type=Path, help="AzureLLMInferenceTrace_code.csv")
    parser.add_argument("--mooncake", type=Path, help="conversation_trace.jsonl")
    given = parser.parse_args()
    for text in given.cells:
        cell = Cell(text, given)
        if given.steps:
            print_steps(cell.model, given.steps)
            continue
        if given.only is None:
            compare(cell)
            continue
        names, is_at, load = given.only.partition("@")
        for name in names.split(","):
            if is_at:
                cell.at(name, float(load))
            else:
                print(f"| {cell.text} | {cell.shown(name, cell.highest(name, cell.start))} |")


if __name__ == "__main__":
    main()
