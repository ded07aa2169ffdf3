"""Predicted outputs: the same text in fewer steps, counted, and refused where they are no text."""

import grpc
import pytest
from kit import (
    CHAT,
    COMPLETION,
    USER,
    VOCAB_SIZE,
    events,
    is_error,
    make_drafting_engine,
    running_server,
)

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

LENGTH = 40
SHAPE = f"[a-z]{{{LENGTH}}}"  # so that tokens become text and text the same tokens
ASKED = {"max_tokens": 60, "seed": 3, "structured_outputs": {"regex": SHAPE}}
BODIES = {COMPLETION: {"prompt": "x", **ASKED}, CHAT: {"messages": USER, **ASKED}}
DETAILS = "completion_tokens_details"


@pytest.fixture(scope="module")
def server():
    """Drafts come from predictions alone: nobody says these texts twice."""
    with running_server(make_drafting_engine(speculation="ngram", prompt_lookup_min=5)) as running:
        yield running


def predict(content) -> dict:
    return {"prediction": {"type": "content", "content": content}}


def text_of(answer) -> str:
    choice = answer.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", BODIES)
def test_a_prediction_saves_steps_and_changes_no_text(server, client, path):
    steps = server.runner.modes
    begin = len(steps)
    plain = client.post(path, json=BODIES[path])
    num_plain, begin = len(steps) - begin, len(steps)
    text = text_of(plain)
    assert len(text) == LENGTH and DETAILS not in plain.json()["usage"]
    right = client.post(path, json=BODIES[path] | predict(text))
    assert text_of(right) == text
    assert len(steps) - begin < num_plain / 5
    details = right.json()["usage"].pop(DETAILS)
    assert details["rejected_prediction_tokens"] == 0
    assert LENGTH - 10 < details["accepted_prediction_tokens"] < LENGTH
    assert right.json()["usage"]["completion_tokens"] == plain.json()["usage"]["completion_tokens"]
    parts = [{"type": "text", "text": text[:7]}, {"type": "text", "text": text[7:]}]
    in_parts = client.post(path, json=BODIES[path] | predict(parts))
    assert in_parts.json()["usage"][DETAILS] == details
    half = client.post(path, json=BODIES[path] | predict(text[:20] + "-" * 20)).json()
    assert half["choices"] == right.json()["choices"]
    counts = half["usage"][DETAILS]
    assert 10 < counts["accepted_prediction_tokens"] < 25
    assert text_of(client.post(path, json=BODIES[path] | predict("zzz"))) == text


def test_streams_and_continuations_are_counted(client):
    body = BODIES[COMPLETION] | {"n": 2}
    choices = client.post(COMPLETION, json=body).json()["choices"]
    assert choices[0]["text"] != choices[1]["text"]
    usages = []
    for choice in choices:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        given = body | options | predict(choice["text"])
        usages.append(events(client.post(COMPLETION, json=given).text)[-1]["usage"][DETAILS])
    for counts in usages:  # one of the two is as predicted, whichever; the other finds parts of it
        assert LENGTH - 10 < counts["accepted_prediction_tokens"] < 2 * LENGTH


def test_a_wrong_prediction_is_counted_as_rejected(client):
    body = BODIES[COMPLETION]
    text = text_of(client.post(COMPLETION, json=body))
    answer = client.post(COMPLETION, json=body | predict(text[:2] + "q" * 20))
    assert text_of(answer) == text
    counts = answer.json()["usage"][DETAILS]
    assert counts["accepted_prediction_tokens"] <= 3 < counts["rejected_prediction_tokens"]


def test_grpc_has_it_too(server, client):
    text = text_of(client.post(COMPLETION, json=BODIES[COMPLETION]))
    sampling = pb.Sampling(max_tokens=60, seed=3, regex=SHAPE)
    request = pb.GenerateRequest(text="x", sampling=sampling, prediction=text)
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        once = stub.GenerateOnce(request)
        usage = list(stub.Generate(request))[-1].usage
        request.prediction = ""
        nothing = stub.GenerateOnce(request).usage
    assert once.completions[0].text == text
    assert LENGTH - 10 < once.usage.accepted_prediction_tokens < LENGTH
    assert once.usage.rejected_prediction_tokens == 0
    assert usage == once.usage
    assert (nothing.accepted_prediction_tokens, nothing.rejected_prediction_tokens) == (0, 0)


def test_without_drafts_it_is_taken_and_has_no_effect():
    with running_server() as server, server.client() as client:
        plain = client.post(CHAT, json=BODIES[CHAT]).json()
        same = client.post(CHAT, json=BODIES[CHAT] | predict("something")).json()
        assert same["choices"] == plain["choices"]
        nothing = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        assert same["usage"][DETAILS] == nothing


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"content": "x"},
        {"type": "content"},
        {"type": "tokens", "content": "x"},
        {"type": "content", "content": 5},
        {"type": "content", "content": [1, 2]},
        {"type": "content", "content": [{"type": "image_url", "text": "x"}]},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": "x" * (VOCAB_SIZE * 300)},
    ],
    ids=lambda value: repr(value)[:50],
)
def test_what_is_no_text_is_refused(client, path, prediction):
    is_error(client.post(path, json=BODIES[path] | {"prediction": prediction}), 400, "prediction")


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_prediction_is_none(client, content):
    answer = client.post(CHAT, json=BODIES[CHAT] | predict(content))
    assert answer.status_code == 200 and DETAILS not in answer.json()["usage"]
