"""A model's defaults of sampling hold where a request says nothing, in every API."""

import pytest
from kit import running_server

from serving.server.errors import ServeError
from serving.server.schema import read_chat, read_completion, with_server_defaults

DEFAULTS = {"temperature": 0.6, "top_k": 20, "max_tokens": 3}
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hello to you"}]}


def sampling_of(read, **values):
    return with_server_defaults(read(values), DEFAULTS).sampling


def test_a_field_that_is_given_goes_before_the_default():
    found = sampling_of(read_completion, prompt="x", temperature=1.0, top_k=0)
    assert (found.temperature, found.top_k, found.max_tokens) == (1.0, 0, 16)
    found = sampling_of(read_completion, prompt="x", temperature=None, top_p=0.5)
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.5)
    found = sampling_of(read_chat, **CHAT)
    assert (found.temperature, found.top_k, found.max_tokens) == (0.6, 20, 3)
    assert sampling_of(read_chat, **CHAT, max_completion_tokens=7).max_tokens == 7


def test_a_request_against_a_default_is_refused_by_its_field():
    with pytest.raises(ServeError, match=r"min_tokens .5. must not exceed max_tokens .3."):
        sampling_of(read_chat, **CHAT, min_tokens=5)


def test_the_server_applies_and_tells_them():
    with running_server(defaults=DEFAULTS) as server, server.client() as client:
        told = client.get("/v1/models/echo").json()
        assert told["default_sampling_params"] == DEFAULTS
        chat = client.post("/v1/chat/completions", json=CHAT).json()
        assert chat["usage"]["completion_tokens"] == 3
        chat = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).json()
        assert chat["usage"]["completion_tokens"] == 2
        body = {"model": "echo", "input": "hello to you"}
        answer = client.post("/v1/responses", json=body).json()
        assert answer["usage"]["output_tokens"] == 3
