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
import time
from collections.abc import Generator

import numpy as np
from cases.kit import Row, greedy, medians

from serving.bench.steps import build_for_all_modes
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.settings import make_virtual_devices

CHUNK_TOKENS = 256
STEADY_TOKENS = 40  # gaps that count as alone
OPTIONS = {"--prompt-tokens": 1024, "--rounds": 5}


def start_engine(prompt_tokens: int) -> Engine:
    """Return an engine of two groups of one device."""
    make_virtual_devices(EngineConfig.from_options(devices=2))
    length = prompt_tokens + 600
    sizes = {"max_num_seqs": 8, "max_model_len": length, "num_blocks": length // 8}
    sizes |= {"dp": 2, "sp": 1, "tp": 1, "prefix_caching": False}
    return build_for_all_modes("random:smollm2-135m", (8, CHUNK_TOKENS), **sizes).engine


def one_round(engine: Engine, number: int, prompt_tokens: int) -> Row:
    """Return percentiles of the milliseconds between tokens of a decoding request."""
    reader, prompt = f"reader-{number}", f"prompt-{number}"
    engine.add_request(greedy(reader, [1, 2, 3], 500))
    times: list[float] = []
    tokens = [5 + i % 1000 for i in range(prompt_tokens)]
    is_over = is_asked = False
    while not is_over:
        names = {event.request_id for event in engine.step(time.monotonic())}
        times += [time.monotonic()] if reader in names else []
        is_over = prompt in names
        if len(times) == STEADY_TOKENS and not is_asked:
            is_asked = True
            engine.add_request(greedy(prompt, tokens, 1))
    engine.abort(reader)
    while engine.has_work():
        engine.step(time.monotonic())
    gaps, row = 1e3 * np.diff(times), {}
    split = {"alone": gaps[5 : STEADY_TOKENS - 1], "beside": gaps[STEADY_TOKENS - 1 :]}
    for name, some in split.items():
        row |= {f"{name}_p{p}_ms": round(float(np.percentile(some, p)), 2) for p in (50, 99)}
    return row | {"gaps_beside": len(split["beside"])}


def measure(args: argparse.Namespace) -> Generator[Row, None, Row]:
    """Yield percentiles of a round's gaps; return their medians."""
    engine, rows = start_engine(args.prompt_tokens), []
    for number in range(-1, args.rounds):
        rows.append(one_round(engine, number, args.prompt_tokens))
        yield {"round": number} | rows[-1]
    return medians(rows[1:])
