"""A request's own timeline in its answer, and what a stream says while its request waits."""

import json
import threading
import time
from contextlib import contextmanager

import pytest
from kit import (
    CHAT,
    COMPLETION,
    USER,
    events,
    is_error,
    make_drafting_engine,
    make_engine,
    running_server,
)

BODIES = {
    COMPLETION: {"prompt": "x" * 70, "max_tokens": 20, "ignore_eos": True},
    CHAT: {"messages": [{"role": "user", "content": "x" * 70}], "max_tokens": 20},
}
ASKED = {"seed": 3, "ignore_eos": True, "timeline": True}


@pytest.fixture(scope="module")
def server():
    """One sequence at a time, so that others wait."""
    with running_server(make_engine(max_num_seqs=1)) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_a_timeline_says_which_mode_made_which_token(client, path):
    """70 tokens are a step of base, whose last row is the first token; then one a step."""
    plain = client.post(path, json=BODIES[path] | ASKED | {"timeline": False}).json()
    assert "timeline" not in plain
    answer = client.post(path, json=BODIES[path] | ASKED | {"cache_salt": "a"}).json()
    assert answer["choices"] == plain["choices"]
    line = answer["timeline"]
    assert line["modes"] == [["base", 1], ["shift", 19]]
    assert line["tokens"] == line["steps"] == {"base": 1, "shift": 19}
    assert (line["output_tokens"], line["preemptions"], line["draft_tokens"]) == (20, 0, 0)
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    seconds = [line[f"{phase}_seconds"] for phase in ("queue", "prefill", "decode")]
    assert all(0 <= each < 30 for each in seconds) and seconds[2] > 0
    again = client.post(path, json=BODIES[path] | ASKED | {"cache_salt": "a"}).json()["timeline"]
    assert again["cached_tokens"] > 60 and line["cached_tokens"] == 0
    assert again["modes"] == [["shift", 20]]


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_ends_with_its_timeline(client, usage):
    body = BODIES[COMPLETION] | ASKED | {"stream": True, "max_tokens": 4}
    body["stream_options"] = {"include_usage": usage}
    *chunks, last = events(client.post(COMPLETION, json=body).text)
    assert last["choices"] == [] and ("usage" in last) is usage
    assert sum(number for _, number in last["timeline"]["modes"]) == 4
    assert not any("timeline" in chunk for chunk in chunks)


def test_the_timeline_is_of_the_first_continuation(client):
    """Tokens behind a stop string are no part of it, nor are those of others."""
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 30, "seed": 1}
    text = client.post(COMPLETION, json=body).json()["choices"][0]["text"]
    body |= {"stop": [text[3:6]], "timeline": True, "return_token_ids": True}
    answer = client.post(COMPLETION, json=body).json()
    num_tokens = len(answer["choices"][0]["token_ids"])
    assert answer["timeline"]["modes"] == [["shift", num_tokens]]
    assert answer["timeline"]["output_tokens"] == num_tokens < 30


def test_accepted_drafts_are_counted():
    shape = {"structured_outputs": {"regex": "[a-z]{40}"}, "max_tokens": 60, "seed": 3}
    body = {"messages": USER, "timeline": True, **shape}
    engine = make_drafting_engine(speculation="ngram", prompt_lookup_min=5)
    with running_server(engine) as running, running.client() as client:
        text = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
        body["prediction"] = {"type": "content", "content": text}
        line = client.post(CHAT, json=body).json()["timeline"]
        assert 30 < line["accepted_draft_tokens"] <= line["draft_tokens"]
        assert sum(line["steps"].values()) < sum(line["tokens"].values()) / 4


@pytest.mark.parametrize("value", ["true", 1, [], {}])
def test_what_is_no_timeline_is_refused(client, value):
    is_error(client.post(COMPLETION, json={"prompt": "x", "timeline": value}), 400, "timeline")


# ---------------------------------------------------------------- the queue


@contextmanager
def busy(server):
    """A request that takes its time; what is let go of with it ends."""
    server.runner.step_seconds = 0.05
    body = {"prompt": "long", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with server.client() as own, own.stream("POST", COMPLETION, json=body) as stream:
        lines = stream.iter_lines()  # which, once collected, would close the stream
        next(lines)
        yield
    server.runner.step_seconds = 0.0


def place_of(lines, num_waiting: int = 1) -> dict:
    """The first one that is said when so many wait."""
    for line in filter(None, lines):
        assert line.startswith(": waiting "), line
        place = json.loads(line.removeprefix(": waiting "))
        if place["of"] == num_waiting:
            return place
    raise AssertionError("the stream has ended")


def test_a_stream_says_where_it_waits(server, client):
    """In the order of the queue: a lower priority value goes first."""
    client.post(COMPLETION, json={"prompt": "x", "max_tokens": 2})  # an estimate rests on it
    places = {}
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True, "timeline": True}

    def wait(priority: int) -> None:
        own_body = body | {"priority": priority}
        with server.client() as own, own.stream("POST", COMPLETION, json=own_body) as stream:
            lines = stream.iter_lines()
            places[priority] = place_of(lines, 3)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        line = json.loads(rest[-2].removeprefix("data: "))["timeline"]
        assert line["queue_seconds"] > 0.4 and line["output_tokens"] == 3

    threads = [threading.Thread(target=wait, args=(priority,)) for priority in (3, 2, 1)]
    with busy(server):
        for number, thread in enumerate(threads, start=1):
            thread.start()
            server.wait_until(lambda most=number: server.engine.stats.num_waiting == most)
        server.wait_until(lambda: len(places) == 3)
    for thread in threads:
        thread.join()
    assert {key: (each["position"], each["of"]) for key, each in places.items()} == {
        1: (1, 3),
        2: (2, 3),
        3: (3, 3),
    }
    seconds = [places[key]["expected_seconds"] for key in (1, 2, 3)]
    assert 0 < seconds[0] < seconds[1] < seconds[2]


def test_who_does_not_ask_for_a_timeline_keeps_the_status_of_an_error(server, client):
    body = {"prompt": "x", "stream": True}
    headers = {"x-request-timeout": "0.9"}
    with busy(server):
        is_error(client.post(COMPLETION, json=body, headers=headers), 504)
        response = client.post(COMPLETION, json=body | {"timeline": True}, headers=headers)
        assert response.status_code == 200
        comment, error, done = response.text.strip().split("\n\n")
        assert comment.startswith(": waiting ") and done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_who_waits_and_goes_is_forgotten(server, client):
    body = {"prompt": "x", "stream": True, "timeline": True}
    with busy(server):
        with server.client() as own, own.stream("POST", COMPLETION, json=body) as stream:
            place_of(stream.iter_lines())
        server.wait_until(lambda: server.engine.stats.num_waiting == 0)


def test_an_engine_that_does_not_answer_holds_no_stream_up(server, client):
    """A step hangs: no place is known, and the deadline ends the stream all the same."""
    server.runner.gate.clear()
    body = {"prompt": "x", "stream": True, "timeline": True}
    begin = time.monotonic()
    response = client.post(COMPLETION, json=body, headers={"x-request-timeout": "1.2"})
    is_error(response, 504)
    assert time.monotonic() - begin < 20
