"""What agents sent to this server is answered as it was, with the warnings that belong to it."""

import json
from pathlib import Path

import pytest
from scripted import say, scripted_server

AGENTS = Path(__file__).parents[2] / "data/agents"
RECORDS = [
    pytest.param(record, id=f"{path.stem}-{number}")
    for path in sorted(AGENTS.glob("*.json"))
    for number, record in enumerate(json.loads(path.read_text()))
]
CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "strict"])
def server(request):
    options = {"strict": request.param, "reasoning_parser": "think", "grpc": False}
    with scripted_server("hermes", **options) as running:
        yield running


def function_of(body: dict) -> str:
    """The name of the first function, which an agent has to run itself."""
    tools = (each.get("function", each) for each in body["tools"])
    return next(each["name"] for each in tools if each.get("type") in (None, "function"))


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_recorded_request(server, client, record, stream):
    body = record["body"] | {"stream": stream}
    if record["status"] == 200:
        say(server, "<think>\nHm.\n</think>\n\n" + CALL % function_of(body))
    answer = client.post(record["path"], json=body)
    assert answer.status_code == record["status"], answer.text
    assert answer.headers.get("warning") == record["warning"]
    if record["status"] == 200:
        assert f'"name":"{function_of(body)}"' in answer.text
        thoughts = ('"type":"thinking"', '"type":"reasoning"', '"reasoning_content":"')
        assert any(each in answer.text for each in thoughts)


def test_all_that_was_recorded_is_known_by_name():
    """A record of a later version may bring fields that nobody here knows: give them a place."""
    assert {record.values[0]["status"] for record in RECORDS} == {200, 400}
    refused = [r.values[0]["body"] for r in RECORDS if r.values[0]["status"] == 400]
    assert all(body["tools"][0]["type"].startswith("web_search") for body in refused)
