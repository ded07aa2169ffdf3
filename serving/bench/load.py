"""Requests over time: at given moments, or as many at once as are asked for. No JAX."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serving.bench.client import Sample, Target, complete
from shiftjax.sim.trace import TraceRequest

TOKEN_IDS = 200  # of prompts; every vocabulary has that many


async def open_loop[T](send: Callable[[int], Awaitable[T]], arrivals: Iterable[float]) -> list[T]:
    """What `send(number)` gives for arrivals at these seconds, whatever became of the others."""
    start = time.perf_counter()

    async def one(number: int, at: float) -> T:
        await asyncio.sleep(start + at - time.perf_counter())
        return await send(number)

    return await asyncio.gather(*(one(number, at) for number, at in enumerate(arrivals)))


async def closed_loop[T](
    send: Callable[[int], Awaitable[T]], num_clients: int, numbers: Iterable[int]
) -> list[T]:
    """The same, in the order of ends: each client sends its next when the one before has ended."""
    shared, results = iter(numbers), []

    async def client() -> None:
        for number in shared:
            results.append(await send(number))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return results


def numbers_for(seconds: float) -> Iterator[int]:
    """0, 1, 2 ... until so many seconds after the first."""
    number, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield number
        number += 1


@dataclass(frozen=True)
class Outcome:
    """All samples of a run, and how long it took in seconds."""

    samples: list[Sample]
    seconds: float

    @property
    def answered(self) -> list[Sample]:
        """The samples without an error."""
        return [sample for sample in self.samples if sample.error is None]


def body_of(request: TraceRequest, number: int, model: str | None) -> dict[str, Any]:
    """A greedy completion of exactly the lengths of a traced request."""
    body = {
        "prompt": request.prompt(number, TOKEN_IDS),
        "max_tokens": request.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return body | ({"model": model} if model else {})


async def run_load(
    target: Target, requests: Sequence[TraceRequest], model: str | None, num_clients: int | None
) -> Outcome:
    """Put load on a server: requests at their times, or those of so many clients."""

    async def send(number: int) -> Sample:
        return await complete(target, body_of(requests[number], number, model))

    start = time.perf_counter()
    if num_clients is None:
        samples = await open_loop(send, [request.arrival_seconds for request in requests])
    else:
        samples = await closed_loop(send, num_clients, range(len(requests)))
    return Outcome(samples, time.perf_counter() - start)
