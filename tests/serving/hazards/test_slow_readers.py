"""Clients that do not read: they are dropped with what was unsent, and hold nothing back."""

import asyncio
import json
import socket
import time
from dataclasses import replace

import grpc
import pytest
from kit import CHAT, COMPLETION, USER, Running, make_engine, read_all, running_server

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.server import handle, write_limit
from serving.server.schema import read_completion

LONG = {"prompt": "long " * 10, "max_tokens": 150, "seed": 1, "ignore_eos": True}


def send_and_never_read(server: Running, connection: socket.socket, path: str, body: dict) -> None:
    data = json.dumps(body).encode()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    connection.connect(server.address)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_limit, "WRITE_SECONDS", 1.0)
        with running_server() as running:
            yield running


def test_a_slow_reader_is_dropped(server, client, load):
    """The socket too, with what was unsent."""
    before = server.engine.counts.cancelled
    body = {"messages": USER, "max_tokens": 200, "n": 32, "stream": True}
    body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}  # some 10 MB
    with socket.socket() as connection:
        send_and_never_read(server, connection, CHAT, body)
        server.runner.step_seconds = 0.02  # the engine takes longer than the server waits
        server.wait_until(lambda: server.engine.counts.cancelled == before + 1)
        assert not read_all(connection).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")


def test_a_slow_reader_over_grpc_is_dropped(monkeypatch):
    monkeypatch.setattr(write_limit, "WRITE_SECONDS", 0.3)
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]  # windows
    with (
        running_server() as server,
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


def test_a_reader_who_never_comes_is_bounded(monkeypatch):
    monkeypatch.setattr(handle, "MAX_BUFFERED_TOKENS", 50)
    with running_server() as server:

        async def run() -> str:
            generation = await server.service.start(read_completion, LONG | {"stream": True})
            with generation:
                while not generation.handles[0].is_ended:
                    await asyncio.sleep(0.005)
                return generation.handles[0].error.code

        assert server.on_loop(run()) == "slow_reader"  # or a TimeoutError
        server.assert_quiescent()


LATE = {"messages": USER, "max_tokens": 220, "n": 8, "stream": True, "ignore_eos": True}
LATE |= {"logprobs": True, "top_logprobs": 20}  # some 5 MB


def test_a_stalled_stream_gives_its_place_to_those_who_wait(monkeypatch):
    """Long before anybody else is dropped; and not while nobody waits."""
    monkeypatch.setattr(write_limit, "WRITE_SECONDS", 60.0)
    monkeypatch.setattr(write_limit, "BUSY_SECONDS", 0.2)
    engine = make_engine(max_num_seqs=8)
    with running_server(engine, grpc=False) as server, socket.socket() as connection:
        server.runner.step_seconds = 0.02  # nearly 5 s for all of it
        send_and_never_read(server, connection, CHAT, LATE)
        handles = server.engine.handles
        server.wait_until(lambda: any(each.num_output_tokens > 8 * 60 for each in handles.values()))
        assert server.engine.counts.cancelled == 0
        with server.client() as client:
            answer = client.post(COMPLETION, json={"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200
        assert server.engine.counts.cancelled == 1
        server.assert_quiescent()


def test_an_ended_stream_has_no_place_to_give(monkeypatch):
    monkeypatch.setattr(write_limit, "WRITE_SECONDS", 60.0)
    monkeypatch.setattr(write_limit, "BUSY_SECONDS", 0.1)
    with running_server(grpc=False) as server, socket.socket() as connection:
        send_and_never_read(server, connection, CHAT, LATE)
        server.wait_until(lambda: server.engine.counts.finished == 1)
        server.runner.gate.clear()
        with socket.socket() as other:
            send_and_never_read(server, other, COMPLETION, {"prompt": "x", "max_tokens": 1})
            server.wait_until(lambda: server.runner.is_held)
            server.engine.stats = replace(server.engine.stats, num_waiting=1)
            time.sleep(0.5)
            assert len(server.engine.handles) == 2  # it is still being written
            server.runner.gate.set()
            server.wait_until(lambda: len(server.engine.handles) == 1)
        connection.close()
        server.wait_until(lambda: not server.engine.handles)


def test_a_preempted_sequence_of_its_own_is_no_other(monkeypatch):
    """Eight continuations need more KV blocks than there are, so some of them wait."""
    monkeypatch.setattr(write_limit, "WRITE_SECONDS", 60.0)
    monkeypatch.setattr(write_limit, "BUSY_SECONDS", 0.05)
    with running_server(grpc=False) as server, socket.socket() as connection:
        server.runner.step_seconds = 0.003
        send_and_never_read(server, connection, CHAT, LATE)
        server.wait_until(lambda: server.engine.counts.finished == 1)
        assert sum(server.engine.stats.num_preemptions.values()) > 0
        connection.close()
        server.wait_until(lambda: not server.engine.handles)


def test_a_big_answer_that_nobody_reads_is_dropped(monkeypatch):
    """An answer that does not stream lies in the socket's buffers until the system gives up."""
    body = {"prompt": "x", "max_tokens": 200, "n": 64, "logprobs": 20, "ignore_eos": True}
    monkeypatch.setattr(write_limit, "WRITE_SECONDS", 0.3)
    with running_server(grpc=False) as server, socket.socket() as connection:
        send_and_never_read(server, connection, COMPLETION, body)
        server.wait_until(lambda: server.engine.counts.finished == 1)
        server.wait_until(lambda: server.server.num_connections == 0)
        server.assert_quiescent()
