"""Throughput beside llama.cpp and transformers: same machine, weights, prompts and clock.

    python scripts/bench.py throughput --peer-python PEERS/bin/python [--rounds 5] [--cases ...]

PEERS is a Python 3.11 environment with torch (CPU), transformers and llama-cpp-python. Each engine
is a worker process of its own that loads once (scripts/peers); only one is ever active, and rounds
interleave them, so that a change of the machine meets all alike. A ratio is taken within each
round, then the median over rounds is reported.

The cases, all greedy, 128-token prompts and 64 new tokens but for the last:

    prefillN   N prompts to their first token           prompt tokens per second
    decodeN    the 63 tokens after it, N sequences      new tokens per second (all minus prefill)
    stream1    decode1: what one user alone sees
    mixed64    64 requests at once, prompts 16..512,    new tokens per second, end to end
               new tokens 16..128, both log-uniform

The physics. A decode step reads every weight once, whatever the batch (SmolLM2-135M in bfloat16:
269 MB), and each sequence's keys and values (23 kB per token of context); it multiplies each weight
by one row per sequence, 2 flops each. So few sequences are bound by memory, many by the GEMMs.
Prefill has hundreds of rows per weight and is bound by the GEMMs: 2 flops per weight and token (the
LM head only for the last), plus attention. `of ceiling` divides by the larger of the two times at
the rates measured in the same run. A row is a round of an engine and a case.
"""

import argparse
import os
import statistics
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases.machine import measure_ceilings, wait_until_idle
from cases.throughput_work import (
    CASES,
    Case,
    Workload,
    least_seconds,
    make_workload,
    timed_tokens,
)
from cases.workers import OURS, Worker, commands
from peers.prepare import default_work_dir, prepare

from shiftjax.arch.config import ModelConfig
from shiftjax.options import ConfigError
from shiftjax.weights.hf_config import read_config

if TYPE_CHECKING:
    from pallas_kernels.measure import Ceilings

# ---------------------------------------------------------------------- measuring


class Budget:
    """Waits for an idle machine as often as asked, for so many seconds in all."""

    def __init__(self, seconds: float) -> None:
        self.left, self.waited = seconds, 0.0

    def wait(self) -> None:
        """Wait, if there is anything left."""
        spent = wait_until_idle(self.left)
        self.left, self.waited = self.left - spent, self.waited + spent


def time_one(worker: Worker, case: Case, work: Workload) -> dict:
    """One round of one engine on one workload: up to the first tokens, and all of it."""
    record: dict = {"engine": worker.name, "num_requests": case.num_requests}
    reply: dict = {}
    if case.metric != "total":
        reply = worker.generate(work.prompts, [1] * case.num_requests)
        record["first_seconds"] = reply["seconds"]
    if case.metric != "prefill":
        reply = worker.generate(work.prompts, work.max_tokens)
        record["full_seconds"] = reply["seconds"]
    return record | {key: reply[key] for key in ("token_ids", "load", "other_cores")}


def merged_cases(names: list[str]) -> list[Case]:
    """One measurement per batch size: a decode case times the prefill of the same size too."""
    rank = {"prefill": 0, "decode": 1, "total": 2}
    cases: dict[int, Case] = {}
    for name in names:
        case = CASES[name]
        known = cases.get(case.num_requests)
        if known is None or rank[case.metric] > rank[known.metric]:
            cases[case.num_requests] = case
    return list(cases.values())


def run_rounds(
    workers: list[Worker], names: list[str], num_rounds: int, budget: Budget
) -> Iterator[dict]:
    """Interleave the engines in every round, each round starting with another one."""
    cases = [(case, make_workload(case)) for case in merged_cases(names)]
    for worker in workers:
        for case, work in cases:  # compile, allocate, fault pages in
            worker.generate(work.prompts, [2] * case.num_requests)
    for number in range(num_rounds):
        budget.wait()
        for case, work in cases:
            turn = number % len(workers)
            for worker in workers[turn:] + workers[:turn]:
                yield {"round": number} | time_one(worker, case, work)


def of_workload(records: list[dict], case: Case, engine: str) -> list[dict]:
    """One engine's records of the requests of a case, one per round."""
    wanted = (engine, case.num_requests)
    return [record for record in records if (record["engine"], record["num_requests"]) == wanted]


