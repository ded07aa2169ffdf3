"""Responses in the background: queued, asked for by their id, cancelled, resumed."""

import time

import pytest
from kit import is_error, metric_total, metric_values, running_server

RESPONSES = "/v1/responses"
ONE, OTHER = ({"authorization": f"Bearer {key}"} for key in ("key-one", "key-other"))
BODY = {"model": "echo", "max_output_tokens": 6, "seed": 1, "ignore_eos": True, "input": "hi"}
BEHIND = BODY | {"background": True}
ENDED = ("completed", "failed", "cancelled", "incomplete")


@pytest.fixture(scope="module")
def server():
    keys = ("key-one", "key-other")
    with running_server(grpc=False, keys=keys, store_responses="1MiB") as running:
        yield running


@pytest.fixture
def client(server):
    with server.client(headers=ONE) as client:
        yield client
    server.let_go()
    server.assert_quiescent()


def begin(client, **fields) -> dict:
    answer = client.post(RESPONSES, json=BEHIND | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait(client, response: dict, *states: str) -> dict:
    for _ in range(1000):
        answer = client.get(f"{RESPONSES}/{response['id']}")
        assert answer.status_code == 200, answer.text
        if answer.json()["status"] in (states or ENDED):
            return answer.json()
        time.sleep(0.01)
    raise AssertionError(answer.text)


def test_it_is_queued_and_then_what_it_would_have_been(client):
    queued = begin(client, metadata={"a": "b"})
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    assert queued["store"] is True
    ended = wait(client, queued)
    direct = client.post(RESPONSES, json=BODY).json()
    assert ended["output"][0]["content"] == direct["output"][0]["content"]
    assert ended["status"] == direct["status"]
    assert ended["usage"]["total_tokens"] == direct["usage"]["total_tokens"]
    assert ended["background"] and ended["metadata"] == {"a": "b"}
    follows = client.post(RESPONSES, json=BODY | {"previous_response_id": ended["id"]}).json()
    assert follows["usage"]["input_tokens"] > direct["usage"]["input_tokens"]


def test_it_is_cancelled(server, client):
    server.runner.step_seconds = 0.02
    running = begin(client, max_output_tokens=200)
    wait(client, running, "in_progress")
    server.wait_until(lambda: server.num_running() == 1)
    path = f"{RESPONSES}/{running['id']}"
    assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
    server.wait_until(lambda: server.num_running() == 0)
    assert client.get(path).json()["status"] == "cancelled"
    assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
    ended = wait(client, begin(client))
    cancelled = client.post(f"{RESPONSES}/{ended['id']}/cancel").json()
    assert cancelled == ended  # too late
    direct = client.post(RESPONSES, json=BODY).json()
    is_error(client.post(f"{RESPONSES}/{direct['id']}/cancel"), 400, "background")


def test_it_is_deleted_while_it_runs(server, client):
    server.runner.step_seconds = 0.02
    running = begin(client, max_output_tokens=200)
    values = metric_values(client)
    assert metric_total(values, "shiftjax:num_background_responses") == 1
    assert 1000 < metric_total(values, "shiftjax:stored_response_bytes") < 1 << 20
    path = f"{RESPONSES}/{running['id']}"
    assert client.delete(path).json()["deleted"] is True
    is_error(client.get(path), 404)
    server.wait_until(lambda: server.num_running() == 0)


def test_no_other_key_sees_or_ends_it(server, client):
    server.runner.step_seconds = 0.02
    running = begin(client, max_output_tokens=100)
    path = f"{RESPONSES}/{running['id']}"
    with server.client(headers=OTHER) as other:
        for answer in (other.get(path), other.post(f"{path}/cancel"), other.delete(path)):
            is_error(answer, 404)
    server.let_go()
    assert wait(client, running)["status"] == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"store": False}, "store"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"model": "other"}, "model"),
        ({"background": "yes"}, "background"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
def test_what_is_wrong_is_said_at_once(client, fields, param):
    answer = client.post(RESPONSES, json=BEHIND | fields)
    is_error(answer, 404 if param == "model" else 400, param)


def test_what_fails_later_says_so(client):
    failed = wait(client, begin(client, input="x" * 300))  # more than the context
    assert failed["status"] == "failed" and failed["output"] == []
    assert failed["error"]["code"] and failed["error"]["message"]


def test_an_id_is_not_given_twice(server, client):
    server.runner.step_seconds = 0.02
    first = begin(client, request_id="again", max_output_tokens=50)
    is_error(client.post(RESPONSES, json=BEHIND | {"request_id": "again"}), 409)
    server.let_go()
    wait(client, first)
    is_error(client.post(RESPONSES, json=BEHIND | {"request_id": "again"}), 409)


def test_a_key_has_so_many_at_once(server, client):
    server.runner.step_seconds = 0.02
    many = [begin(client, max_output_tokens=200) for _ in range(64)]
    is_error(client.post(RESPONSES, json=BEHIND), 429)
    with server.client(headers=OTHER) as other:
        assert other.post(RESPONSES, json=BEHIND).status_code == 200
    for each in many:
        client.delete(f"{RESPONSES}/{each['id']}")
    server.let_go()
    server.wait_until(lambda: not server.engine.handles)


def test_a_server_that_keeps_nothing_refuses_it():
    with running_server(grpc=False) as server, server.client() as client:
        answer = client.post(RESPONSES, json=BEHIND)
        is_error(answer, 400, "background")
        assert "--store-responses" in answer.text
        assert client.post(RESPONSES, json=BEHIND | {"background": False}).status_code == 200


def test_a_restart_answers_what_was_left(tmp_path):
    options = {"grpc": False, "store_responses": "1MiB", "store_dir": str(tmp_path)}
    with running_server(**options, drain_seconds=0.0) as server, server.client() as client:
        ended = wait(client, begin(client))
        server.runner.step_seconds = 0.05
        left = begin(client, max_output_tokens=100)
        wait(client, left, "in_progress")
    with running_server(**options) as server, server.client() as client:
        assert wait(client, left)["usage"]["output_tokens"] == 100
        assert client.get(f"{RESPONSES}/{ended['id']}").json() == ended
        server.assert_quiescent()
