"""Cancels, deadlines, failing steps, slow readers: each beside a neighbour that must not notice."""

import asyncio
import json
import socket
import threading
from contextlib import suppress

import grpc
import httpx
import pytest
from background import Background
from kit import VOCAB_SIZE, make_engine, running_server

from serving.accounts import EngineLimits
from serving.errors import ServeError
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

PATH = "/v1/completions"
NEIGHBOUR = {"prompt": "neighbour", "max_tokens": 40, "seed": 7, "ignore_eos": True}
LONG = {"prompt": "long " * 10, "max_tokens": 150, "seed": 1, "ignore_eos": True}
VICTIM = LONG | {"request_id": "victim"}


@pytest.fixture(scope="module")
def server():
    with running_server(make_engine(max_num_batched_tokens=24), write_timeout=1.0) as running:
        yield running


@pytest.fixture
def client(server):
    server.runner.step_seconds = 0.0
    server.runner.gate.set()
    with server.client() as client:
        yield client
    server.runner.gate.set()
    server.runner.step_seconds = 0.0
    server.assert_quiescent()


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        yield pb_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def background(server):
    return Background(server)


@pytest.fixture
def load(server, client, background):
    """A mixed load meanwhile, none of whose requests may notice."""
    server.runner.step_seconds = 0.005
    with background.load():
        server.wait_until(lambda: server.num_running() >= 2)
        yield


def handle_of_victim(server):
    handles = list(server.engine.handles.values())
    return next((handle for handle in handles if handle.public_id == "victim"), None)


def victim_has_tokens(server) -> bool:
    handle = handle_of_victim(server)
    return handle is not None and handle.num_output_tokens > 0


def sequences_of_victim(server):
    """What the engine knows of it; nothing before it has heard of the request."""
    requests = dict(server.engine._engine.groups[0].scheduler.requests)
    return next((each for name, each in requests.items() if name.endswith(":victim")), [])


def victim_is_in_prefill(server) -> bool:
    sequences = sequences_of_victim(server)
    return any(0 < each.num_computed_tokens < each.num_prompt_tokens for each in sequences)


