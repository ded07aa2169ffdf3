"""Every point where a fault can be put, with every action that makes sense there, under load."""

import json
import threading

import pytest
from kit import running_server

from serving.run.faults import POINTS, install, parse_fault
from serving.server.responses import Writer
from shiftjax.options import ConfigError

PATH = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 30, "seed": 7, "ignore_eos": True}
CHOICE = {"prompt": "x", "structured_outputs": {"choice": ["ja", "nein"]}, "max_tokens": 9}
CASES = [
    *((p, action) for p in POINTS if p != "drain" for action in ("raise", "delay", "oom")),
    ("fetch", "nan"),
]
ONCE = ("grammar", "abort")  # called once in this load
FAILING = {"raise": {500, 503}, "oom": {500, 503}, "delay": set(), "nan": {500}}


@pytest.mark.parametrize(("point", "action"), CASES)
def test_a_fault_ends_what_it_hits_and_nothing_else(monkeypatch, point, action):
    for name in ("chunks", "encoded"):  # put back at the end what `install` changes
        monkeypatch.setattr(Writer, name, getattr(Writer, name))
    with running_server() as server, server.client() as client:
        alone = client.post(PATH, json=BODY).json()["choices"]
        server.runner.step_seconds = 0.002
        core = server.engine._engine
        when = 1 if point in ONCE else 2
        happened = install(parse_fault(f"{point}:{action}:{when}"), core, server.service)
        answers, streams = [], []

        def run(number: int) -> None:
            with server.client() as own:
                if number == 5:
                    answers.append(own.post(PATH, json=CHOICE))
                elif number == 4:
                    streams.append(own.post(PATH, json=BODY | {"stream": True}))
                elif number == 6:  # gives up
                    own.post(PATH, json=BODY, headers={"x-request-timeout": "0.02"})
                else:
                    answers.append(own.post(PATH, json=BODY))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in answers:
            assert answer.status_code in {200} | FAILING[action], answer.text
            if answer.status_code == 200 and answer.json()["choices"][0]["text"] not in (
                "ja",
                "nein",
            ):
                assert answer.json()["choices"] == alone
            assert "purpose" not in answer.text
        (stream,) = streams
        assert stream.status_code in {200} | FAILING[action], stream.text
        if stream.status_code == 200:
            *events, done = [line for line in stream.text.split("\n\n") if line]
            choices = [json.loads(event.removeprefix("data: ")).get("choices") for event in events]
            assert done == "data: [DONE]"
            text = "".join(choice["text"] for each in choices for choice in each or ())
            assert text == alone[0]["text"] or (choices[-1] is None and FAILING[action])
        assert happened[point]
        again = client.post(PATH, json=BODY)
        if again.status_code != 200:  # the second call of a point that is called once a request
            again = client.post(PATH, json=BODY)
        assert again.json()["choices"] == alone
        server.assert_quiescent()


@pytest.mark.parametrize(
    "text", ["", "fetch", "nowhere:raise:1", "fetch:explode:1", "fetch:raise:x", "commit:nan:1"]
)
def test_a_fault_that_is_none(text):
    with pytest.raises(ConfigError):
        parse_fault(text)
