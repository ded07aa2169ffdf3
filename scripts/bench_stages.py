"""Pipeline stages on virtual devices: steps in flight, and static PP and TP by output:input.

    python scripts/bench_stages.py [--quick] [--rounds 3] [--out rows.jsonl]

Random weights of SmolLM2-135M's shapes with 8 layers. Two things are measured:

    micro-batches   PP 4 with 1 (all resident sequences in each step, one step at a time and one
                    planned ahead) and with 4 (a quarter of them in each, four steps in flight)
    degrees         PP 4, PP 2 x TP 2 and TP 4 with prompts and outputs of several lengths

Virtual devices share the host's cores: with 4 devices on 2 cores, at most 2 stages compute at once,
so what is seen is that they do and that nobody waits for the host, not what 4 cards would do. A row
a run is printed (and kept in --out); the last line is JSON: `bytes_equal`, whether every run of the
same requests gave the same tokens, and the milliseconds of a step by micro-batches.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench_machine import describe_machine

from shiftjax.arch.presets import PRESETS
from shiftjax.build import Built, build
from shiftjax.config import EngineConfig
from shiftjax.control.engine import Engine
from shiftjax.control.request import Request, SamplingParams
from shiftjax.control.scheduler import Scheduler
from shiftjax.settings import make_virtual_devices
from shiftjax.weights.random import RandomSource

NUM_DEVICES = 4
NUM_LAYERS = 8
NUM_SEQS = 16
CHUNK_TOKENS = 128
DEGREES = {"pp4": (4, 1), "pp2tp2": (2, 2), "tp4": (1, 4)}
Tokens = dict[str, list[int]]


class Workload(NamedTuple):
    """Requests that come together."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def requests(self) -> list[Request]:
        """The same every time."""
        rng, name = random.Random(0), f"{self.prompt_tokens}-{self.output_tokens}"
        sampling = SamplingParams(temperature=0, max_tokens=self.output_tokens, ignore_eos=True)
        return [
            Request(f"{name}-{i}", [rng.randrange(3, 40_000) for _ in range(length)], sampling)
            for i in range(self.num_requests)
            for length in [rng.randrange(self.prompt_tokens // 2, self.prompt_tokens)]
        ]


def start(pp: int, tp: int) -> Built:
    """An engine on virtual devices, in float32, where tokens do not hang on the degrees."""
    config = EngineConfig.from_options(
        model="random:smollm2-135m",
        devices=NUM_DEVICES,
        pp=pp,
        tp=tp,
        sp=1,
        dtype="float32",
        max_num_seqs=pp * NUM_SEQS,  # so that all resident ones have rows in one step, too
        max_num_batched_tokens=CHUNK_TOKENS,
        token_buckets=(NUM_SEQS // NUM_DEVICES, NUM_SEQS, CHUNK_TOKENS),
        max_model_len=512,
        num_blocks=1024,
        prefix_caching=False,
        cache_dir="none",
    )
    model = replace(PRESETS["smollm2-135m"], num_layers=NUM_LAYERS)
    return build(config, RandomSource(model), lambda *_: None)


def use_micro_batches(built: Built, count: int) -> None:
    """Have each step take 1 / count of the resident sequences; the engine must have no work."""
    (lane,) = built.engine.lanes
    budgets = replace(built.deployment.budgets, max_num_seqs=NUM_SEQS, num_stages=count)
    lane.scheduler = Scheduler(budgets)


def serve(engine: Engine, requests: list[Request]) -> tuple[Tokens, float, int]:
    """(tokens of each request, seconds, steps)."""
    for request in requests:
        engine.add_request(request)
    tokens: Tokens = {request.request_id: [] for request in requests}
    before, begin = sum(engine.stats().steps.values()), time.perf_counter()
    while engine.has_work():
        for event in engine.step(time.monotonic()):
            assert event.error is None, event.error
            tokens[event.request_id] += event.token_ids
    seconds = time.perf_counter() - begin
    return tokens, seconds, sum(engine.stats().steps.values()) - before


def run(
    built: Built, workload: Workload, rounds: int, **what: Any
) -> Iterator[tuple[dict, Tokens]]:
    """A row and the tokens of each round; one before them is not counted."""
    serve(built.engine, workload.requests())
    for number in range(rounds):
        requests = workload.requests()
        tokens, seconds, steps = serve(built.engine, requests)
        num_tokens = sum(map(len, tokens.values()))
        row = what | workload._asdict() | {"round": number, "seconds": seconds, "steps": steps}
        row |= {"step_ms": 1e3 * seconds / steps, "tokens_per_second": num_tokens / seconds}
        yield row, tokens


def measure(workloads: list[Workload], rounds: int) -> Iterator[tuple[dict, Tokens]]:
    """All runs, engine by engine."""
    decodes = Workload(NUM_SEQS, 16, workloads[-1].output_tokens)
    for name, (pp, tp) in DEGREES.items():
        built = start(pp, tp)
        for count in (1, pp) if name == "pp4" else ():
            use_micro_batches(built, count)
            yield from run(built, decodes, rounds, what="micro_batches", name=name, count=count)
        use_micro_batches(built, pp)
        for workload in workloads:
            yield from run(built, workload, rounds, what="degrees", name=name, count=pp)


def summary(rows: list[dict], all_tokens: list[Tokens]) -> dict[str, Any]:
    """What the rows come to: medians over the rounds."""
    first: Tokens = {}
    are_equal = [
        first.setdefault(key, got) == got for one in all_tokens for key, got in one.items()
    ]
    batches = [row for row in rows if row["what"] == "micro_batches"]
    degrees = [row for row in rows if row["what"] == "degrees"]
    kinds = Counter((row["prompt_tokens"], row["output_tokens"], row["name"]) for row in degrees)

    def median(some: list[dict], field: str) -> float:
        return round(statistics.median(row[field] for row in some), 2)

    by_count = {n: [row for row in batches if row["count"] == n] for n in (1, NUM_DEVICES)}
    return {
        "bytes_equal": all(are_equal),
        "step_ms_by_micro_batches": {n: median(each, "step_ms") for n, each in by_count.items()},
        "tokens_per_second_by_micro_batches": {
            n: median(each, "tokens_per_second") for n, each in by_count.items()
        },
        "tokens_per_second": {
            f"{prompt}:{output} {name}": median(
                [
                    row
                    for row in degrees
                    if (row["prompt_tokens"], row["output_tokens"], row["name"])
                    == (prompt, output, name)
                ],
                "tokens_per_second",
            )
            for prompt, output, name in kinds
        },
        "machine": describe_machine(),
    }


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few tokens, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the rows, one line of JSON each")
    arguments = parser.parse_args()
    make_virtual_devices(EngineConfig.from_options(devices=NUM_DEVICES))
    sizes = [(16, 64, 8)] if arguments.quick else [(32, 256, 8), (32, 64, 64), (16, 16, 128)]
    rows, tokens = [], []
    rounds = 1 if arguments.quick else arguments.rounds
    for row, got in measure([Workload(*size) for size in sizes], rounds):
        print(json.dumps(row), flush=True)
        rows.append(row)
        tokens.append(got)
    if arguments.out is not None:
        arguments.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(json.dumps(summary(rows, tokens)))


if __name__ == "__main__":
    main()