def hang_up(server, body: dict, when) -> None:
    """Send a request and close the connection once `when(bytes so far)`."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
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
    hang_up(server, VICTIM, lambda _: handle_of_victim(server) is not None)
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
    hang_up(server, VICTIM, lambda _: victim_has_tokens(server))
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
        generation = await server.service.complete(body)
        before = aborts(server)
        with generation:
            await generation.handles[0].result()
            generation.cancel()
        assert aborts(server) == before
        generation = await server.service.complete(LONG)
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
        generation = await server.service.complete(body, timeout=timeout)
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


@pytest.mark.parametrize("seconds", [0.001, 0.05])
def test_deadlines(server, client, stub, seconds, load):
    server.runner.step_seconds = 0.02
    headers = {"x-request-timeout": str(seconds)}
    response = client.post(PATH, json=LONG, headers=headers)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    sampling = pb.Sampling(max_tokens=150, ignore_eos=True)
    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateOnce(pb.GenerateRequest(text="x", sampling=sampling), timeout=seconds)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.runner.step_seconds = 0.002


def test_a_deadline_in_mid_stream(server, client, load):
    server.runner.step_seconds = 0.01
    headers = {"x-request-timeout": "0.3"}
    body = LONG | {"stream": True, "prompt": "x"}
    response = client.post(PATH, json=body, headers=headers)
    assert response.status_code == 200
    *_, error, done = [line for line in response.text.split("\n\n") if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert done == "data: [DONE]"
    server.runner.step_seconds = 0.002


FAILED = ("500: ", "StatusCode.INTERNAL", "internal_error: ")
NO_MEMORY = ("503: ", "refused", "device_oom: ")  # RESOURCE_EXHAUSTED over gRPC


@pytest.mark.parametrize(
    ("fault", "ends"),
    [
        (ValueError("secret words of the inside"), FAILED),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"), NO_MEMORY),
    ],
)
def test_a_failed_step_ends_its_requests_alone(server, client, background, fault, ends):
    server.runner.step_seconds = 0.005
    answers = []

    def run() -> None:
        with server.client() as own:
            answers.append(own.post(PATH, json=LONG))

    with background.load(*ends):
        thread = threading.Thread(target=run)
        thread.start()
        server.wait_until(lambda: server.num_running() >= 3)
        server.runner.faults.append(fault)
        thread.join()
        assert f"{answers[0].status_code}: " == ends[0]
        assert "secret" not in answers[0].text
        assert client.get("/health/ready").status_code == 200


def test_a_device_without_memory_is_its_own_error(server, client, stub):
    server.runner.faults.append(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"))
    response = client.post(PATH, json=NEIGHBOUR)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "device_oom"
    server.runner.faults.append(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"))
    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateOnce(pb.GenerateRequest(text="x"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_steps_without_one_finite_row_end_what_was_in_them(server, client, background):
    server.runner.step_seconds = 0.005
    with background.load(*FAILED):
        server.wait_until(lambda: server.num_running() >= 2)
        server.runner.poisoned |= set(range(VOCAB_SIZE))
        assert client.post(PATH, json=LONG).status_code == 500
        server.runner.poisoned.clear()
        assert client.post(PATH, json=NEIGHBOUR).status_code == 200


def test_a_row_that_is_not_finite_ends_alone(server, client, load):
    server.runner.poisoned.add(250)  # no request of the load begins with it
    response = client.post(PATH, json=LONG | {"prompt": [250, 1, 2]})
    assert response.status_code == 500
    server.runner.poisoned.clear()


def test_a_bug_in_making_text_ends_one_request(server, client, monkeypatch, load):
    from shiftjax.outputs import OutputAssembler

    apply = OutputAssembler.apply

    def broken(self, event):
        if self.output.prompt == "break me":
            raise ZeroDivisionError("secret")
        return apply(self, event)

    monkeypatch.setattr(OutputAssembler, "apply", broken)
    response = client.post(PATH, json=LONG | {"prompt": "break me"})
    assert response.status_code == 500
    assert "secret" not in response.text
    monkeypatch.undo()


def test_a_slow_reader_is_dropped(server, client, load):
    before = aborts(server)
    host, port = server.url.removeprefix("http://").split(":")
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": 200, "n": 32, "stream": True}
    body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}  # some 10 MB
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + data)
        server.runner.step_seconds = 0.02  # the engine takes longer than the server waits
        server.wait_until(lambda: aborts(server) == before + 1)
    server.runner.step_seconds = 0.002


def test_a_slow_reader_over_grpc_is_dropped():
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]  # windows
    with (
        running_server(write_timeout=0.3) as server,
        grpc.insecure_channel(server.server.grpc.address, options=small) as channel,
    ):
        server.runner.step_seconds = 0.01  # the engine takes longer than the server waits
        sampling = pb.Sampling(max_tokens=200, n=32, logprobs=20, ignore_eos=True)  # some 10 MB
        stub = pb_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="x", sampling=sampling))
        next(call)
        server.wait_until(lambda: server.engine.counts.cancelled == 1)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        server.assert_quiescent()


def test_a_reader_who_never_comes_is_bounded():
    limits = EngineLimits(max_buffered_tokens=50)
    with running_server(limits=limits) as server:

        async def run() -> str:
            generation = await server.service.complete(LONG | {"stream": True})
            with generation:
                for _ in range(1000):
                    if generation.handles[0].is_ended:
                        break
                    await asyncio.sleep(0.005)
                error = generation.handles[0].error
                assert error is not None
                return error.code

        assert server.on_loop(run()) == "slow_reader"
        server.assert_quiescent()


def test_a_stuck_step_shows_as_no_progress():
    with running_server(limits=EngineLimits(stall_seconds=0.1)) as server:
        server.runner.gate.clear()
        answers = []

        def run() -> None:
            with server.client() as own:
                answers.append(own.post(PATH, json=LONG, headers={"x-request-timeout": "0.5"}))

        thread = threading.Thread(target=run)
        thread.start()
        with server.client() as client:
            assert client.get("/health/progress").status_code == 200
            server.wait_until(lambda: client.get("/health/progress").status_code == 503)
            assert client.get("/health/live").status_code == 200
            thread.join()  # the deadline holds although the engine hangs
            assert answers[0].status_code == 504
            server.runner.gate.set()
            server.wait_until(lambda: client.get("/health/progress").status_code == 200)
            assert client.post(PATH, json=NEIGHBOUR).status_code == 200
        server.assert_quiescent()


def test_an_engine_that_fails_for_good_is_not_ready(monkeypatch):
    with running_server() as server, server.client() as client:

        def reset() -> None:
            raise RuntimeError("the pool cannot be rebuilt")

        server.runner.reset = reset
        server.runner.faults.append(ValueError("x"))
        response = client.post(PATH, json=LONG)
        assert response.status_code == 503
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200
        assert client.post(PATH, json=LONG).status_code == 503


def test_grammars_that_take_too_long_do_not_blame_those_that_wait():
    with running_server(grammar_timeout=0.3) as server:
        gate, prepare = threading.Event(), server.service.grammars.prepare

        def held(source, num):
            gate.wait()
            return prepare(source, num)

        server.service.grammars.prepare = held
        answers = []

        def run() -> None:
            body = {"prompt": "x", "structured_outputs": {"choice": ["a"]}}
            with server.client() as own:
                answers.append(own.post(PATH, json=body).json()["error"]["code"])

        threads = [threading.Thread(target=run) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == ["grammar_invalid"] * 2 + ["queue_full"] * 3
        gate.set()
        server.assert_quiescent()


def test_a_full_queue_refuses_at_once():
    limits = EngineLimits(max_num_queued_reqs=4)
    engine = make_engine(max_num_seqs=2)
    with running_server(engine, limits=limits) as server:
        server.runner.step_seconds = 0.01
        answers = []

        def run() -> None:
            with server.client() as own:
                answers.append(own.post(PATH, json=LONG | {"max_tokens": 30}))

        threads = [threading.Thread(target=run) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [answer for answer in answers if answer.status_code == 429]
        served = [answer for answer in answers if answer.status_code == 200]
        assert len(refused) + len(served) == 20
        assert refused
        assert served
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        assert len({answer.json()["choices"][0]["text"] for answer in served}) == 1
        assert server.engine.counts.rejected == len(refused)
        with grpc.insecure_channel(server.server.grpc.address) as channel:
            server.runner.gate.clear()
            sampling = pb.Sampling(n=4, max_tokens=5)
            many = pb.GenerateRequest(text="x", sampling=sampling)
            stub = pb_grpc.InferenceStub(channel)
            calls = [stub.GenerateOnce.future(many) for _ in range(8)]
            server.wait_until(lambda: any(call.done() for call in calls))
            server.runner.gate.set()
            codes = [call.code() for call in calls]
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        server.assert_quiescent()


def test_many_streams_and_cancels_leave_nothing(server, client, load):
    def run(number: int) -> None:
        body = LONG | {"stream": True, "n": 1 + number % 3, "seed": number}
        try:
            with server.client() as own, own.stream("POST", PATH, json=body) as response:
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
