"""Structured output: what grammars give, refuse, and how long they may take."""

import re
import signal
import threading

import pytest
from kit import COMPLETION, all_at_once, is_error, running_server

from serving.server.grammar_trial import Trial


@pytest.mark.parametrize("text", ["a|b", '"\\\n\t', "\x00\x7f", "é日本<b>", "(.*)[&~#-]{2}^$", " "])
def test_choices_are_taken_literally(client, text):
    body = {"prompt": "x", "structured_outputs": {"choice": [text]}, "max_tokens": 60}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "("},
        {"regex": "(?<=a)b"},
        {"regex": "(a{1000}){1000}{1000}"},
        {"regex": "a" * 100_000},
        {"regex": "[^\\u0000-\\U0010ffff]"},
        {"grammar": "start: nothing"},
        {"grammar": "no grammar at all"},
        {"choice": []},
        {"choice": [""] * 3},
        {"json": "{"},
        {"json": "[]"},
        {"json": False},
        {"json": {"type": "number", "minimum": 5, "maximum": 1}},
        {"json": {"$ref": "http://example.org/schema"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"const": "x" * 1_000_000}},
        {"json": {"type": "whatever"}},
        {"json": {"unknownKeyword": 5, "not": {"type": "string"}}},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_constraints_of_no_use(client, constraint):
    body = {"prompt": "x", "structured_outputs": constraint}
    response = client.post(COMPLETION, json=body)
    if constraint == {"choice": ["", "", ""]}:  # only the empty text: that can be served
        assert response.json()["choices"][0]["text"] == ""
        return
    is_error(response, 400)


NEVER_ENDING = [
    {"json": {"type": "integer", "multipleOf": 9999991}},
    {"json": {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(300)]}},
    {"grammar": 'start: %json {"type": "integer", "multipleOf": 9999991}'},
]


