"""Requests over instances: every text is answered once, whatever is cancelled, stalls or dies."""

import asyncio
import random
import threading
from collections import Counter

import numpy as np
import pytest
from embed_kit import HIDDEN, SHAPE, SumRunner, embedding_of

from serving.server.async_embedder import AsyncEmbedder
from serving.server.errors import ServeError
from serving.server.options import ServerOptions

RUNNER_SHAPE = SHAPE._replace(hidden_size=HIDDEN)
VOCAB_SIZE = 1000


class CountingEmbedder(AsyncEmbedder):
    """Counts how often each text came out."""

    def __init__(self, runner, **options):
        self.taken = Counter()
        super().__init__(runner, VOCAB_SIZE, (), ServerOptions(**options))

    def take(self, key, embedding, error):
        self.taken[key] += 1
        super().take(key, embedding, error)

    async def close(self) -> bool:
        assert max(self.taken.values(), default=1) == 1, "a text came out twice"
        counts = self.counts
        assert counts.accepted == counts.finished + counts.cancelled + counts.failed
        assert not (self.handles or self._places or self._instances.has_work)
        assert all(instance.num_tokens == 0 for instance in self._instances._all)
        return await super().close()


class InstanceRunner(SumRunner):
    """What is told of a thread happens in it: `dies` at its n-th step, `stalls` until its gate."""

    def __init__(self, dies: dict[str, int] | None = None, stalls: tuple[str, ...] = ()):
        super().__init__(RUNNER_SHAPE)
        self.dies = dies or {}
        self.gates = {name: threading.Event() for name in stalls}
        self.steps = Counter()

    def fetch(self, handle):
        name = threading.current_thread().name
        self.steps[name] += 1
        if self.steps[name] == self.dies.get(name):
            raise SystemExit  # which nothing below the thread catches
        if name in self.gates:
            self.gates[name].wait()
        return super().fetch(handle)


def texts_of(random_: random.Random, count: int) -> list[list[int]]:
    return [random_.choices(range(9), k=random_.randint(1, 32)) for _ in range(count)]


