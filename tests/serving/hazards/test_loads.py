"""Loads at full length on a tiny float32 model, where every text is exact; what a run counts."""

import asyncio
import random

import pytest
from background import with_clients
from cases.load_kit import REFUSED, mixed_body
from cases.loads import LOADS, Known, Loads
from engines import checkpoint, make
from kit import EOS, MODEL_QUEUE, VOCAB_SIZE, make_engine, running_server, serving

from serving.bench.client import Sample, complete, parse_url
from serving.bench.load import Outcome, closed_loop, numbers_for, open_loop, run_load
from serving.bench.report import queue_times, summary
from shiftjax.parallel.grid import Mode
from shiftjax.sim.experiments import target_from
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import Replay, RequestRecord, StepRecord
from shiftjax.sim.replay_metrics import summary as simulated_summary
from shiftjax.sim.trace import TraceRequest

pytestmark = pytest.mark.thorough

SECONDS = 15.0  # of the steady load and the overload
BODIES = [mixed_body(number, 60, 24) for number in range(60)]


@pytest.fixture(scope="module")
def server():
    """Both modes, a pool that holds fewer than all that may run, and a bounded queue."""
    directory, _, _ = checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    built = make(directory, 2, 2, whole=True, max_num_seqs=8, num_blocks=120, shift_threshold=8)
    with serving(built.engine) as running:
        yield running


def on(server, action):
    """What an action gives that is done with loads on a server."""
    return asyncio.run(with_clients(server, lambda senders: action(Loads(senders, BODIES))))


@pytest.fixture(autouse=True)
def few_bursts(monkeypatch):
    """What the second leaves behind, the others would."""
    monkeypatch.setattr("cases.loads.NUM_BURSTS", 2)


@pytest.fixture(scope="module")
def known(server) -> Known:
    return on(server, lambda loads: loads.learn())


@pytest.mark.parametrize("name", LOADS)
def test_a_load(server, known, name):
    """L2, L3 and L6: every end is definite, refusals say when to retry, nobody's text changes."""
    counts = server.engine.counts
    before = counts.accepted, counts.finished, counts.rejected
    row = on(server, lambda loads: LOADS[name](loads, known, SECONDS))
    ends = row["ends"]
    assert set(ends) <= {"finished", REFUSED}
    assert row["greedy_differ"] == row["sampled_differ"] == row["refused_without_hint"] == 0
    assert row["longest_queue"] <= MODEL_QUEUE
    server.assert_quiescent()
    after = counts.accepted, counts.finished, counts.rejected
    gained = [new - old for old, new in zip(before, after, strict=True)]
    assert gained == [ends["finished"], ends["finished"], ends.get(REFUSED, 0)]
    assert name == "steady" or ends[REFUSED] > 0  # others on the machine may make it slower
    assert server.service.model.num_compiles() == 0


def test_a_closed_loop_and_its_numbers():
    with running_server(grpc=False) as server, server.client() as client:
        target = parse_url(server.url + "/v1")
        before = client.get("/metrics").content
        requests = [TraceRequest(0.0, 10, 7)] * 30
        outcome = asyncio.run(run_load(target, requests, "echo", 5))
        queue = queue_times(before, client.get("/metrics").content)
        row = summary(outcome, ttft_limit=1e-9)
        assert (row["requests"], row["failed"]) == (30, 0)
        assert abs(row["output_tokens_per_second"] * outcome.seconds - 30 * 7) < 1e-6
        assert row["goodput_requests_per_second"] == 0
        assert 0 < row["ttft_p50_seconds"] <= row["ttft_p99_seconds"]
        assert row["completion_p50_seconds"] >= row["ttft_p50_seconds"]
        assert queue["queue_p50_at_most_seconds"] == 0.3  # the least bucket
        server.assert_quiescent()


def test_clients_share_the_numbers_of_a_closed_loop():
    async def send(number: int) -> int:
        await asyncio.sleep(0.001)
        return number

    assert sorted(asyncio.run(closed_loop(send, 3, range(10)))) == list(range(10))
    some = asyncio.run(closed_loop(send, 3, numbers_for(0.05)))
    assert sorted(some) == list(range(len(some)))
    assert 3 <= len(some) <= 153


def test_an_open_loop_waits_for_nobody():
    running = most = 0

    async def send(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return number

    assert asyncio.run(open_loop(send, [0.02, 0.0, 0.01])) == [0, 1, 2]
    assert most == 3


def test_a_served_and_a_simulated_run_have_the_same_columns():
    """What 2 requests of 3 + 5 tokens come to in 4 seconds, whoever answered them."""
    samples = [Sample(t, 3, 5, [t + 0.5, t + 2.5], ended_at=t + 3.0) for t in (0.0, 1.0)]
    served = summary(Outcome([*samples, Sample(0.0, error="gone")], 4.0))
    records = [RequestRecord(t, 0.1, 0.5, 0.5, 3.0, 3, 5, 0) for t in (0.0, 1.0)]
    steps = [StepRecord(4.0, 1.0, 16, 0, Mode(1, 1))]
    target = target_from({"model": "tiny", "machine": "cpu"})
    deployment = deploy(target, "tp")
    simulated = simulated_summary(Replay(deployment, records, steps, 1, 0, 0))
    only_served = {f"itl_p{p}_seconds" for p in (50, 90, 99)}
    assert set(served) - set(simulated) == only_served
    assert {name: simulated[name] for name in served if name not in only_served} == {
        name: value for name, value in served.items() if name not in only_served
    }
    assert (served["requests"], served["failed"]) == (3, 1)
    assert served["tokens_per_second"] == 4.0
    assert served["tpot_p50_seconds"] == 0.5
    assert served["completion_mean_seconds"] == 3.0


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
    engine = make_engine(max_num_seqs=4)
    with running_server(engine, max_num_queued_reqs=24, grpc=False) as server:
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
