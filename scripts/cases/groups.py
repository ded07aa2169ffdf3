"""Inter-token latency on one data-parallel group while another computes a prompt.

    python scripts/bench.py groups [--prompt-tokens 1024] [--rounds 5]

Two groups of one virtual device each, SmolLM2-135M with random weights. A request decodes on one
group; then a prompt comes, goes to the other (it has less to do) and is computed in chunks. The
gaps between the first one's tokens are taken `alone`, before the prompt comes, and `beside`, until
its first token. Groups of one engine that wait for each other show gaps as long as a chunk takes;
here the two still share the cores, which groups of GPUs do not. A row is a round, the result has
the medians of the rounds' percentiles.
"""

import argparse
import statistics
import time
from collections.abc import Generator
from typing import Any

import numpy as np

from serving.bench.steps import build_for_all_modes
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.request import Request, SamplingParams
from shiftjax.settings import make_virtual_devices

Row = dict[str, Any]
CHUNK_TOKENS = 256
STEADY_TOKENS = 40  # gaps that count as alone


def start_engine(prompt_tokens: int) -> Engine:
    """Two groups of one device."""
    make_virtual_devices(EngineConfig.from_options(devices=2))
    built = build_for_all_modes(
        "random:smollm2-135m",
        (8, CHUNK_TOKENS),
        dp=2,
        sp=1,
        tp=1,
        max_num_seqs=8,
        max_model_len=prompt_tokens + 600,
        num_blocks=(prompt_tokens + 600) // 8,
        prefix_caching=False,
    )
    return built.engine


def one_round(engine: Engine, number: int, prompt_tokens: int) -> tuple[list[float], list[float]]:
    """Seconds between tokens of a decoding request: (alone, while the other group prefills)."""
    reader, prompt = f"reader-{number}", f"prompt-{number}"
    sampling = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    engine.add_request(Request(reader, [1, 2, 3], sampling))
    times: list[float] = []
    arrival: int | None = None
    while True:
        events = engine.step(time.monotonic())
        if any(event.request_id == reader for event in events):
            times.append(time.monotonic())
        if len(times) == STEADY_TOKENS and arrival is None:
            arrival = len(times)
            tokens = [5 + i % 1000 for i in range(prompt_tokens)]
            one = SamplingParams(temperature=0, max_tokens=1)
            engine.add_request(Request(prompt, tokens, one))
        if arrival is not None and any(event.request_id == prompt for event in events):
            break
    engine.abort(reader)
    while engine.has_work():
        engine.step(time.monotonic())
    gaps = np.diff(times)
    return gaps[5 : arrival - 1].tolist(), gaps[arrival - 1 :].tolist()


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)


def measure(args: argparse.Namespace) -> Generator[Row, None, Row]:
    """Yield percentiles of a round's gaps; return their medians."""
    engine, rows = start_engine(args.prompt_tokens), []
    for number in range(-1, args.rounds):
        alone, beside = one_round(engine, number, args.prompt_tokens)
        row: Row = {}
        for name, gaps in (("alone", alone), ("beside", beside)):
            p50, p99 = np.percentile(gaps, (50, 99)) * 1e3
            row |= {f"{name}_p50_ms": round(p50, 2), f"{name}_p99_ms": round(p99, 2)}
        rows.append(row | {"gaps_beside": len(beside)})
        yield {"round": number} | rows[-1]
    return {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
