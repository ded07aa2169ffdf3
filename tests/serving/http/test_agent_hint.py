"""`agent_hint` of a request: what becomes of its KV, over HTTP and gRPC."""

import json

import grpc
import pytest
from kit import CHAT, COMPLETION, is_error, make_engine, metric_total, metric_values, serving

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from shiftjax.core.kept_blocks import KeptBlocks

PROMPT = {"prompt": [*range(40)], "max_tokens": 1}
EVICT = {"context_management": {"edits": [{"type": "evict"}]}}


@pytest.fixture(scope="module")
def keeping():
    engine = make_engine()
    engine.lanes[0].scheduler.tables.device = KeptBlocks(256, 4, 0.5)
    with serving(engine) as server:
        yield server


@pytest.fixture
def client(keeping):
    with keeping.client() as client:
        client.post("/reset_prefix_cache")
        yield client


def ask(client, **hint) -> dict:
    answer = client.post(COMPLETION, json=PROMPT | ({"agent_hint": hint} if hint else {}))
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def kept(client) -> float:
    return metric_total(metric_values(client), "shiftjax:prefix_cache_kept_blocks")


def test_a_ttl_keeps_blocks_until_the_session_releases_them(client):
    ask(client, session_id="a", cache_control={"type": "ephemeral", "ttl": 300})
    assert kept(client) == 10
    ask(client, session_id="b", **EVICT)
    assert kept(client) == 10
    assert cached(ask(client, session_id="a", **EVICT)) == 36
    assert kept(client) == 0 and cached(ask(client)) == 0


def test_a_request_that_manages_generates_nothing(client):
    ask(client, session_id="a", cache_control={})
    managed = {"manage_request": True, "edits": [{"type": "evict"}]}
    answer = ask(client, session_id="a", context_management=managed)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 0
    assert kept(client) == 0 and cached(ask(client)) == 0
    managed["edits"] = [{"type": "prefetch"}]
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    body["agent_hint"] = {"context_management": managed}
    stream = client.post(CHAT, json=body).text
    assert stream.rstrip().endswith("data: [DONE]") and '"finish_reason":"stop"' in stream


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ({"cache_control": {"ttl": 3601}}, "agent_hint.cache_control.ttl"),
        ({"cache_control": {"ttl": -1}}, "agent_hint.cache_control.ttl"),
        ({"cache_control": {"ttl": "300"}}, "agent_hint.cache_control.ttl"),
        ({"cache_control": {"type": "forever"}}, "agent_hint.cache_control.type"),
        ({"cache_control": {"block_offset": 2}}, "agent_hint.cache_control.block_offset"),
        ({"session_id": ""}, "agent_hint.session_id"),
        ({"session_id": "x" * 257}, "agent_hint.session_id"),
        ({"parent_session_id": "\n"}, "agent_hint.parent_session_id"),
        (
            {"context_management": {"edits": [{"type": "offload"}]}},
            "agent_hint.context_management.edits[0].type",
        ),
        (
            {"context_management": {"edits": [{"type": "evict", "block_start": 0}]}},
            "agent_hint.context_management.edits",
        ),
        (
            {"context_management": {"edits": [{"type": "prefetch"}]}},
            "agent_hint.context_management.edits",
        ),
        (
            {"context_management": {"manage_request": True}},
            "agent_hint.context_management.edits",
        ),
        ("keep", "agent_hint"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, hint, field):
    answer = client.post(COMPLETION, json=PROMPT | {"agent_hint": hint})
    is_error(answer, 400, "agent_hint")
    assert answer.json()["error"]["param"] == field


def test_the_same_over_grpc(keeping, client):
    hint = {"session_id": "g", "cache_control": {"ttl": 60}}
    ids = pb.TokenIds(ids=PROMPT["prompt"])
    wanted = pb.GenerateRequest(token_ids=ids, agent_hint_json=json.dumps(hint))
    wanted.sampling.max_tokens = 1
    with grpc.insecure_channel(keeping.server.grpc.address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        stub.GenerateOnce(wanted)
        wanted.agent_hint_json = "["
        with pytest.raises(grpc.RpcError) as caught:
            stub.GenerateOnce(wanted)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert kept(client) == 10
