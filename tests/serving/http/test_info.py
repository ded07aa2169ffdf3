"""What routers and balancers ask, pages of other origins, and paths below a prefix."""

import numpy as np
import pytest
from kit import (
    COMPLETION,
    TEMPLATE,
    VOCAB_SIZE,
    make_engine,
    metric_total,
    metric_values,
    running_server,
)

from serving.http.app import all_routes
from serving.http.described import Described
from serving.http.outside import METHODS
from serving.server.options import ServerOptions
from serving.server.service import Service
from shiftjax.routing.history import RoutingHistory

KEY = "sk-secret-key"
BEARER = {"authorization": f"Bearer {KEY}"}
ORIGIN = "https://app.example"
PATHS = (
    "/tokenizer_info",
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
    "/load",
    "/routing",
)


@pytest.fixture(scope="module")
def server():
    options = {"allowed_origins": f"{ORIGIN}, http://localhost:3000", "root_path": "/llm"}
    with running_server(keys=(KEY,), api_key=KEY, grpc=False, **options) as running:
        yield running


@pytest.fixture
def told(client):
    """What a path says to somebody with a key."""
    return lambda path: client.get(path, headers=BEARER).json()


def test_the_model(told):
    assert told("/model_info") == told("/get_model_info")
    about = told("/model_info")
    assert (about["model_path"], about["is_generation"]) == ("echo", True)
    assert (about["vocab_size"], about["has_chat_template"]) == (VOCAB_SIZE, True)


def test_the_tokenizer(told):
    about = told("/tokenizer_info")
    assert (about["bos_token"], about["eos_token"]) == ("<s>", "</s>")
    assert about["chat_template"] == TEMPLATE
    assert about["vocab_size"] == VOCAB_SIZE


def test_the_server_keeps_its_secrets(client, told):
    about = told("/server_info")
    assert about["settings"]["root_path"] == "/llm"
    assert about["status"] == "ready"
    assert (about["served_model_name"], about["dp_size"]) == ("echo", 1)
    assert about["context_length"] == told("/model_info")["max_model_len"]
    assert "api_key" not in about["settings"]
    for path in PATHS:
        assert KEY not in client.get(path, headers=BEARER).text


def test_the_load(server, told):
    assert told("/load") == {"server_load": 0, "num_running": 0, "num_waiting": 0, "kv_usage": 0.0}
    server.runner.step_seconds = 0.02
    with server.client(headers=BEARER) as http:
        body = {"prompt": "x", "max_tokens": 20, "stream": True, "ignore_eos": True}
        with http.stream("POST", COMPLETION, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            about = told("/load")
            assert list(lines)
    assert (about["server_load"], about["num_running"]) == (1, 1)
    assert about["kv_usage"] > 0


def test_keys_guard_everything_but_pings(client):
    for path in PATHS:
        assert client.get(path).status_code == 401, path
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200


def test_which_experts_tokens_choose(client):
    """Of a model that has some; how uneven they are is in the metrics, too."""
    refused = client.get("/routing", headers=BEARER)
    assert refused.status_code == 404 and "no experts" in refused.text
    history = RoutingHistory(1, (8, 2), (2, 4), devices=4)
    history.add(0, np.array([[300, 100, 0, 0, 0, 0, 0, 0]]))
    engine = make_engine()
    engine.parts = (history.told,)
    with running_server(engine, grpc=False) as server, server.client() as http:
        assert http.post(COMPLETION, json={"prompt": "x", "max_tokens": 2}).status_code == 200
        about, values = http.get("/routing").json(), metric_values(http)
        page = http.get("/ui/data").json()
    assert about["skew"] == {"2": [2.0], "4": [4.0]} and about["counts"][0][:2] == [300, 100]
    for layers in ("mean", "worst"):
        found = metric_total(values, "shiftjax:expert_skew", devices="4", layers=layers)
        assert found == 4.0
    assert metric_total(values, "shiftjax:expert_hottest_share", layers="worst") == 0.75
    assert "4.00 times the mean" in page["experts"]["words"]


# ---------------------------------------------------------------- other origins


def preflight(client, origin: str):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    return client.options(COMPLETION, headers={"origin": origin} | asked)


def test_an_origin_that_is_allowed(client):
    answer = preflight(client, ORIGIN)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-credentials" not in answer.headers
    answer = client.post(COMPLETION, json={"prompt": "x"}, headers={"origin": ORIGIN})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == ORIGIN  # so that the page can read it


def test_an_origin_may_send_every_method_that_there_is():
    routes = all_routes(Service(ServerOptions()))
    verbs = {verb for each in routes if isinstance(each, Described) for verb in each.verbs}
    assert verbs == set(METHODS)


def test_other_origins_are_told_nothing(client):
    assert preflight(client, "https://evil.example").status_code == 400
    answer = client.get("/load", headers=BEARER | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


# ---------------------------------------------------------------- a prefix


def test_paths_are_served_below_the_prefix_and_without(client):
    assert client.get("/llm/health").status_code == client.get("/health").status_code == 200
    assert client.get("/llm/load").status_code == 401, "the guard sees the path behind the prefix"
    assert client.get("/llm/load", headers=BEARER).status_code == 200
    assert client.get("/llmload", headers=BEARER).status_code == 404
    assert client.get("/llm/llm/load", headers=BEARER).status_code == 404
    page = client.get("/llm", headers={"accept": "text/html"})
    assert page.status_code in (200, 307)


def test_without_settings_there_is_neither():
    with running_server(grpc=False) as server, server.client() as client:
        assert preflight(client, ORIGIN).status_code == 405
        assert (
            "access-control-allow-origin"
            not in client.get("/health", headers={"origin": ORIGIN}).headers
        )
        assert client.get("/llm/health").status_code == 404
        assert client.get("/load").status_code == 200
