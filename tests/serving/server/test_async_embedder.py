"""Requests for embeddings: every text is answered once, whatever is cancelled, stalls or dies."""

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

    def _deliver(self, turn):
        self.taken.update(result.key for result in turn.results)
        super()._deliver(turn)

    async def close(self) -> bool:
        assert max(self.taken.values(), default=1) == 1, "a text came out twice"
        counts = self.counts
        assert counts.accepted == counts.finished + counts.cancelled + counts.failed
        assert not (self.handles or self._places or self._num_tokens)
        return await super().close()


class FaultyRunner(SumRunner):
    """It `dies` at its n-th step, or stalls until its gate opens."""

    def __init__(self, dies: int = 0, stalls: bool = False):
        super().__init__(RUNNER_SHAPE)
        self.dies, self.steps = dies, 0
        self.gate = threading.Event()
        if not stalls:
            self.gate.set()

    def fetch(self, handle):
        self.steps += 1
        if self.steps == self.dies:
            raise SystemExit  # which nothing below the thread catches
        self.gate.wait()
        return super().fetch(handle)


def texts_of(random_: random.Random, count: int) -> list[list[int]]:
    return [random_.choices(range(9), k=random_.randint(1, 32)) for _ in range(count)]


def assert_right(found: np.ndarray, texts: list[list[int]]) -> None:
    assert np.array_equal(found, np.array([embedding_of(text) for text in texts]))


def test_10_000_texts_with_cancels_none_lost_none_twice():
    async def main() -> None:
        chance, runner = random.Random(3), FaultyRunner()
        embedder = CountingEmbedder(runner, max_num_queued_reqs=1000)
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
        assert runner.steps >= 30
        assert await embedder.close()

    asyncio.run(main())


def test_a_stall_denies_progress_and_loses_nothing():
    async def main() -> None:
        runner = FaultyRunner(stalls=True)
        embedder = CountingEmbedder(runner, stall_timeout=0.2)
        asked = asyncio.ensure_future(embedder.embed("a", [[1]]))
        while embedder.makes_progress:
            await asyncio.sleep(0.01)
        runner.gate.set()
        assert_right(await asked, [[1]])
        assert embedder.makes_progress
        assert await embedder.close()

    asyncio.run(main())


def test_when_the_thread_dies_requests_end_and_the_process_hears_of_it():
    async def main() -> None:
        embedder = CountingEmbedder(FaultyRunner(dies=1))
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
        runner = FaultyRunner(stalls=True)
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
        runner.gate.set()
        assert_right(await first, [[1, 2]])
        assert await drained
        assert await embedder.close()

    asyncio.run(main())


def test_a_text_whose_step_fails_twice_fails_its_request_and_no_other():
    async def main() -> None:
        runner = FaultyRunner()
        runner.breaks = lambda plan: "fetch" if any(9 in t.token_ids for t in plan.texts) else None
        embedder = CountingEmbedder(runner)
        bad = asyncio.ensure_future(embedder.embed("bad", [[1], [9]]))
        with pytest.raises(ServeError, match=r"input\[1\]: The step .* failed"):
            await bad
        assert_right(await embedder.embed("good", [[2]]), [[2]])
        assert await embedder.close()

    asyncio.run(main())
