"""What the outside is told of an error does not hang on the words of those who found it."""

from dataclasses import replace

import pytest
from kit import COMPLETION

from serving.run.flags import make_sampling
from serving.server import async_engine
from serving.server.errors import ServeError
from serving.server.schema import read_completion
from shiftjax.core import sampling_params
from shiftjax.core.request import RequestError
from shiftjax.options import ConfigError

# As the words of another field, another code, and of two problems.
MISLEADING = "seed; top_p exceed the context of the KV pool; n must be 1"


@pytest.mark.parametrize(
    ("field", "code", "expected"),
    [
        ("prompt", "kv_capacity", "kv_capacity"),
        ("prompt", "context_length_exceeded", "context_length_exceeded"),
        ("min_tokens", None, "invalid_value"),
    ],
)
def test_words_of_the_engine_change_neither_field_nor_code(
    client, monkeypatch, field, code, expected
):
    def refuse(request, limits):
        raise RequestError(MISLEADING, field, code)

    monkeypatch.setattr(async_engine, "validate_request", refuse)
    response = client.post(COMPLETION, json={"prompt": "x"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, field, expected)
    assert error["message"] == MISLEADING


# What OpenAI's clients act upon: they give up, wait, or send the request again.
@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("invalid", 400, "invalid_value"),
        ("unauthenticated", 401, "invalid_api_key"),
        ("not_found", 404, "not_found"),
        ("duplicate", 409, "duplicate_request_id"),
        ("too_large", 413, "request_too_large"),
        ("queue_full", 429, "queue_full"),
        ("quota", 429, "quota_exceeded"),
        ("internal", 500, "internal_error"),
        ("device_memory", 503, "device_oom"),
        ("draining", 503, "server_draining"),
        ("deadline", 504, "deadline_exceeded"),
    ],
)
def test_clients_know_errors_by_status_and_code(kind, status, code):
    error = ServeError(kind, "words")
    assert (error.kind.status, error.body()["error"]["code"]) == (status, code)


def test_words_about_sampling_are_of_one_field(monkeypatch):
    def refuse(value):
        raise ValueError(MISLEADING)

    refusing = replace(sampling_params.PARAMS["min_p"], check=refuse)
    monkeypatch.setitem(sampling_params.PARAMS, "min_p", refusing)
    with pytest.raises(ServeError) as served:
        read_completion({"prompt": "x"})
    assert served.value.violations == (("min_p", MISLEADING),)
    with pytest.raises(ConfigError) as typed:
        make_sampling({})
    assert typed.value.problems == (f"min_p {MISLEADING}",)
