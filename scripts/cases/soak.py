"""Soak: a real server under half of what it can do, with clients that come and go, for long.

    python scripts/bench.py soak --minutes 30 -- --model smollm2-135m --sp 4 --tp 2

Starts `shiftjax serve` with the flags after `--`, measures what a closed loop gets out of it, then
sends half of that: Poisson arrivals, mixed lengths, a shared prefix, n = 2, schemas, top
log-probabilities, HTTP and gRPC; one request in five is cancelled at some moment. Watched from
outside: memory, file descriptors and threads of the process; programs compiled after the warm-up;
and at the end, idle, that nothing is held. Loopback only.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np
from cases.kit import Row
from cases.load_kit import (
    HELD,
    LONGEST_PROMPT,
    MOST_TOKENS,
    Clients,
    ServerProcess,
    capacity,
    metrics_of,
    mixed_body,
    on_server,
)

from serving.bench.load import open_loop
from shiftjax.sim.trace import arrival_times

CAPACITY_SECONDS = 20.0
WARM_UP_SHARE = 0.25  # of the run, not counted in slopes
SAMPLE_SECONDS = 10.0
CANCELLED = 0.2  # share of requests
WATCHED = ("anonymous_mib", "descriptors", "threads")
OPTIONS = {"--minutes": 30.0, "flags": (str, {"nargs": "*", "help": "of shiftjax serve, after --"})}


async def soak(minutes: float, server: ServerProcess, senders: Clients) -> tuple[list[Row], Row]:
    """Return what was seen of the server after the warm-up, and the judgement."""
    rng, ends, samples = random.Random(1), Counter[str](), list[Row]()

    async def send(number: int) -> None:
        body = mixed_body(number, LONGEST_PROMPT, MOST_TOKENS)
        seconds = rng.uniform(0, 3) if rng.random() < CANCELLED else None
        try:
            ends[(await asyncio.wait_for(senders.send_any(body, rng), seconds)).end] += 1
        except TimeoutError:
            ends["cancelled"] += 1

    async def watch() -> None:
        while True:
            samples.append({"at": time.monotonic(), **server.look()})
            await asyncio.sleep(SAMPLE_SECONDS)

    rate = 0.5 * await capacity(send, CAPACITY_SECONDS)
    watcher = asyncio.create_task(watch())
    await open_loop(send, arrival_times(rate, 60 * minutes))
    watcher.cancel()
    await asyncio.sleep(5)  # connections close
    rest = samples[int(WARM_UP_SHARE * len(samples)) :]
    row: Row = {"minutes": minutes, "requests_per_second": rate, "ends": dict(ends)}
    row |= {"idle": server.look()} | slopes_of(rest)
    metrics = await metrics_of(server.target)
    row |= {"held": {name: metrics[name] for name in HELD}, "exit_code": await server.stop()}
    row |= {n: metrics[f"{n}_total"] for n in ("recompiles_after_warmup", "mode_switches")}
    row |= {n: metrics[f"{n}_total"] for n in ("generation_tokens", "num_preemptions")}
    slopes = row["slope_per_10_minutes"]
    checks = {
        "memory grows": slopes["anonymous_mib"] > 1.0,
        "descriptors grow": slopes["descriptors"] > 3,
        "threads grow": slopes["threads"] > 3,  # pools still grow to their bounds
        "something is held": any(row["held"].values()),
        "compiled while serving": row["recompiles_after_warmup"] > 0,
        "requests failed": set(ends) - {"finished", "cancelled"},
        "the end was not clean": row["exit_code"] != 0,
    }
    return rest, row | {"failures": [words for words, is_so in checks.items() if is_so]}


def slopes_of(samples: list[Row]) -> dict[str, Any]:
    """Return slopes of lines through what was seen, and means over the quarters of it."""
    times = [sample["at"] for sample in samples]
    seen = {name: [sample[name] for sample in samples] for name in WATCHED}
    slopes = {name: float(np.polyfit(times, each, 1)[0] * 600) for name, each in seen.items()}
    parts = {name: np.array_split(each, 4) for name, each in seen.items()}
    quarters = {name: [float(part.mean()) for part in each] for name, each in parts.items()}
    return {"slope_per_10_minutes": slopes, "quarters": quarters}


def measure(args: argparse.Namespace) -> Generator[Row, None, Row]:
    """Yield what was seen of the server after the warm-up; return what it comes to."""
    seen, row = on_server(args.flags, partial(soak, args.minutes))
    yield from seen
    return row
