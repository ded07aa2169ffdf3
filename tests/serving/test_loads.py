"""Bursts and overload, scaled down: rejects are quick and say when to retry; all ends are sure."""

import asyncio
import random

from kit import make_engine, running_server

from serving.accounts import EngineLimits
from serving.bench.client import complete, parse_url
from serving.bench.load import Outcome, closed_loop, replay
from serving.bench.report import errors, queue_times, summary
from shiftjax.sim.trace import TraceRequest, gamma_bursty

LIMITS = EngineLimits(max_num_queued_reqs=24)


def overloaded():
    """A server of four sequences at a time and a short queue."""
    return running_server(make_engine(max_num_seqs=4), limits=LIMITS, grpc=False)


def test_bursts_are_met_with_a_bounded_queue():
    """L6: many at once, then silence, again and again; nothing is left each time."""
    with overloaded() as server:
        server.runner.step_seconds = 0.001
        target = parse_url(server.url)
        longest = 0

        async def watch() -> None:
            nonlocal longest
            while True:
                longest = max(longest, server.engine.stats.num_waiting)
                await asyncio.sleep(0.002)

        watcher = asyncio.run_coroutine_threadsafe(watch(), server.loop)
        refused = served = 0
        for _ in range(3):
            burst = [TraceRequest(0.1 * number / 100, 8, 12) for number in range(100)]
            outcome = asyncio.run(replay(target, burst, None))
            for sample in outcome.samples:
                assert sample.error is None or sample.error.startswith("429"), sample.error
            refused += sum(sample.error is not None for sample in outcome.samples)
            served += sum(sample.error is None for sample in outcome.samples)
            server.assert_quiescent()
        watcher.cancel()
        assert refused
        assert served >= 3 * LIMITS.max_num_queued_reqs
        assert longest <= LIMITS.max_num_queued_reqs
        assert server.engine.counts.rejected == refused
        assert server.engine.counts.finished == served


def test_overload_hurts_only_those_who_are_refused():
    """L3: about twice what the engine can do; what is accepted gives the tokens it gives alone."""
    with overloaded() as server, server.client() as client:
        server.runner.step_seconds = 0.002
        target = parse_url(server.url)
        body = {"prompt": list(range(20)), "max_tokens": 20, "seed": 3, "ignore_eos": True}
        alone = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        probes: list[str] = []

        async def run() -> Outcome:
            requests = gamma_bursty(200.0, 1.0, 2.0, 20, 20, seed=1)
            load = asyncio.create_task(replay(target, requests, None))
            for _ in range(20):
                response = await asyncio.to_thread(client.post, "/v1/completions", json=body)
                if response.status_code == 200:
                    probes.append(response.json()["choices"][0]["text"])
                else:
                    assert response.status_code == 429
                    assert response.headers["retry-after"] == "1"
            return await load

        outcome = asyncio.run(run())
        assert set(errors(outcome)) and all(key.startswith("429") for key in errors(outcome))
        assert set(probes) <= {alone}
        row = summary(outcome)
        assert row["failed"] == server.engine.counts.rejected - (20 - len(probes))
        server.assert_quiescent()


def test_a_closed_loop_and_its_numbers():
    with running_server(grpc=False) as server, server.client() as client:
        target = parse_url(server.url + "/v1")
        before = client.get("/metrics").content
        requests = [TraceRequest(0.0, 10, 7)] * 30
        outcome = asyncio.run(closed_loop(target, requests, 5, "echo"))
        queue = queue_times(before, client.get("/metrics").content)
        row = summary(outcome, ttft_limit=1e-9)
        assert (row["requests"], row["failed"]) == (30, 0)
        assert abs(row["output_tokens_per_second"] * outcome.seconds - 30 * 7) < 1e-6
        assert row["goodput_requests_per_second"] == 0
        assert 0 < row["ttft_p50_seconds"] <= row["ttft_p99_seconds"]
        assert row["completion_p50_seconds"] >= row["ttft_p50_seconds"]
        assert queue["queue_p50_at_most_seconds"] == 0.3  # the least bucket
        server.assert_quiescent()


def test_failures_are_counted_not_raised():
    with running_server(grpc=False) as server:
        target = parse_url(server.url)
        bad = asyncio.run(complete(target, {"prompt": ""}))
        assert bad.error is not None
        assert bad.error.startswith("400")
    gone = asyncio.run(complete(target, {"prompt": "x"}))
    assert gone.error is not None
    row = summary(Outcome([bad, gone], 1.0))
    assert (row["requests"], row["failed"], row["ttft_p50_seconds"]) == (2, 2, None)


def test_random_cancels_leave_nothing():
    """A minute's soak in seconds: clients that stay, that go early, and that ask nonsense."""
    rng = random.Random(4)
    with overloaded() as server:
        server.runner.step_seconds = 0.0005
        target = parse_url(server.url)

        async def one(number: int) -> None:
            prompt = [rng.randrange(250) for _ in range(rng.randint(1, 60))]
            body = {"prompt": prompt, "max_tokens": rng.randint(1, 60), "n": rng.randint(1, 3)}
            if number % 7 == 0:
                body["temperature"] = -1
            task = asyncio.create_task(complete(target, body))
            await asyncio.sleep(rng.random() * 0.05)
            if number % 2:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        async def run() -> None:
            for _ in range(10):
                await asyncio.gather(*(one(number) for number in range(24)))

        asyncio.run(run())
        server.assert_quiescent()
