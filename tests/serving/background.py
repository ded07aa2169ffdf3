"""A mixed load beside a fault: whoever is not hit by it gets what it gets alone."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cases.load_kit import Answer, Clients, clients, mixed_body
from kit import Running

from serving.bench.client import parse_url

BODIES = [mixed_body(number, 60, 24) for number in range(24)]
RATE = 30.0  # requests per second
LEAST = 5  # that a load is made of, however short the fault


async def with_clients(server: Running, action: Callable[[Clients], Awaitable[Any]]) -> Any:
    """What an action gives that is done with clients of a server."""
    async with clients(parse_url(server.url), server.server.grpc.address) as senders:
        return await action(senders)


class Background:
    """What every request of the mixture gives alone, and what it gives beside something else."""

    def __init__(self, server: Running):
        self._server = server
        self._alone = asyncio.run(with_clients(server, self._one_by_one))

    async def _one_by_one(self, senders: Clients) -> list[Answer]:
        rng = random.Random(1)
        return [await senders.send_any(body, rng) for body in BODIES]

    @contextmanager
    def load(self, *may_end: str) -> Iterator[None]:
        """Poisson arrivals over HTTP and gRPC meanwhile; `may_end`: errors that are expected."""
        stop, answers, errors = threading.Event(), [], []

        async def arrive(senders: Clients) -> None:
            rng, tasks = random.Random(2), []
            while not stop.is_set() or len(tasks) < LEAST:
                body = BODIES[len(tasks) % len(BODIES)]
                tasks.append(asyncio.create_task(senders.send_any(body, rng)))
                await asyncio.sleep(rng.expovariate(RATE))
            answers.extend(await asyncio.gather(*tasks))

        def run() -> None:
            try:
                asyncio.run(with_clients(self._server, arrive))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            self._server.runner.gate.set()
            thread.join()
        assert not errors, errors
        ends = {answer.end for answer in answers if answer.end != "finished"}
        assert all(end.startswith(may_end) for end in ends), ends
        for number, answer in enumerate(answers):
            if answer.end == "finished":
                assert answer.outcome == self._alone[number % len(BODIES)].outcome, number
