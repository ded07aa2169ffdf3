"""Pipeline stages on virtual devices: steps in flight, static PP and TP, and phases of both.

    python scripts/bench.py phases [--quick] [--rounds 3]

Random weights of SmolLM2-135M's shapes with 8 layers. Three things are measured:

    micro-batches   PP 4 with 1 (all resident sequences in each step, one step at a time and one
                    planned ahead) and with 4 (a quarter of them in each, four steps in flight)
    degrees         PP 4, PP 2 x TP 2 and TP 4 with prompts and outputs of several lengths
    phases          prompts in PP 4 and decodes in TP 4, in turns, with the same requests: the host
                    holds all prompts (one switch), or half of them (several)

All engines are there at once, and their rounds are interleaved. Virtual devices share the host's
cores: with 4 devices on 2 cores, at most 2 stages compute at once, so what is seen is that they do,
that nobody waits for the host, and what a switch takes here, not what 4 cards would do. A row is a
run; its `cpu_seconds` are of all threads, and say least of what else the machine does. The result
has `bytes_equal`, whether every run of the same requests gave the same tokens, and the milliseconds
of a step by micro-batches.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from cases.kit import greedy, random_engine, spent

from serving.bench.steps import answers
from shiftjax.arch.presets import PRESETS
from shiftjax.build import Built
from shiftjax.core.engine import Engine
from shiftjax.core.request import Request
from shiftjax.core.scheduler import Scheduler
from shiftjax.host_tier.extents import HostBlocks
from shiftjax.parallel.degrees import parse_degrees
from shiftjax.phases.resharding import Resharding, ReshardingState

NUM_DEVICES = 4
NUM_LAYERS = 8
NUM_SEQS = 16
CHUNK_TOKENS = 128
DEGREES = {"pp4": 4, "pp2tp2": 2, "tp4": 1}  # with as many micro-batches
PAIR = "pp4:tp4"
HOST_SHARES = (1.0, 0.5)
Tokens = dict[str, list[int]]


class Workload(NamedTuple):
    """Requests that come together."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def requests(self) -> list[Request]:
        """The same every time."""
        rng, name = random.Random(0), f"{self.prompt_tokens}-{self.output_tokens}"
        requests = []
        for i in range(self.num_requests):
            length = rng.randrange(self.prompt_tokens // 2, self.prompt_tokens)
            prompt = [rng.randrange(3, 40_000) for _ in range(length)]
            requests.append(greedy(f"{name}-{i}", prompt, self.output_tokens))
        return requests


class Case(NamedTuple):
    """What a row is about."""

    what: str
    name: str  # degrees, or a pair of them
    num_parts: int  # micro-batches; of phases, those of prefill
    workload: Workload
    max_num_seqs: int = NUM_SEQS
    host_share: float = 0.0  # of all prompts, what the host holds between phases


def start(name: str) -> Built:
    """An engine on virtual devices, in float32, where tokens do not hang on the degrees."""
    is_pair = ":" in name
    degrees = {"phases": name} if is_pair else {"sp": 1} | parse_degrees(name)._asdict()
    sizes = {"host_memory": "1GiB"} if is_pair else {}
    # All resident sequences of a pipeline have rows in one step, too.
    sizes |= {"max_num_seqs": degrees.get("pp", 1) * NUM_SEQS, "num_blocks": 1024}
    sizes |= {"max_num_batched_tokens": CHUNK_TOKENS, "max_model_len": 512, "cache_dir": "none"}
    sizes |= {"token_buckets": (NUM_SEQS // NUM_DEVICES, NUM_SEQS, CHUNK_TOKENS)}
    sizes |= {"dtype": "float32", "prefix_caching": False, "devices": NUM_DEVICES}
    model = replace(PRESETS["smollm2-135m"], num_layers=NUM_LAYERS)
    return random_engine(model, **degrees, **sizes)


def prepare(built: Built, case: Case) -> None:
    """Give an engine without work the micro-batches and the host memory of a case."""
    engine = built.engine
    if engine.topology.find(Resharding) is None:
        budgets = built.deployment.budgets
        seqs = {"max_num_seqs": case.max_num_seqs, "num_micro_batches": case.num_parts}
        engine.lanes[0].scheduler = Scheduler(replace(budgets, **seqs))
        return
    host = engine.lanes[0].scheduler.tables.tier
    assert isinstance(host, HostBlocks)
    lengths = [len(request.prompt_token_ids) for request in case.workload.requests()]
    blocks = sum(-(-length // host.block_size) for length in lengths)
    host.memory.num_bytes = round(case.host_share * blocks) * host.block_bytes


def serve(engine: Engine, requests: list[Request]) -> tuple[Tokens, dict[str, Any]]:
    """Tokens of each request; seconds of the clock and of all threads, steps, changes of phase."""
    before = engine.stats()
    tokens, taken = spent(lambda: answers(engine, requests))
    row: dict[str, Any] = taken
    after = engine.stats()
    row["steps"] = sum(after.steps.values()) - sum(before.steps.values())
    old, new = before.find(ReshardingState), after.find(ReshardingState)
    if old is not None and new is not None:
        row["switches"] = new.num_switches - old.num_switches
        row["switch_seconds"] = new.switch_seconds - old.switch_seconds
    return tokens, row


def cases_of(workloads: list[Workload]) -> list[Case]:
    """All cases, in the order in which each round runs them."""
    decodes = Workload(NUM_SEQS, 16, workloads[-1].output_tokens)
    return [
        *(Case("micro_batches", "pp4", count, decodes) for count in (1, NUM_DEVICES)),
        *(Case("degrees", *each, workload) for workload in workloads for each in DEGREES.items()),
        *(
            Case("phases", PAIR, NUM_DEVICES, workload, host_share=share)
            for workload in workloads
            for share in HOST_SHARES
        ),
    ]


OPTIONS = {"--quick": (False, "few tokens, one round"), "--rounds": 3}


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield a row for each run; return the summary."""
    sizes = [(16, 64, 8)] if args.quick else [(32, 256, 8), (32, 64, 64), (16, 16, 128)]
    rows, tokens, engines = [], [], {name: start(name) for name in (*DEGREES, PAIR)}
    rounds = range(-1, 1 if args.quick else args.rounds)
    for number, case in product(rounds, cases_of([Workload(*size) for size in sizes])):
        built = engines[case.name]
        prepare(built, case)
        got, row = serve(built.engine, case.workload.requests())
        what = {"what": case.what, "name": case.name, "count": case.num_parts, "round": number}
        what |= {"host_share": case.host_share} if case.host_share else {}
        rate = sum(map(len, got.values())) / row["seconds"]
        row |= {"step_ms": 1e3 * row["seconds"] / row["steps"], "tokens_per_second": rate}
        if number >= 0:
            rows.append(what | case.workload._asdict() | row)
            tokens.append(got)
            yield rows[-1]
    return summary(rows, tokens)


def summary(rows: list[dict], all_tokens: list[Tokens]) -> dict[str, Any]:
    """Return what the rows come to: medians over the rounds."""
    first: Tokens = {}
    are_equal = [
        first.setdefault(key, got) == got for one in all_tokens for key, got in one.items()
    ]
    batches = [row for row in rows if row["what"] == "micro_batches"]
    others = [row for row in rows if row["what"] != "micro_batches"]
    both, rate = lambda row: row["count"], "tokens_per_second"
    return {
        "bytes_equal": all(are_equal),
        "step_ms_by_micro_batches": _medians(batches, both, "step_ms"),
        "tokens_per_second_by_micro_batches": _medians(batches, both, rate),
        **{
            field: _medians([row for row in others if field in row], _case_of, field)
            for field in (rate, "cpu_seconds", "switches", "switch_seconds")
        },
    }


def _case_of(row: dict) -> str:
    """Return a case in words: prompt:output tokens, degrees, and what the host holds."""
    held = f" host {row['host_share']:.0%}" if "host_share" in row else ""
    return f"{row['prompt_tokens']}:{row['output_tokens']} {row['name']}{held}"


def _medians(rows: list[dict], key: Callable[[dict], Any], field: str) -> dict[Any, float]:
    """Return the medians of a field by a key of rows."""
    found: dict[Any, list[float]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row.get(field, 0.0))
    return {name: round(statistics.median(each), 3) for name, each in found.items()}
