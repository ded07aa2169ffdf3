"""Requests over time: a schedule, or as many at once as are asked for. No JAX."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.bench.client import Sample, Target, complete
from shiftjax.sim.trace import TraceRequest

TOKEN_IDS = 200  # of prompts; every vocabulary has that many


@dataclass(frozen=True)
class Outcome:
    """All samples of a run, and how long it took in seconds."""

    samples: list[Sample]
    seconds: float


def body_of(request: TraceRequest, number: int, model: str | None) -> dict[str, Any]:
    """A greedy completion of exactly the lengths of a traced request."""
    body = {
        "prompt": request.prompt(number, TOKEN_IDS),
        "max_tokens": request.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return body | ({"model": model} if model else {})


async def replay(target: Target, requests: Sequence[TraceRequest], model: str | None) -> Outcome:
    """Open loop: every request at its time, whatever became of the others."""
    start = time.perf_counter()

    async def one(number: int, request: TraceRequest) -> Sample:
        await asyncio.sleep(start + request.arrival_seconds - time.perf_counter())
        return await complete(target, body_of(request, number, model))

    tasks = [asyncio.create_task(one(number, each)) for number, each in enumerate(requests)]
    samples = await asyncio.gather(*tasks)
    return Outcome(samples, time.perf_counter() - start)


async def closed_loop(
    target: Target, requests: Sequence[TraceRequest], num_clients: int, model: str | None
) -> Outcome:
    """Closed loop: each of the clients sends its next request when the one before has ended."""
    start = time.perf_counter()
    numbered = iter(enumerate(requests))
    samples: list[Sample] = []

    async def client() -> None:
        for number, request in numbered:
            samples.append(await complete(target, body_of(request, number, model)))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return Outcome(samples, time.perf_counter() - start)
