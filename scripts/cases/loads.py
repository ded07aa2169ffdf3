"""Loads on a real server: most of what it can do, twice that, and bursts; what became of each.

    python scripts/bench.py loads --seconds 60 -- --model smollm2-135m --sp 4 --tp 2

Starts `shiftjax serve` with the flags after `--`, sends every request of the mixture alone (its
text then is the reference), finds the capacity with a closed loop, and then runs

    steady     Poisson arrivals at 70 % of the capacity
    overload   Poisson arrivals at twice the capacity: refusals are quick and say when to retry
    bursts     500 requests in 0.1 s, then nothing until the server is idle, ten times

A row for each: how the requests ended, how many of those that finished differ from their
reference (numbers round differently in other batches, so that one may where its two best tokens
are that close), latency, the longest queue seen. Loopback only.
"""

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cases.load_kit import (
    HELD,
    LONGEST_PROMPT,
    MOST_TOKENS,
    REFUSED,
    Answer,
    Clients,
    ServerProcess,
    capacity,
    metrics_of,
    mixed_body,
    on_server,
)

from serving.bench.load import open_loop
from shiftjax.sim.columns import latencies, percentiles
from shiftjax.sim.trace import arrival_times

NUM_BODIES = 60  # different requests; the load repeats them
CAPACITY_SECONDS = 10.0
BURST_REQUESTS, BURST_SECONDS, NUM_BURSTS = 500, 0.1, 10
POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Known:
    """What is known of a server before the loads."""

    alone: list[Answer]  # what every body gives when nothing else runs
    capacity: float  # requests per second


class Loads:
    """The loads on one server."""

    def __init__(self, senders: Clients, bodies: Sequence[dict[str, Any]]):
        self.senders, self.bodies = senders, bodies
        self.rng = random.Random(1)

    def send(self, number: int) -> Awaitable[Answer]:
        """Send one of the bodies, one way or another."""
        return self.senders.send_any(self.bodies[number % len(self.bodies)], self.rng)

    async def learn(self) -> Known:
        """References and capacity. Raises SystemExit if a request fails alone."""
        alone = [await self.send(number) for number in range(len(self.bodies))]
        ends = {answer.end for answer in alone}
        if ends != {"finished"}:
            raise SystemExit(f"alone, not every request finishes: {ends}")
        return Known(alone, await capacity(self.send, CAPACITY_SECONDS))

    async def arrivals(self, known: Known, times: Sequence[float]) -> dict[str, Any]:
        """Send requests at these times; a row of what became of them."""
        waiting: list[float] = []

        async def watch() -> None:
            while True:
                metrics = await metrics_of(self.senders.target)
                waiting.append(metrics["num_requests_waiting"])
                await asyncio.sleep(POLL_SECONDS)

        watcher = asyncio.create_task(watch())
        answers = await open_loop(self.send, times)
        watcher.cancel()
        return row_of(known, answers) | {"longest_queue": max(waiting)}

    async def held(self) -> float:
        """What the server holds once it is idle: requests and KV."""
        metrics: dict[str, float] = {}
        for _ in range(40):
            metrics = await metrics_of(self.senders.target)
            if not any(metrics[name] for name in HELD):
                break
            await asyncio.sleep(POLL_SECONDS)
        return sum(metrics[name] for name in HELD)


def row_of(known: Known, answers: Sequence[Answer]) -> dict[str, Any]:
    """How many requests ended how, how many differ from their reference, and times."""
    refused = [answer for answer in answers if answer.end == REFUSED]
    done = [(number % len(known.alone), a) for number, a in enumerate(answers) if a.outcome]
    differ = [number for number, a in done if a.outcome != known.alone[number].outcome]
    row: dict[str, Any] = {"ends": dict(Counter(answer.end for answer in answers))}
    row["refused_without_hint"] = sum(not answer.says_when for answer in refused)
    row["greedy_differ"] = sum(number % 2 == 0 for number in differ)
    row["sampled_differ"] = sum(number % 2 for number in differ)
    finished = [answer.sample for _, answer in done]
    gaps = [gap for sample in finished for gap in sample.gaps]
    row |= percentiles("refusal", [answer.sample.completion for answer in refused])
    return row | percentiles("ttft", latencies(finished, "ttft")) | percentiles("itl", gaps)


async def _poisson(
    share: float, seed: int, loads: Loads, known: Known, seconds: float
) -> dict[str, Any]:
    """Send Poisson arrivals at a share of the capacity."""
    return await loads.arrivals(known, arrival_times(share * known.capacity, seconds, seed=seed))


async def bursts(loads: Loads, known: Known, seconds: float) -> dict[str, Any]:
    """Many at once, again and again; `held` is what is left in the silences, which is nothing."""
    del seconds
    times = [BURST_SECONDS * number / BURST_REQUESTS for number in range(BURST_REQUESTS)]
    rows, held = [], 0.0
    for _ in range(NUM_BURSTS):
        rows.append(await loads.arrivals(known, times))
        held += await loads.held()
    ends = sum((Counter(row["ends"]) for row in rows), Counter())
    counted = ("refused_without_hint", "greedy_differ", "sampled_differ")
    sums = {name: sum(row[name] for row in rows) for name in counted}
    worst = {
        name: max((row[name] for row in rows if row[name] is not None), default=None)
        for name in rows[0]
        if name.endswith("seconds") or name == "longest_queue"
    }
    return {"ends": dict(ends), **sums, **worst, "held": held}


LOADS: dict[str, Callable[[Loads, Known, float], Awaitable[dict[str, Any]]]] = {
    "steady": partial(_poisson, 0.7, 2),
    "overload": partial(_poisson, 2.0, 3),
    "bursts": bursts,
}


async def run(
    names: Sequence[str], seconds: float, server: ServerProcess, senders: Clients
) -> dict[str, Any]:
    """Run the loads one after another; `failures` is what should not have been."""
    bodies = [mixed_body(number, LONGEST_PROMPT, MOST_TOKENS) for number in range(NUM_BODIES)]
    loads = Loads(senders, bodies)
    known = await loads.learn()
    rows: dict[str, Any] = {"capacity_requests_per_second": known.capacity}
    for name in names:
        rows[name] = await LOADS[name](loads, known, seconds)
        rows[name]["held"] = await loads.held()
    metrics = await metrics_of(server.target)
    rows |= {n: metrics[f"{n}_total"] for n in ("recompiles_after_warmup", "mode_switches")}
    rows["exit_code"] = await server.stop()
    return rows | {"failures": failures(rows, names)}


def failures(rows: dict[str, Any], names: Sequence[str]) -> list[str]:
    """What should not have been, in words; differing texts are for the reader to judge."""
    found = []
    for name in names:
        row = rows[name]
        allowed = {"finished"} if name == "steady" else {"finished", REFUSED}
        found += [f"{name}: {end}" for end in row["ends"] if end not in allowed]
        found += [f"{name}: {what}" for what in ("refused_without_hint", "held") if row[what]]
    found += ["compiled while serving"] if rows["recompiles_after_warmup"] else []
    return found + (["the end was not clean"] if rows["exit_code"] else [])


OPTIONS = {
    "--seconds": (60.0, "of steady and overload"),
    "--loads": ([*LOADS], {"choices": [*LOADS]}),
    "flags": (str, {"nargs": "*", "help": "of shiftjax serve, after --"}),
}


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield a row for each load; return the rest."""
    found = on_server(args.flags, partial(run, args.loads, args.seconds))
    for name in args.loads:
        yield {"load": name} | found.pop(name)
    return found
