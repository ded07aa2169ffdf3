"""Requests made up from the served OpenAPI document get documented answers, never a 5xx."""

import pytest
from hypothesis import HealthCheck, given, settings
from kit import running_server

schemathesis = pytest.importorskip("schemathesis", reason="needs: pip install schemathesis")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
POSTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
)
SETTINGS = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server():
    with running_server(grpc=False) as running:
        yield running
        running.assert_quiescent()


@pytest.fixture(scope="module")
def operations(server):
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {each.path: each for each in (result.ok() for result in api.get_all_operations())}


def try_out(operation, mode) -> None:
    @SETTINGS
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_bodies(operations, path, mode):
    try_out(operations[path], mode)


@pytest.mark.costs(15)
def test_everything_else(operations):
    others = [each for path, each in operations.items() if path not in POSTS]
    assert len(others) >= 7
    for operation in others:
        try_out(operation, GenerationMode.POSITIVE)