def assert_right(found: np.ndarray, texts: list[list[int]]) -> None:
    assert np.array_equal(found, np.array([embedding_of(text) for text in texts]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_10_000_texts_with_cancels_and_a_killed_instance_none_lost_none_twice():
    async def main() -> None:
        chance, runner = random.Random(3), InstanceRunner({"embed-1": 30})
        embedder = CountingEmbedder(runner, instances=3, max_num_queued_reqs=1000)
        outcomes = Counter()

        async def one(number: int) -> None:
            texts = texts_of(chance, 25)
            asked = asyncio.ensure_future(embedder.embed(f"r{number}", texts))
            if number % 5 == 0:
                asyncio.get_running_loop().call_later(0.05 * chance.random(), asked.cancel)
            try:
                assert_right(await asked, texts)
                outcomes["right"] += 1
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1

        await asyncio.gather(*(one(number) for number in range(400)))
        assert outcomes["right"] >= 320
        assert outcomes.total() == 400
        assert runner.steps["embed-1"] == 30
        assert min(runner.steps.values()) >= 30
        assert await embedder.close()

    asyncio.run(main())


def test_a_stalled_instance_loses_its_texts_to_another_and_comes_back():
    async def main() -> None:
        runner = InstanceRunner(stalls=("embed-0",))
        embedder = CountingEmbedder(runner, instances=2, stall_timeout=0.2)
        moved = []
        embedder.moved = moved.append
        texts = texts_of(random.Random(4), 60)
        assert_right(await embedder.embed("a", texts), texts)
        assert sum(moved) > 10
        assert not runner.gates["embed-0"].is_set()
        runner.gates["embed-0"].set()  # what it computed meanwhile is nobody's any more
        for turn in range(100):
            assert_right(await embedder.embed(f"b{turn}", texts), texts)
            if not any(instance.is_out for instance in embedder._instances._all):
                break
        else:
            raise AssertionError("the instance never came back")
        assert await embedder.close()

    asyncio.run(main())


def test_what_comes_late_from_an_instance_that_was_taken_out_is_dropped():
    """Although the other one, which has its texts by then, is later still."""

    async def main() -> None:
        runner = InstanceRunner(stalls=("embed-0", "embed-1"))
        embedder = CountingEmbedder(runner, instances=2, stall_timeout=0.2)
        moved = asyncio.Event()
        embedder.moved = lambda num_texts: moved.set()
        asked = asyncio.ensure_future(embedder.embed("a", [[1, 2, 3]]))
        await moved.wait()
        embedder._instances._stall_seconds = 60.0  # the other one may take as long as it likes
        runner.gates["embed-0"].set()
        while embedder._instances._all[0].is_out:  # until its turn has come
            await asyncio.sleep(0.005)
        assert not asked.done()
        runner.gates["embed-1"].set()
        assert_right(await asked, [[1, 2, 3]])
        assert await embedder.close()

    asyncio.run(main())


def test_without_another_instance_nothing_is_taken_out():
    async def main() -> None:
        runner = InstanceRunner(stalls=("embed-0",))
        embedder = CountingEmbedder(runner, stall_timeout=0.2)
        asked = asyncio.ensure_future(embedder.embed("a", [[1]]))
        while embedder.makes_progress:
            await asyncio.sleep(0.01)
        runner.gates["embed-0"].set()
        assert_right(await asked, [[1]])
        assert embedder.makes_progress
        assert await embedder.close()

    asyncio.run(main())


def test_when_the_last_instance_dies_requests_end_and_the_process_hears_of_it():
    async def main() -> None:
        embedder = CountingEmbedder(InstanceRunner({"embed-0": 1}))
        heard = asyncio.Event()
        embedder.on_failure = heard.set
        with pytest.raises(ServeError, match="did not finish") as caught:
            await embedder.embed("a", [[1]])
        assert caught.value.kind_name == "restarting"
        assert heard.is_set()
        assert not embedder.is_ready
        with pytest.raises(ServeError, match="is being restarted"):
            await embedder.embed("b", [[1]])
        assert (embedder.counts.failed, embedder.counts.rejected) == (1, 1)
        assert await embedder.close()

    asyncio.run(main())


def test_deadline_abort_duplicate_full_queue_and_drain():
    async def main() -> None:
        runner = InstanceRunner(stalls=("embed-0",))
        embedder = CountingEmbedder(runner, max_num_queued_reqs=2, max_num_queued_tokens=8)
        with pytest.raises(ServeError, match="deadline"):
            await embedder.embed("late", [[1]], timeout=0.02)
        first = asyncio.ensure_future(embedder.embed("first", [[1, 2]]))
        await asyncio.sleep(0)
        for name, texts, kind in (("first", [[1]], "duplicate"), ("big", [[1] * 7], "queue_full")):
            with pytest.raises(ServeError) as caught:
                await embedder.embed(name, texts)
            assert caught.value.kind_name == kind
        second = asyncio.ensure_future(embedder.embed("second", [[3]]))
        await asyncio.sleep(0)
        with pytest.raises(ServeError, match="2 requests wait"):
            await embedder.embed("third", [[1]])
        assert embedder.abort("second") == "ABORTED"
        with pytest.raises(ServeError, match="aborted"):
            await second
        assert embedder.abort("second") == "NOT_FOUND"
        drained = asyncio.ensure_future(embedder.drain(5))
        await asyncio.sleep(0)
        with pytest.raises(ServeError, match="shutting down"):
            await embedder.embed("fourth", [[1]])
        runner.gates["embed-0"].set()
        assert_right(await first, [[1, 2]])
        assert await drained
        assert await embedder.close()

    asyncio.run(main())


def test_a_text_whose_step_fails_twice_fails_its_request_and_no_other():
    async def main() -> None:
        runner = InstanceRunner()
        runner.breaks = lambda plan: "fetch" if any(9 in t.token_ids for t in plan.texts) else None
        embedder = CountingEmbedder(runner)
        bad = asyncio.ensure_future(embedder.embed("bad", [[1], [9]]))
        with pytest.raises(ServeError, match=r"input\[1\]: The step .* failed"):
            await bad
        assert_right(await embedder.embed("good", [[2]]), [[2]])
        assert await embedder.close()

    asyncio.run(main())
