"""Clients that nobody here wrote call tools, as processes of their own, whole and streamed.

LangChain and instructor want other packages than ours: they run in an environment of their own,
which `make test` installs. What a scripted model says is known; over SmolLM2, in base and shift
steps, calls are forced, and must keep to the schema whatever it says.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import anthropic
import openai
import pytest
from kit import metric_total, metric_values
from scripted import say, scripted_server
from served import serve

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
PYTHON = str(HERE.parents[2] / ".venv/clients/bin/python")
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


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A server of SmolLM2: prompts in base steps, decoding in shift steps."""
    flags = ["--max-model-len=1024", "--num-blocks=512", "--block-size=16", "--shift-threshold=32"]
    flags += ["--max-num-batched-tokens=128", "--token-buckets=16,128"]
    with serve("smollm2-135m", tmp_path_factory.mktemp("cache"), *flags) as served:
        served.wait_for("/health/ready", 200)
        yield served
        values = metric_values(served.client)
        for mode in ("base", "shift"):
            assert metric_total(values, "shiftjax:steps_total", mode=mode)
        served.end_well()


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


needs_ai = pytest.mark.skipif(
    NODE is None or not (HERE / "node/node_modules/@ai-sdk/openai-compatible").is_dir(),
    reason="needs node and, in tests/serving/clients/node, npm install: make .venv/.node",
)
needs_python = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason="needs LangChain and instructor: make .venv/.clients"
)


@needs_python
def test_langchain(server):
    script = str(HERE / "python/langchain_client.py")
    found = output_of(PYTHON, script, f"{server.url}/v1", "echo")
    assert found == [[["get_weather", ROME]]] * 5
    server.assert_quiescent()


@needs_python
def test_instructor(server):
    say(server, CALL % "Weather")
    script = str(HERE / "python/instructor_client.py")
    assert output_of(PYTHON, script, f"{server.url}/v1", "echo") == ROME
    say(server, CALL % "get_weather")
    server.assert_quiescent()


@needs_ai
def test_the_ai_package_of_node(server):
    found = output_of(str(NODE), "tools.mjs", f"{server.url}/v1", "echo")
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


# ---------------------------------------------------------------- whatever a real model says


def assert_weather(arguments: dict) -> None:
    assert list(map(type, arguments.values())) == [str, int], arguments
    assert arguments.keys() == {"city", "days"}


@needs_python
def test_langchain_over_smollm2(smollm2):
    script = str(HERE / "python/langchain_client.py")
    url = f"{smollm2.url}/v1"
    *forced, again = output_of(PYTHON, script, url, "tiny", "forced")
    assert len(forced) == 2 and forced[0] == forced[1]  # whole, and streamed
    for ((name, arguments),) in (*forced, again):
        assert name == "get_weather"
        assert_weather(arguments)


@needs_python
def test_instructor_over_smollm2(smollm2):
    script = str(HERE / "python/instructor_client.py")
    assert_weather(output_of(PYTHON, script, f"{smollm2.url}/v1", "tiny"))


@needs_ai
def test_the_ai_package_of_node_over_smollm2(smollm2):
    url = f"{smollm2.url}/v1"
    choice = '{"type": "tool", "toolName": "get_weather"}'
    whole, streamed = output_of(str(NODE), "tools.mjs", url, "tiny", choice)
    assert whole == streamed
    (((name, arguments),), reason) = whole
    assert (name, reason) == ("get_weather", "tool-calls")
    assert_weather(arguments)


def test_anthropic_over_smollm2(smollm2):
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    body = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Rome?"}],
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "extra_body": {"seed": 1},
    }
    with anthropic.Anthropic(base_url=smollm2.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    (call,), (again,) = whole.content, streamed.content
    assert call.name == again.name == "get_weather" and call.input == again.input
    assert_weather(call.input)


def test_every_api_has_the_text_of_a_completion(smollm2):
    """Greedy, of one prompt: as text, as a chat, as a message, as a response."""
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    post = smollm2.client.post
    prompt = post("/tokenize", json={"messages": asked}).json()["tokens"]
    body = {"model": "tiny", "temperature": 0}
    plain = post("/v1/completions", json=body | {"prompt": prompt, "max_tokens": 16}).json()
    chat = post("/v1/chat/completions", json=body | {"messages": asked, "max_tokens": 16}).json()
    message = post("/v1/messages", json=body | {"messages": asked, "max_tokens": 16}).json()
    answer = post("/v1/responses", json=body | {"input": asked, "max_output_tokens": 16}).json()
    text = plain["choices"][0]["text"]
    assert "Paris" in text
    assert chat["choices"][0]["message"]["content"] == text
    assert message["content"][0]["text"] == text
    assert answer["output"][0]["content"][0]["text"] == text
