"""Failing steps, engines that hang or give up, full queues: neighbours must not notice."""

import grpc
import pytest
from kit import COMPLETION, VOCAB_SIZE, all_at_once, make_engine, running_server
from served import in_background

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

NEIGHBOUR = {"prompt": "neighbour", "max_tokens": 40, "seed": 7, "ignore_eos": True}
LONG = {"prompt": "long " * 10, "max_tokens": 150, "seed": 1, "ignore_eos": True}
FAILED = ("500: ", "StatusCode.INTERNAL", "internal_error: ")
NO_MEMORY = ("503: ", "refused", "device_oom: ")  # RESOURCE_EXHAUSTED over gRPC


@pytest.fixture(scope="module")
def server():
    with running_server(make_engine(max_num_batched_tokens=24)) as running:  # prompts in chunks
        yield running


def test_steps_without_one_finite_row_end_what_was_in_them(server, client, background):
    server.runner.step_seconds = 0.005
    with background.load(*FAILED):
        server.wait_until(lambda: server.num_running() >= 2)
        server.runner.poisoned |= set(range(VOCAB_SIZE))
        assert client.post(COMPLETION, json=LONG).status_code == 500
        server.runner.poisoned.clear()
        assert client.post(COMPLETION, json=NEIGHBOUR).status_code == 200


def test_a_row_that_is_not_finite_ends_alone(server, client, load):
    server.runner.poisoned.add(250)  # no request of the load begins with it
    response = client.post(COMPLETION, json=LONG | {"prompt": [250, 1, 2]})
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
    response = client.post(COMPLETION, json=LONG | {"prompt": "break me"})
    assert response.status_code == 500
    assert "secret" not in response.text
    monkeypatch.undo()


# After a step without memory the engine plans smaller ones for a while, and falls behind the
# load: these come last on the server that they share with those above.
@pytest.mark.parametrize(
    ("fault", "ends"),
    [
        (ValueError("secret words of the inside"), FAILED),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"), NO_MEMORY),
    ],
)
def test_a_failed_step_ends_its_requests_alone(server, client, background, fault, ends):
    server.runner.step_seconds = 0.005
    with background.load(*ends):
        body = LONG | {"request_id": "victim"}
        thread, answers = in_background(lambda: client.post(COMPLETION, json=body))
        server.wait_until(lambda: server.has_tokens("victim"))
        server.runner.faults.append(fault)
        thread.join()
        assert f"{answers[0].status_code}: " == ends[0]
        assert "secret" not in answers[0].text
        assert client.get("/health/ready").status_code == 200


def test_a_device_without_memory_is_its_own_error(server, client, stub):
    server.runner.faults.append(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"))
    response = client.post(COMPLETION, json=NEIGHBOUR)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "device_oom"
    server.runner.faults.append(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"))
    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateOnce(pb.GenerateRequest(text="x"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_stuck_step_shows_as_no_progress():
    with running_server(stall_timeout=1.0) as server:
        server.runner.gate.clear()
        with server.client() as client:
            headers = {"x-request-timeout": "3"}
            thread, answers = in_background(
                lambda: client.post(COMPLETION, json=LONG, headers=headers)
            )
            assert client.get("/health/progress").status_code == 200
            server.wait_until(lambda: client.get("/health/progress").status_code == 503)
            assert client.get("/health/live").status_code == 200
            thread.join()  # the deadline holds although the engine hangs
            assert answers[0].status_code == 504
            server.runner.gate.set()
            server.wait_until(lambda: client.get("/health/progress").status_code == 200)
            assert client.post(COMPLETION, json=NEIGHBOUR).status_code == 200
        server.assert_quiescent()


def test_an_engine_that_fails_for_good_is_not_ready(monkeypatch):
    with running_server() as server, server.client() as client:

        def reset() -> None:
            raise RuntimeError("the pool cannot be rebuilt")

        server.runner.reset = reset
        server.runner.faults.append(ValueError("x"))
        response = client.post(COMPLETION, json=LONG)
        assert response.status_code == 503
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200
        assert client.post(COMPLETION, json=LONG).status_code == 503


def test_a_full_queue_refuses_at_once():
    engine = make_engine(max_num_seqs=2)
    with running_server(engine, max_num_queued_reqs=4) as server:
        server.runner.step_seconds = 0.01
        answers = all_at_once(server, LONG | {"max_tokens": 30}, 20)
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
