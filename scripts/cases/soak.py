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
from typing import Any

import numpy as np
from cases.load_kit import (
    HELD,
    LONGEST_PROMPT,
    MOST_TOKENS,
    ServerProcess,
    capacity,
    clients,
    metrics_of,
    mixed_body,
)

from serving.bench.load import open_loop
from shiftjax.sim.trace import arrival_times

CAPACITY_SECONDS = 20.0
WARM_UP_SHARE = 0.25  # of the run, not counted in slopes
SAMPLE_SECONDS = 10.0
CANCELLED = 0.2  # share of requests
WATCHED = ("anonymous_mib", "descriptors", "threads")


class Soak:
    """The load, and what has been seen of the server."""

    def __init__(self, server: ServerProcess):
        self.server, self.rng = server, random.Random(1)
        self.ends: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []

    async def _send(self, number: int) -> None:
        """Send a request, perhaps give it up, and count how it ended."""
        body = mixed_body(number, LONGEST_PROMPT, MOST_TOKENS)
        seconds = self.rng.uniform(0, 3) if self.rng.random() < CANCELLED else None
        try:
            answer = await asyncio.wait_for(self.senders.send_any(body, self.rng), seconds)
            self.ends[answer.end] += 1
        except TimeoutError:
            self.ends["cancelled"] += 1

    async def run(self, seconds: float) -> float:
        """The whole soak; returns the rate of the load in requests per second."""
        await self.server.wait_until_ready()
        async with clients(self.server.target, self.server.grpc_address) as self.senders:
            rate = 0.5 * await capacity(self._send, CAPACITY_SECONDS)
            watcher = asyncio.create_task(self._watch())
            await open_loop(self._send, arrival_times(rate, seconds))
            watcher.cancel()
        return rate

    async def _watch(self) -> None:
        while True:
            self.samples.append({"at": time.monotonic(), **self.server.look()})
            await asyncio.sleep(SAMPLE_SECONDS)

    @property
    def after_warm_up(self) -> list[dict[str, float]]:
        """What was seen in the part of the run that counts."""
        return self.samples[int(WARM_UP_SHARE * len(self.samples)) :]


def slope_per_10_minutes(samples: list[dict[str, float]], name: str) -> float:
    """Of a line through what was seen."""
    return float(np.polyfit([s["at"] for s in samples], [s[name] for s in samples], 1)[0] * 600)


def quarters(samples: list[dict[str, float]], name: str) -> list[float]:
    """Means over the quarters of what was seen."""
    return [float(np.mean(part)) for part in np.array_split([s[name] for s in samples], 4)]


async def soak(run: Soak, minutes: float) -> dict[str, Any]:
    """Run and judge; `failures` is what should not have been."""
    rate = await run.run(60 * minutes)
    await asyncio.sleep(5)  # connections close
    idle, metrics = run.server.look(), await metrics_of(run.server.target)
    held = {name: metrics[name] for name in HELD}
    rest = run.after_warm_up
    slopes = {name: slope_per_10_minutes(rest, name) for name in WATCHED}
    row = {"minutes": minutes, "requests_per_second": rate, "ends": dict(run.ends), "idle": idle}
    row |= {"slope_per_10_minutes": slopes}
    row |= {"quarters": {name: quarters(rest, name) for name in WATCHED}}
    row |= {"held": held, "exit_code": await run.server.stop()}
    row |= {n: metrics[f"{n}_total"] for n in ("recompiles_after_warmup", "mode_switches")}
    row |= {n: metrics[f"{n}_total"] for n in ("generation_tokens", "num_preemptions")}
    checks = {
        "memory grows": slopes["anonymous_mib"] > 1.0,
        "descriptors grow": slopes["descriptors"] > 3,
        "threads grow": slopes["threads"] > 3,  # pools still grow to their bounds
        "something is held": any(held.values()),
        "compiled while serving": row["recompiles_after_warmup"] > 0,
        "requests failed": set(run.ends) - {"finished", "cancelled"},
        "the end was not clean": row["exit_code"] != 0,
    }
    return row | {"failures": [words for words, is_so in checks.items() if is_so]}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("flags", nargs="*", help="of shiftjax serve, after --")


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield what was seen of the server after the warm-up; return what it comes to."""
    server = ServerProcess(args.flags)
    load = Soak(server)
    try:
        row = asyncio.run(soak(load, args.minutes))
    finally:
        server.kill()
    yield from load.after_warm_up
    return row
