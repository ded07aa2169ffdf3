"""Many requests at once leave the event loop to health, and keep their order."""

import asyncio
from typing import Any

from serving.http.guard import Guard
from serving.http.turns import MOST, Turns


def ask(guard: Guard, path: str) -> asyncio.Task[None]:
    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        pass

    scope: dict[str, Any] = {"type": "http", "path": path, "method": "POST"}
    scope |= {"http_version": "1.1", "headers": [(b"host", b"localhost")]}
    return asyncio.create_task(guard(scope, receive, send))


def test_health_does_not_wait_for_all_that_came_before():
    came: list[str] = []

    async def app(scope, receive, send):
        came.append(scope["path"])

    async def run() -> None:
        guard = Guard(app, (), None, lambda error: None)
        paths = [f"/v1/{number}" for number in range(20 * MOST)]
        await asyncio.gather(*(ask(guard, path) for path in (*paths, "/health/live")))
        assert came.index("/health/live") <= 2 * MOST
        came.remove("/health/live")
        assert came == paths

    asyncio.run(run())


def test_few_need_not_wait():
    """Coroutines that never give up the loop end with their first step."""

    async def run() -> None:
        for _ in range(3):
            turns = Turns()
            for _ in range(MOST):
                try:
                    turns.pass_by().send(None)
                except StopIteration:
                    continue
                raise AssertionError("it waits")
            await asyncio.sleep(0)

    asyncio.run(run())


def test_who_leaves_while_waiting_holds_nobody_up():
    async def run() -> None:
        turns = Turns()
        tasks = [asyncio.create_task(turns.pass_by()) for _ in range(5 * MOST)]
        await asyncio.sleep(0)
        for task in tasks[MOST : 4 * MOST]:
            task.cancel()
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(each is None for each in results) == 2 * MOST
        async with asyncio.timeout(10):
            await turns.pass_by()
        assert not turns._waiting

    asyncio.run(run())
