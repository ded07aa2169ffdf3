"""The version of the weights in answers: at their end, in each API, whole and as a stream."""

import json

import grpc
import pytest
from kit import CHAT, COMPLETION, USER, running_server

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

BODIES = {
    COMPLETION: {"prompt": "hello", "max_tokens": 6, "n": 2, "ignore_eos": True},
    CHAT: {"messages": USER, "max_tokens": 6, "n": 2, "ignore_eos": True},
    "/v1/messages": {"messages": USER, "max_tokens": 6},
    "/v1/responses": {"input": "hi", "max_output_tokens": 6},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 6}},
}


@pytest.fixture(scope="module")
def server():
    with running_server(stream_interval=1) as running:
        yield running


def become(server, version: int) -> None:
    """Let the weights of the server's engine be of a version."""
    server.on_loop(server.engine.call(lambda engine: engine.renew(version, recompute=False)))


def versions_in(value) -> list[int]:
    """Every `weight_version` in plain values."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [version for each in inner for version in versions_in(each)]
    own = [value["weight_version"]] if isinstance(value, dict) and "weight_version" in value else []
    return own + found


@pytest.mark.parametrize("path", BODIES)
def test_http(server, client, path):
    body = BODIES[path]
    become(server, 0)
    assert not versions_in(client.post(path, json=body).json())
    assert "weight_version" not in client.post(path, json=body | {"stream": True}).text
    become(server, 3)
    answer = client.post(path, json=body).json()
    assert versions_in(answer) == [3] * body.get("n", 1)
    assert "weight_version" in answer or "weight_version" in answer["choices"][0]
    lines = client.post(path, json=body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    telling = [each for each in chunks if versions_in(each)]
    assert [versions_in(each) for each in telling] == [[3]] * body.get("n", 1)
    for chunk in telling:
        if "choices" in chunk:
            assert chunk["choices"][0]["finish_reason"] == "length"
        else:
            assert chunk["type"] in ("message_delta", "response.incomplete")


def test_grpc(server):
    wanted = pb.GenerateRequest(text="hello", sampling=pb.Sampling(n=2, max_tokens=6))
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        for version in (0, 4):
            become(server, version)
            whole = [each.finished for each in stub.GenerateOnce(wanted).completions]
            news = list(stub.Generate(wanted))
            ends = [each.finished for each in news if each.HasField("finished")]
            assert [each.weight_version for each in whole + ends] == [version] * 4
