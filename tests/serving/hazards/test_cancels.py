"""Cancels at every moment, and deadlines, each beside a load that must not notice."""

import asyncio
import json
import socket
import threading
from contextlib import suppress

import grpc
import httpx
import pytest
from kit import COMPLETION, events, make_engine, running_server

from serving.proto import shiftjax_pb2 as pb
from serving.server.errors import ServeError
from serving.server.schema import read_completion

LONG = {"prompt": "long " * 10, "max_tokens": 150, "seed": 1, "ignore_eos": True}
VICTIM = LONG | {"request_id": "victim"}


@pytest.fixture(scope="module")
def server():
    with running_server(make_engine(max_num_batched_tokens=24)) as running:  # prompts in chunks
        yield running


def public_ids(server) -> list[str]:
    return [handle.public_id for handle in list(server.engine.handles.values())]


def sequences_of_victim(server):
    """What the engine knows of it; nothing before it has heard of the request."""
    requests = dict(server.engine._engine.lanes[0].scheduler.requests)
    return next((each for name, each in requests.items() if name.endswith(":victim")), [])


def victim_is_in_prefill(server) -> bool:
    sequences = sequences_of_victim(server)
    return any(0 < each.num_computed_tokens < each.num_prompt_tokens for each in sequences)


def hang_up(server, body: dict, when) -> None:
    """Send a request and close the connection once `when(bytes so far)`."""
    data = json.dumps(body).encode()
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        received = b""
        connection.settimeout(0.01)
        for _ in range(2000):
            if when(received):
                return
            try:
                received += connection.recv(4096)
            except TimeoutError:
                continue
    raise AssertionError("the moment to hang up never came")


def aborts(server) -> int:
    return server.engine.counts.cancelled


def test_cancel_while_queued(server, client, load):
    before = aborts(server)
    server.runner.gate.clear()
    server.wait_until(lambda: server.runner.is_held)  # the engine does not even hear of it
    hang_up(server, VICTIM, lambda _: "victim" in public_ids(server))
    assert not sequences_of_victim(server)
    server.wait_until(lambda: aborts(server) == before + 1)


def test_cancel_during_a_prefill_chunk(server, client, load):
    before = aborts(server)
    hang_up(server, VICTIM | {"prompt": "p" * 100}, lambda _: victim_is_in_prefill(server))
    server.wait_until(lambda: aborts(server) == before + 1)


@pytest.mark.parametrize("n", [1, 4])
def test_cancel_in_mid_stream(server, client, n, load):
    before = aborts(server)
    body = LONG | {"stream": True, "n": n, "prompt": "x"}
    hang_up(server, body, lambda received: received.count(b"data:") > 3)
    server.wait_until(lambda: aborts(server) == before + 1)


def test_cancel_of_a_request_that_does_not_stream(server, client, load):
    before = aborts(server)
    hang_up(server, VICTIM, lambda _: server.has_tokens("victim"))
    server.wait_until(lambda: aborts(server) == before + 1)


def test_cancel_just_before_the_end(server, client, load):
    ended = server.engine.counts.cancelled + server.engine.counts.finished
    body = LONG | {"stream": True, "max_tokens": 20}
    hang_up(server, body, lambda received: received.count(b"data:") >= 19)
    server.wait_until(
        lambda: server.engine.counts.cancelled + server.engine.counts.finished > ended
    )


def test_cancel_after_the_end_and_twice(server, client):
    async def run() -> None:
        body = {"prompt": "x", "max_tokens": 2}
        generation = await server.service.start(read_completion, body)
        before = aborts(server)
        with generation:
            await generation.handles[0].result()
            generation.cancel()
        assert aborts(server) == before
        generation = await server.service.start(read_completion, LONG)
        with generation:
            generation.cancel()
            generation.cancel()
        generation.cancel()
        assert aborts(server) == before + 1

    server.on_loop(run())


@pytest.mark.parametrize("how", ["cancel", "expire", "abort"])
def test_the_work_stops_within_two_steps(server, client, how):
    server.runner.step_seconds = 0.005

    async def run() -> None:
        timeout = 0.1 if how == "expire" else None
        body = LONG | {"stream": True, "request_id": "stops", "n": 2}
        generation = await server.service.start(read_completion, body, timeout=timeout)
        with generation:
            async for _ in generation.handles[0]:
                if how != "expire":
                    break
            if how == "abort":
                assert server.engine.abort("stops") == "ABORTED"

    async def steps_after() -> int:
        with suppress(ServeError):
            await run()
        before = len(server.runner.modes)
        while await server.engine.call(lambda engine: engine.has_work()):
            await asyncio.sleep(0)
        return len(server.runner.modes) - before

    assert server.on_loop(steps_after()) <= 3  # one in flight, one launched meanwhile, one to see


def test_cancel_over_grpc(server, client, stub, load):
    before = aborts(server)
    sampling = pb.Sampling(max_tokens=150, n=2, ignore_eos=True)
    call = stub.Generate(pb.GenerateRequest(text="x", sampling=sampling))
    for _ in range(5):
        next(call)
    call.cancel()
    server.wait_until(lambda: aborts(server) == before + 1)


def test_many_streams_and_cancels_leave_nothing(server, client, load):
    def run(number: int) -> None:
        body = LONG | {"stream": True, "n": 1 + number % 3, "seed": number}
        try:
            with server.client() as own, own.stream("POST", COMPLETION, json=body) as response:
                for count, _ in enumerate(response.iter_lines()):
                    if count > 3 * number:
                        return
        except httpx.HTTPError:
            return

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("seconds", [0.001, 0.05])
def test_deadlines(server, client, stub, seconds, load):
    server.runner.step_seconds = 0.02
    headers = {"x-request-timeout": str(seconds)}
    response = client.post(COMPLETION, json=LONG, headers=headers)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    sampling = pb.Sampling(max_tokens=150, ignore_eos=True)
    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateOnce(pb.GenerateRequest(text="x", sampling=sampling), timeout=seconds)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_deadline_in_mid_stream(server, client, load):
    server.runner.step_seconds = 0.01
    headers = {"x-request-timeout": "0.3"}
    body = LONG | {"stream": True, "prompt": "x"}
    response = client.post(COMPLETION, json=body, headers=headers)
    assert response.status_code == 200
    assert events(response.text)[-1]["error"]["code"] == "deadline_exceeded"