def test_grammars_that_never_end(client):
    """They are given up, and take no thread away from those that come later."""
    for constraint in NEVER_ENDING:
        body = {"prompt": "x", "structured_outputs": constraint}
        response = client.post(COMPLETION, json=body)
        is_error(response, 400, "structured_outputs")
        assert response.json()["error"]["code"] == "grammar_invalid"
    for number in range(4):
        schema = {"type": "string", "maxLength": 20 + number}
        body = {"prompt": "x", "structured_outputs": {"json": schema}}
        assert client.post(COMPLETION, json=body).status_code == 200


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
INNER = {"type": "object", "properties": {"abc": WIDE}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json": nested(100)}, "The schema of the output is nested more than 120 levels deep."),
        ({"json": WIDE}, "it is too large or ambiguous"),
        ({"json": INNER}, "it is too large or ambiguous"),
        ({"regex": "[^\\u0000-\\U0010ffff]"}, "nothing can match it"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_served_is_refused_at_the_door_in_our_words(client, constraint, words):
    """Some limits are met only when tokens have been taken; a library's words tell nobody why."""
    response = client.post(COMPLETION, json={"prompt": "x", "structured_outputs": constraint})
    is_error(response, 400, "structured_outputs")
    message = response.json()["error"]["message"]
    assert words in message and "items" not in message and "recursion" not in message


def test_a_schema_of_59_objects_is_not_too_deep(client):
    """Each is two levels: itself and its properties; the innermost is one more."""
    body = {"prompt": "x", "structured_outputs": {"json": nested(59)}}
    assert client.post(COMPLETION, json=body).status_code == 200


def test_a_trial_that_gets_no_cpu_says_nothing_of_the_grammar():
    trial = Trial()
    try:
        trial.start().send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            trial.survives("not even a grammar", 0.2)
        assert trial.survives("not even a grammar", 60.0)
    finally:
        trial.close()


def test_a_grammar_whose_trial_gets_no_cpu_is_not_blamed():
    """The processes that try grammars stand still."""
    with running_server(grammar_timeout=0.3) as server, server.client() as client:
        body = {"prompt": "x", "structured_outputs": {"regex": "[0-9]{3}"}}
        for trial in server.service.grammars._trials:
            trial.start().send_signal(signal.SIGSTOP)
        response = client.post(COMPLETION, json=body)
        is_error(response, 503)
        assert response.headers["retry-after"] == "1"


def test_a_trial_is_made_again_after_its_process_has_died():
    trial = Trial()
    try:
        assert trial.survives("not even a grammar", 60.0)
        process = trial._process
        assert process is not None
        process.kill()
        process.wait()
        assert trial.survives("not even a grammar", 60.0)
        assert trial._process is not process
    finally:
        trial.close()
    assert trial._process is None


def test_time_that_runs_out_is_no_fault_of_a_grammar():
    with running_server(grammar_timeout=0.3) as server:
        gate, prepare = threading.Event(), server.service.grammars.prepare

        def held(source, num):
            gate.wait()
            return prepare(source, num)

        server.service.grammars.prepare = held
        body = {"prompt": "x", "structured_outputs": {"choice": ["a"]}}
        answers = all_at_once(server, body, 5)
        for answer in answers:
            is_error(answer, 503)
            assert answer.json()["error"]["code"] == "server_busy"
            assert answer.headers["retry-after"] == "1"
        gate.set()
        with server.client() as client:
            server.service.grammars.prepare = prepare
            assert client.post(COMPLETION, json=body).status_code == 200
        server.assert_quiescent()


PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"const": 1}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"disable_any_whitespace": True}, ""),
        ({"whitespace_pattern": "[ ]?"}, " ?"),
        ({"whitespace_pattern": r"(\n|\t){0,2}"}, "[\n\t]{0,2}"),
        ({"disable_any_whitespace": False, "whitespace_pattern": None}, r"[ \t\r\n]*"),
    ],
)
@pytest.mark.parametrize("has_format", [False, True])
def test_whitespace_of_json(client, options, pattern, has_format):
    """A random model puts in all that it may: what is left out was not allowed."""
    schema = {"response_format": {"type": "json_schema", "json_schema": {"schema": PAIR}}}
    body = schema | {"structured_outputs": options} if has_format else {}
    body = body or {"structured_outputs": {"json": PAIR} | options}
    if not any(options.values()):
        body = {"structured_outputs": {"json": PAIR}}
    body |= {"prompt": "x", "n": 24, "seed": 4, "max_tokens": 200}
    texts = [each["text"] for each in client.post(COMPLETION, json=body).json()["choices"]]
    parts = ("{", r'"a"', ":", r"-?\d+", ",", r'"b"', ":", "1", "}")
    shape = re.compile(f"({pattern})".join(map(lambda part: f"(?:{part})", ["\\{", *parts[1:]])))
    ended = [text for text in texts if text.endswith("}")]
    assert ended and all(map(shape.fullmatch, ended))
    assert any(set(" \t\n\r") & set(text) for text in ended) is (pattern != "")


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"whitespace_pattern": " "}, "whitespace_pattern"),
        ({"json": PAIR, "whitespace_pattern": "[a-z]*"}, "whitespace_pattern"),
        ({"json": PAIR, "whitespace_pattern": "."}, "whitespace_pattern"),
        ({"json": PAIR, "whitespace_pattern": " " * 65}, "whitespace_pattern"),
        ({"json": PAIR, "whitespace_pattern": 5}, "whitespace_pattern"),
        ({"json": PAIR, "whitespace_pattern": "("}, None),
        (
            {"json": PAIR, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "disable_any_whitespace",
        ),
    ],
)
def test_whitespace_that_is_none(client, wanted, field):
    response = client.post(COMPLETION, json={"prompt": "x", "structured_outputs": wanted})
    is_error(response, 400, "structured_outputs")
    expected = "structured_outputs" if field is None else f"structured_outputs.{field}"
    assert response.json()["error"]["param"] == expected
