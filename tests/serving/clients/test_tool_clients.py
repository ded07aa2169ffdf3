"""Clients that nobody here wrote call tools, as processes of their own, whole and streamed.

LangChain and instructor want an older `openai` than ours: they run in an environment of their own,
whose interpreter CLIENTS_PYTHON names (pip install langchain-openai instructor).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from scripted import say, scripted_server

HERE = Path(__file__).parent
PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)
NODE = shutil.which("node")
ROME = {"city": "Rome", "days": 2}
CALL = f'<tool_call>\n{{"name": "%s", "arguments": {json.dumps(ROME)}}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server():
    with scripted_server("hermes") as running:
        say(running, CALL % "get_weather")
        yield running


def output_of(*command: str, **environ: str) -> list | dict:
    """What a client prints; it must end well."""
    kept = {"PATH": os.environ["PATH"], "NODE_PATH": os.environ.get("NODE_PATH", "")} | environ
    run = subprocess.run(
        command,
        cwd=HERE / "node",
        env=kept,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def needs_python(package: str) -> None:
    """Skip where CLIENTS_PYTHON has no such package."""
    command = [PYTHON, "-c", f"import importlib.util as u; exit(not u.find_spec({package!r}))"]
    if subprocess.run(command, check=False).returncode:
        pytest.skip(f"needs an environment with {package}, named by CLIENTS_PYTHON")


def test_langchain(server):
    needs_python("langchain_openai")
    script = str(HERE / "python/langchain_client.py")
    found = output_of(PYTHON, script, f"{server.url}/v1", "echo")
    assert found == [[["get_weather", ROME]]] * 5
    server.assert_quiescent()


def test_instructor(server):
    needs_python("instructor")
    say(server, CALL % "Weather")
    script = str(HERE / "python/instructor_client.py")
    assert output_of(PYTHON, script, f"{server.url}/v1", "echo") == ROME
    say(server, CALL % "get_weather")
    server.assert_quiescent()


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_ai_package_of_node(server):
    assert NODE is not None
    probe = [NODE, "--input-type=module", "-e", "import 'ai'; import '@ai-sdk/openai-compatible'"]
    if subprocess.run(probe, cwd=HERE / "node", capture_output=True, check=False).returncode:
        pytest.skip("needs: npm install in tests/serving/clients/node")
    found = output_of(NODE, "tools.mjs", f"{server.url}/v1", "echo")
    assert found == [[[["get_weather", ROME]], "tool-calls"]] * 4
    server.assert_quiescent()


def test_openai(server):
    """The package's own helper puts the parts of a streamed call together."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body = {
            "model": "echo",
            "messages": [{"role": "user", "content": "Rome?"}],
            "tools": [TOOL],
        }
        whole = client.chat.completions.create(**body).choices[0]
        with client.chat.completions.stream(**body) as stream:
            names = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
    for choice in (whole, final):
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ROME)
        assert choice.finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.done" in names
    server.assert_quiescent()
