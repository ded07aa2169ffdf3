"""Four bits beside bfloat16, and llama.cpp, on the same weights: tokens a CPU second, interleaved.

    python scripts/bench.py four_bits --model DIR [--gguf FILE --peer-python PEERS/bin/python]

DIR is a checkpoint of four bits, FILE the same weights as llama.cpp has them, and PEERS an
environment with xllamacpp. Each engine is a process of its own that loads once; only one is active,
and rounds interleave them. CPU seconds are of all threads, so that what else runs matters little.
llama.cpp has one thread, because its threads spin while they wait. Prompts are random tokens.

A row is a round of an engine and a number of sequences; decode is all but the time to the first
tokens.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from cases.workers import OURS, Worker

PROMPT, NEW = 128, 16
ENGINES = {"four bits": "auto", "bfloat16": "none"}
OPTIONS = {
    "--model": ("random:tiny-gpt-oss", "a checkpoint of four bits"),
    "--gguf": (Path, "the same weights for llama.cpp"),
    "--peer-python": (Path, "Python with xllamacpp"),
    "--sequences": [1, 8],
    "--rounds": 5,
}
Row = dict[str, Any]


def start_workers(arguments: argparse.Namespace) -> list[Worker]:
    """Return the engines' processes, loaded."""
    folder, workers = Path(tempfile.mkdtemp(prefix="shiftjax-four-bits-")), []
    for name, quantization in ENGINES.items():
        options = {"quantization": quantization, "max_num_seqs": 8, "max_model_len": 2 * PROMPT}
        options |= {"max_num_batched_tokens": PROMPT, "token_buckets": [8, PROMPT]}
        options = json.dumps(options)
        command = [sys.executable, "shiftjax_worker.py", arguments.model, "--options", options]
        workers.append(Worker(OURS, command, folder / f"{quantization}.log"))
        workers[-1].name = name
    if arguments.gguf is not None:
        command = [arguments.peer_python, "xllamacpp_worker.py", arguments.gguf]
        command += ["--threads", 1]
        workers.append(Worker("llama.cpp", command, folder / "llama.log"))
    return workers


def measure(arguments: argparse.Namespace) -> Generator[Row, None, Row]:
    """Yield rounds; return medians, and ratios within rounds over bfloat16."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    workers, rng = start_workers(arguments), np.random.default_rng(0)
    prompts = rng.integers(3, 200, (max(arguments.sequences), PROMPT)).tolist()
    rows: list[Row] = []
    for number in range(-1, arguments.rounds):
        turn = number % len(workers)
        for count in arguments.sequences:
            for worker in workers[turn:] + workers[:turn]:
                some = prompts[:count]
                first = worker.generate(some, [1] * count)["cpu_seconds"]
                whole = worker.generate(some, [NEW] * count)["cpu_seconds"]
                row = {"round": number, "engine": worker.name, "sequences": count}
                row["prefill"] = round(count * PROMPT / first, 1)
                row["decode"] = round(count * (NEW - 1) / max(1e-9, whole - first), 1)
                yield row
                rows += [row] if number >= 0 else []
    for worker in workers:
        worker.close()
    return {f"{n}, {count}": _sum_up(rows, n, count) for n, count in _kinds(rows)}


def _kinds(rows: list[Row]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row["engine"], row["sequences"]) for row in rows))


def _sum_up(rows: list[Row], engine: str, count: int) -> Row:
    """Medians of an engine, and of its ratio to bfloat16 in the same round."""
    own, plain = (
        [row for row in rows if (row["engine"], row["sequences"]) == (name, count)]
        for name in (engine, "bfloat16")
    )
    result: Row = {}
    for what in ("prefill", "decode"):
        result[what] = statistics.median(row[what] for row in own)
        ratios = (a[what] / b[what] for a, b in zip(own, plain, strict=True))
        result[f"{what}_ratio"] = round(statistics.median(ratios), 3)
    return result
