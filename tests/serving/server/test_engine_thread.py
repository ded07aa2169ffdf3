"""The thread that steps the engine: groups do not keep each other's requests waiting."""

import asyncio
import threading

from kit import VOCAB_SIZE

from serving.server.engine_thread import EngineThread
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import make_policy
from shiftjax.core.request import Request, SamplingParams
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.parallel.grid import Group
from shiftjax.sim.echo import EchoRunner


class HeldRunner(EchoRunner):
    """Its steps end when it is let go."""

    def __init__(self, *, is_held: bool):
        super().__init__(VOCAB_SIZE)
        self.let_go = threading.Event()
        if not is_held:
            self.let_go.set()

    def is_ready(self, handle):
        return self.let_go.is_set()

    def fetch(self, handle):
        assert self.let_go.is_set(), "the thread waits for a step that is not ready"
        return super().fetch(handle)


def submit(thread: EngineThread, name: str) -> None:
    request = Request(name, [1, 2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))

    def command(engine: Engine) -> list:
        engine.add_request(request)
        return []

    thread.post(command)


def test_a_group_that_waits_keeps_no_request_of_another_waiting():
    asyncio.run(serve_beside_a_group_that_waits())


async def serve_beside_a_group_that_waits():
    held, free = HeldRunner(is_held=True), HeldRunner(is_held=False)
    config = SchedulerConfig(64, 4, 8, 32)
    lanes = [Lane(Scheduler(config), runner, Group(0, 1).modes) for runner in (held, free)]
    engine = Engine(lanes, make_policy("threshold", 8), RequestLimits(VOCAB_SIZE, 64, 252))
    ended: asyncio.Queue[str] = asyncio.Queue()

    def deliver(turn) -> None:
        for event in turn.events:
            if event.is_last:
                ended.put_nowait(event.request_id)

    thread = EngineThread(engine, asyncio.get_running_loop(), deliver)
    thread.start()
    submit(thread, "held")
    while not held.modes:  # its step is in flight: the thread waits for it
        await asyncio.sleep(0.001)
    submit(thread, "free")
    assert await asyncio.wait_for(ended.get(), 10) == "free"
    began = thread.progress_at
    submit(thread, "also free")
    assert await asyncio.wait_for(ended.get(), 10) == "also free"
    assert thread.progress_at == began  # a watchdog sees the group that makes no progress
    held.let_go.set()
    assert await asyncio.wait_for(ended.get(), 10) == "held"
    assert await asyncio.to_thread(thread.stop)
