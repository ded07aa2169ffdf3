"""Agents that nobody here wrote run tools until they have an answer, as processes of their own.

They send what they always send (effort, storage, a schema of the answer beside tools); the model is
a script, which calls a tool and answers when it has its result.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripted import say, scripted_server

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
PYTHON = str(HERE.parents[2] / ".venv/clients/bin/python")
NODE = shutil.which("node")
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
WEATHER = CALL % ("get_weather", '{"city": "Rome", "days": 2}')
ROME = ["Rome", 2]
REPORT = {"city": "Rome", "sunny": True}


@pytest.fixture(scope="module")
def server():
    with scripted_server("hermes", strict=True, grpc=False) as running:
        yield running
        running.assert_quiescent()


def printed(*command: str) -> list:
    """What an agent prints; it must end well."""
    run = subprocess.run(
        command,
        cwd=HERE / "node",
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def agent(server, name: str, *arguments: str) -> list:
    """What one in Python prints."""
    script = str(HERE / f"python/{name}_client.py")
    return printed(PYTHON, script, f"{server.url}/v1", "echo", *arguments)


def needs(package: str):
    places = Path(PYTHON).parents[1].glob(f"lib/python*/site-packages/{package}")
    return pytest.mark.skipif(not any(places), reason=f"needs {package}: make .venv/.clients")


@needs("agents")
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(server, api):
    say(server, WEATHER, sunshine=json.dumps(REPORT))
    assert agent(server, "openai_agents", api) == [[REPORT] * 2, [ROME] * 2]


@needs("agents")
def test_openai_agents_with_a_session():
    """The tool is called once in each conversation: its result is in what the server keeps."""
    with scripted_server("hermes", grpc=False, store_responses="1MiB") as running:
        say(running, WEATHER, sunshine="Sun.")
        answers, called, kinds, num_left = agent(running, "openai_agents_session")
    assert (answers, called) == (["Sun."] * 4, [ROME] * 2)
    call = ["message", "function_call", "function_call_output", "message"]
    assert kinds == [*call, "message", "message"] and num_left == 5


@needs("pydantic_ai")
@pytest.mark.parametrize("mode", ["native", "tool"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai(server, api, mode):
    answer = json.dumps(REPORT)
    say(server, WEATHER, sunshine=answer if mode == "native" else CALL % ("report", answer))
    assert agent(server, "pydantic_ai", api, mode) == [[REPORT] * 2, [ROME] * 2]


@needs("smolagents")
def test_smolagents(server):
    say(server, WEATHER, sunshine=CALL % ("final_answer", '{"answer": "Sun."}'))
    assert agent(server, "smolagents") == ["Sun.", [ROME]]


@needs("langgraph")
@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_langgraph(server, api):
    say(server, WEATHER, sunshine="Sun.")
    assert agent(server, "langgraph", api) == [["Sun."] * 2, [ROME] * 2]


def test_the_anthropic_package(server):
    say(server, WEATHER, sunshine="Sun.")
    script = str(HERE / "python/anthropic_client.py")
    assert printed(sys.executable, script, server.url, "echo") == [["Sun."] * 2, [ROME] * 2]


@pytest.mark.skipif(
    NODE is None or not (HERE / "node/node_modules/@anthropic-ai/sdk").is_dir(),
    reason="needs node and, in tests/serving/clients/node, npm install: make .venv/.node",
)
def test_the_anthropic_package_of_node(server):
    say(server, WEATHER, sunshine="Sun.")
    found = printed(str(NODE), "anthropic.mjs", server.url, "echo")
    assert found == [["Sun."] * 2, [ROME] * 2]
