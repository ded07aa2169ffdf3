"""The door for a trainer: who may come in, what it changes, and what becomes of requests."""

import threading

import pytest
from engines import make
from kit import COMPLETION, is_error, running_server
from rollouts_kit import GREEDY, PROMPTS, directory_of, expected, other_weights

from serving.http.control import PATHS

KEY, CONTROL = "sk-user", "sk-trainer"
TRAINER = {"authorization": f"Bearer {CONTROL}"}


def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "control"
    path.write_text(CONTROL)
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = key_file(tmp_path_factory)
    with running_server(grpc=False, keys=(KEY,), api_key=KEY, control_key_file=file) as running:
        yield running


@pytest.fixture
def trainer(server):
    with server.client(headers=TRAINER) as client:
        yield client


@pytest.fixture
def user(server):
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


def ask(server, path: str, method: str, **more):
    with server.client(**more) as client:
        return client.request(method, path)


@pytest.mark.parametrize("path", PATHS)
def test_a_users_key_opens_nothing(server, path):
    method = PATHS[path][1]
    is_error(ask(server, path, method), 401)
    is_error(ask(server, path, method, headers={"authorization": f"Bearer {KEY}"}), 401)
    is_error(ask(server, COMPLETION, "POST", headers=TRAINER), 401)


def test_without_a_key_of_theirs_there_are_no_such_paths():
    with running_server(grpc=False) as running, running.client() as client:
        for path, (_, method, _) in PATHS.items():
            is_error(client.request(method, path), 404)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=soon", "mode"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/sleep?level=3", "level"),
        ("/sleep?depth=3", "depth"),
        ("/wake_up?tags=weights&tags=kv", "tags"),
        ("/resume?now=1", "now"),
    ],
)
def test_wrong_parameters(trainer, path, param):
    is_error(trainer.post(path), 400, param)
    assert trainer.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("body", [{}, {"path": 3}, {"path": "a", "of": "b"}])
def test_wrong_bodies(trainer, body):
    is_error(trainer.post("/update_weights", json=body), 400)


def test_an_engine_without_weights_does_not_sleep(trainer):
    is_error(trainer.post("/sleep"), 409)
    is_error(trainer.post("/update_weights", json={"path": "/nowhere"}), 409)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_and_those_that_run_and_come(server, trainer, user, mode):
    server.runner.step_seconds = 0.01
    body = {"prompt": [*range(9)], "max_tokens": 40, "ignore_eos": True, "seed": 1}
    plain = user.post(COMPLETION, json=body).json()["choices"][0]
    found = []

    def request():
        with server.client(headers={"authorization": f"Bearer {KEY}"}) as own:
            found.append(own.post(COMPLETION, json=body).json())

    first, second = threading.Thread(target=request), threading.Thread(target=request)
    first.start()
    server.wait_until(lambda: server.num_running() == 1)
    assert trainer.post(f"/pause?mode={mode}").json() == {"status": "paused"}
    assert trainer.get("/is_paused").json() == {"is_paused": True}
    second.start()
    server.wait_until(lambda: len(server.engine.handles) == (2 if mode == "keep" else 1))
    assert server.engine.stalled_seconds() == 0 and server.engine.is_ready
    assert trainer.post("/resume").json() == {"status": "resumed"}
    first.join()
    second.join()
    server.runner.step_seconds = 0.0
    choices = [each["choices"][0] for each in found]
    ends = sorted(choice["finish_reason"] for choice in choices)
    assert ends == (["abort", "length"] if mode == "abort" else ["length"] * 2)
    texts = {choice["text"] for choice in choices if choice["finish_reason"] == "length"}
    assert texts == {plain["text"]}


@pytest.mark.costs(20)
def test_weights_change_over_http(tmp_path_factory):
    """Requests before, while it sleeps and after: each has the tokens of its weights."""
    new = other_weights(1)
    built = make(directory_of(other_weights(0)), 2, 1)
    options = {"control_key_file": key_file(tmp_path_factory), "grpc": False}
    wish = {"max_tokens": GREEDY.max_tokens, "temperature": 0, "ignore_eos": True}
    wish |= {"prompt": PROMPTS[0], "return_token_ids": True}
    with (
        running_server(built.engine, rollouts=built.rollouts, **options) as running,
        running.client(headers=TRAINER) as client,
    ):

        def choice() -> dict:
            return client.post(COMPLETION, json=wish).json()["choices"][0]

        def tokens() -> list[int]:
            return choice()["token_ids"]

        assert tokens() == expected(other_weights(0), PROMPTS[0])
        assert "weight_version" not in choice()
        answer = client.post("/update_weights", json={"path": str(directory_of(new))})
        assert answer.json() == {"weight_version": 1}
        assert tokens() == expected(new, PROMPTS[0])
        assert choice()["weight_version"] == 1
        assert client.post("/sleep?level=1").json() == {"is_sleeping": True}
        assert built.rollouts.held_bytes()["weights"] == 0
        is_error(client.post("/resume"), 409)
        found = []
        thread = threading.Thread(target=lambda: found.append(tokens()))
        thread.start()
        running.wait_until(lambda: len(running.engine.handles) == 1)
        assert client.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
        assert client.post("/wake_up?tags=kv_cache").json() == {"is_sleeping": False}
        thread.join()
        assert found == [expected(new, PROMPTS[0])]
        bad = client.post("/update_weights", json={"path": "/nowhere"})
        is_error(bad, 400)
        assert tokens() == expected(new, PROMPTS[0])