def rates(records: list[dict], name: str, engine: str, work: Workload) -> list[float]:
    """Tokens per second of a case in every round.

    The prefill that decode subtracts is the median over rounds, since one slow prefill must not
    make a decode look fast.
    """
    case, mine = CASES[name], of_workload(records, CASES[name], engine)
    num_tokens = timed_tokens(case, work)
    if case.metric == "total":
        return [num_tokens / record["full_seconds"] for record in mine]
    if case.metric == "prefill":
        return [num_tokens / record["first_seconds"] for record in mine]
    prefill = statistics.median(record["first_seconds"] for record in mine)
    seconds = [record["full_seconds"] - prefill for record in mine]
    if min(seconds) <= 0:
        raise RuntimeError(
            f"{engine} took {prefill:.2f} s to the first tokens of {name}, but less in all in some "
            "round: the machine was too busy to measure; run again"
        )
    return [num_tokens / each for each in seconds]


# ---------------------------------------------------------------------- reporting


def agreement(records: list[dict], num_requests: int, engine: str, reference: str) -> float:
    """Share of tokens up to the first difference: engines with the same weights agree mostly.

    bfloat16 rounds differently in each, and after one close call a continuation is another text.
    """
    tokens = {r["engine"]: r["token_ids"] for r in records if r["num_requests"] == num_requests}
    same = total = 0
    for ours, theirs in zip(tokens[engine], tokens[reference], strict=True):
        total += len(ours)
        same += next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]),
            len(ours),
        )
    return same / total


def summarise(
    records: list[dict],
    names: list[str],
    engines: list[str],
    model: ModelConfig,
    ceilings: "Ceilings",
) -> dict:
    """Medians and ratios: `{case: {engine: {...}}}`; ratios are the first engine over this one."""
    summary: dict = {}
    for name in names:
        case, summary[name] = CASES[name], {}
        work = make_workload(case)
        ceiling = timed_tokens(case, work) / least_seconds(case.metric, work, model, ceilings)
        baseline = rates(records, name, engines[0], work)
        for engine in engines:
            of_engine = rates(records, name, engine, work)
            mine = of_workload(records, case, engine)
            ratios = [a / b for a, b in zip(baseline, of_engine, strict=True)]
            summary[name][engine] = {
                "tokens_per_second": round(statistics.median(of_engine), 1),
                "rounds": [round(rate, 1) for rate in of_engine],
                "ratio": round(statistics.median(ratios), 3),
                "of_ceiling": round(statistics.median(of_engine) / ceiling, 3),
                "agreement": round(agreement(records, case.num_requests, engine, engines[0]), 3),
                "load": max(record["load"] for record in mine),
                "other_cores": max(record["other_cores"] for record in mine),
            }
    return summary


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    names = OURS, "llama.cpp", "transformers"
    parser.add_argument("--peer-python", type=Path, help="Python of the peers' environment")
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work-dir", type=Path, default=default_work_dir(), help="for the weights")
    parser.add_argument("--wait-idle", type=float, default=120, help="seconds in all; 0: don't")
    parser.add_argument("--shiftjax", default="{}", help="more arguments of LLM, as JSON")
    parser.add_argument("--llama-cpp", default="", help="more options of its worker")


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield rounds without their tokens; return the summary."""
    if args.peer_python is None and [*args.engines] != [OURS]:
        raise ConfigError(["--peer-python names the Python with llama-cpp-python, transformers"])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where the peers run
    gguf, directory = prepare(args.work_dir)
    ceilings = measure_ceilings()
    all_commands = commands(args, gguf, directory)
    workers = [
        Worker(name, all_commands[name], args.work_dir / f"{name}.log") for name in args.engines
    ]
    budget, records = Budget(args.wait_idle), []
    for record in run_rounds(workers, args.cases, args.rounds, budget):
        records.append(record)
        yield {name: value for name, value in record.items() if name != "token_ids"}
    for worker in workers:
        worker.close()
    again = measure_ceilings()  # at both ends: what else runs then only lowers a ceiling
    ceilings = ceilings._make(map(max, zip(ceilings, again, strict=True)))
    return {
        "model": directory.name,
        "engines": {worker.name: worker.description for worker in workers},
        "ceilings": ceilings._asdict(),
        "waited_seconds": round(budget.waited, 1),
        "cases": summarise(records, args.cases, args.engines, read_config(directory), ceilings),
    }
