"""`/reset_prefix_cache`: what it forgets, who may ask for it, and what runs meanwhile."""

import threading

import pytest
from kit import COMPLETION, is_error, running_server

PATH = "/reset_prefix_cache"
PROMPT = {"prompt": [*range(40)], "max_tokens": 1}
KEY = "sk-secret"


def num_cached(client) -> int:
    usage = client.post(COMPLETION, json=PROMPT).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "query", ["", "?reset_external=true&reset_running_requests=True", "?reset_external=0"]
)
def test_nothing_is_found_afterwards(client, query):
    num_cached(client)
    assert num_cached(client) > 0
    answer = client.post(PATH + query)
    assert (answer.status_code, answer.content) == (200, b"{}")
    assert num_cached(client) == 0
    assert num_cached(client) > 0


@pytest.mark.parametrize(
    ("query", "param"), [("reset=true", "reset"), ("reset_external=maybe", "reset_external")]
)
def test_wrong_parameters(client, query, param):
    is_error(client.post(f"{PATH}?{query}"), 400, param)
    assert client.get(PATH).status_code == 405


def test_running_requests_go_on(server, client):
    server.runner.step_seconds = 0.01
    body = PROMPT | {"max_tokens": 60, "ignore_eos": True, "seed": 1}
    found = {}

    def ask():
        with server.client() as own:
            found["text"] = own.post(COMPLETION, json=body).json()["choices"][0]["text"]

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_until(lambda: server.num_running() == 1)
    running = client.post(f"{PATH}?reset_running_requests=true")
    is_error(running, 409, "reset_running_requests")
    assert client.post(PATH).status_code == 200
    thread.join()
    server.runner.step_seconds = 0.0
    assert client.post(COMPLETION, json=body).json()["choices"][0]["text"] == found["text"]


def test_it_needs_a_key_where_strangers_come():
    with running_server(grpc=False, keys=(KEY,), api_key=KEY) as server, server.client() as client:
        is_error(client.post(PATH), 401)
        bearer = {"authorization": f"Bearer {KEY}"}
        assert client.post(PATH, headers=bearer).status_code == 200
    # Keys may come of a file or a variable, too.
    open_to_all = {"grpc": False, "host": "0.0.0.0"}
    with running_server(keys=(KEY,), **open_to_all) as server, server.client() as client:
        assert client.post(PATH, headers=bearer).status_code == 200
    with running_server(**open_to_all) as server, server.client() as client:
        is_error(client.post(PATH), 403)
