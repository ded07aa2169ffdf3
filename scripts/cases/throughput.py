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
import sys
from collections.abc import Generator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases.machine import measure_ceilings, wait_until_idle
from cases.throughput_work import CASES, Case, Workload, least_seconds, make_workload, timed_tokens
from cases.workers import OURS, Worker
from peers.prepare import default_work_dir, prepare

from shiftjax.arch.config import ModelConfig
from shiftjax.options import ConfigError
from shiftjax.weights.hf_config import read_config

if TYPE_CHECKING:
    from pallas_kernels.measure import Ceilings

Row = dict[str, Any]
ENGINES = [OURS, "llama.cpp", "transformers"]
OPTIONS = {
    "--peer-python": (Path, "Python of the peers' environment"),
    "--engines": (ENGINES, {"choices": ENGINES}),
    "--cases": ([*CASES], {"choices": CASES}),
    "--rounds": 5,
    "--threads": os.cpu_count() or 1,
    "--work-dir": (Path(default_work_dir()), {"type": Path, "help": "for the weights"}),
    "--wait-idle": (120.0, "seconds in all; 0: don't"),
    "--shiftjax": ("{}", "more arguments of LLM, as JSON"),
    "--llama-cpp": ("", "more options of its worker"),
}


def start_workers(args: argparse.Namespace, gguf: Path, directory: Path) -> list[Worker]:
    """Return the engines' processes, loaded."""
    threads = ["--threads", args.threads]
    commands: dict[str, list[Any]] = {
        OURS: ["shiftjax_worker.py", directory, "--options", args.shiftjax],
        "llama.cpp": ["llama_cpp_worker.py", gguf, *threads, *args.llama_cpp.split()],
        "transformers": ["transformers_worker.py", directory, *threads],
    }
    pythons = {name: sys.executable if name == OURS else args.peer_python for name in commands}
    return [
        Worker(name, [pythons[name], *commands[name]], args.work_dir / f"{name}.log")
        for name in args.engines
    ]


def time_one(worker: Worker, work: Workload, metrics: set[str]) -> Row:
    """Run one round of one engine on one workload: up to the first tokens, and all of it."""
    count = len(work.prompts)
    record, reply = {"engine": worker.name, "num_requests": count}, Row()
    if metrics - {"total"}:
        reply = worker.generate(work.prompts, [1] * count)
        record["first_seconds"] = reply["seconds"]
    if metrics - {"prefill"}:
        reply = worker.generate(work.prompts, work.max_tokens)
        record["full_seconds"] = reply["seconds"]
    return record | {key: reply[key] for key in ("token_ids", "load", "other_cores")}


def rates(mine: Sequence[Row], case: Case, num_tokens: int) -> list[float]:
    """Return tokens per second of a case in every round, of one engine's records of it.

    The prefill that decode subtracts is the median over rounds, since one slow prefill must not
    make a decode look fast.
    """
    if case.metric == "prefill":
        return [num_tokens / record["first_seconds"] for record in mine]
    is_decode = case.metric == "decode"
    prefill = statistics.median(r["first_seconds"] for r in mine) if is_decode else 0.0
    seconds = [record["full_seconds"] - prefill for record in mine]
    if min(seconds) <= 0:
        raise RuntimeError(
            f"{mine[0]['engine']} took {prefill:.2f} s to the first tokens, but less in all in "
            "some round: the machine was too busy to measure; run again"
        )
    return [num_tokens / each for each in seconds]


def agreement(tokens: Sequence[list[int]], reference: Sequence[list[int]]) -> float:
    """Return the share of tokens up to the first difference of each request.

    bfloat16 rounds differently in each engine; after one close call a continuation is another text.
    """
    same = total = 0
    for ours, theirs in zip(tokens, reference, strict=True):
        pairs = enumerate(zip(ours, theirs, strict=True))
        same += next((i for i, (one, other) in pairs if one != other), len(ours))
        total += len(ours)
    return same / total


def summarise(records: list[Row], names: list[str], model: ModelConfig, peak: "Ceilings") -> Row:
    """Return medians and ratios, `{case: {engine: {...}}}`: the first engine over this one."""
    summary: Row = {}
    for name in names:
        case, work = CASES[name], make_workload(CASES[name])
        num_tokens = timed_tokens(case, work)
        ceiling = num_tokens / least_seconds(case.metric, work, model, peak)
        by_engine: dict[str, list[Row]] = {}
        for record in sorted(records, key=lambda record: record["round"]):
            if record["num_requests"] == case.num_requests:
                by_engine.setdefault(record["engine"], []).append(record)
        engines = [record["engine"] for record in records[: len(by_engine)]]  # of the first round
        first = by_engine[engines[0]]
        baseline, summary[name] = rates(first, case, num_tokens), {}
        for engine in engines:
            mine = by_engine[engine]
            found = rates(mine, case, num_tokens)
            ratios = [a / b for a, b in zip(baseline, found, strict=True)]
            likeness = agreement(mine[-1]["token_ids"], first[-1]["token_ids"])
            summary[name][engine] = {
                "tokens_per_second": round(statistics.median(found), 1),
                "rounds": [round(rate, 1) for rate in found],
                "ratio": round(statistics.median(ratios), 3),
                "of_ceiling": round(statistics.median(found) / ceiling, 3),
                "agreement": round(likeness, 3),
                "load": max(record["load"] for record in mine),
                "other_cores": max(record["other_cores"] for record in mine),
            }
    return summary


def measure(args: argparse.Namespace) -> Generator[Row, None, Row]:
    """Yield rounds without their tokens; return the summary."""
    if args.peer_python is None and [*args.engines] != [OURS]:
        raise ConfigError(["--peer-python names the Python with llama-cpp-python, transformers"])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where the peers run
    gguf, directory = prepare(args.work_dir)
    ceilings, left = measure_ceilings(), args.wait_idle
    workers = start_workers(args, gguf, directory)
    metrics: dict[int, set[str]] = {}  # of requests at once: what is timed of them
    for case in map(CASES.__getitem__, args.cases):
        metrics.setdefault(case.num_requests, set()).add(case.metric)
    works = {n: make_workload(Case(max(each), n)) for n, each in metrics.items()}
    for worker, work in product(workers, works.values()):  # compile, allocate, fault pages in
        worker.generate(work.prompts, [2] * len(work.prompts))
    records: list[Row] = []
    for number in range(args.rounds):
        left -= wait_until_idle(left)
        turn = number % len(workers)
        for size, worker in product(works, workers[turn:] + workers[:turn]):
            records.append({"round": number} | time_one(worker, works[size], metrics[size]))
            yield {name: value for name, value in records[-1].items() if name != "token_ids"}
    for worker in workers:
        worker.close()
    again = measure_ceilings()  # at both ends: what else runs then only lowers a ceiling
    ceilings = ceilings._make(map(max, zip(ceilings, again, strict=True)))
    return {
        "model": directory.name,
        "engines": {worker.name: worker.description for worker in workers},
        "ceilings": ceilings._asdict(),
        "waited_seconds": round(args.wait_idle - left, 1),
        "cases": summarise(records, args.cases, read_config(directory), ceilings),
    }
