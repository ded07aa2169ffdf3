"""A replica of deploy/ray_serve.py without Ray: it passes all on, and ends with its server."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

FILE = Path(__file__).parents[2] / "deploy/ray_serve.py"
FLAGS = ["llama-70b", "--quantization=fp8", "--simulate=h200x8", "--sp=4", "--tp=2"]
FLAGS += ["--served-model-name=model"]


@pytest.fixture(scope="module")
def ray_serve():
    spec = importlib.util.spec_from_file_location("ray_serve", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wait_until(is_so: Callable[[], object]) -> None:
    """The test fails if it does not come to be."""
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError


def test_a_replica_passes_on_what_its_server_says_and_ends_with_it(ray_serve, monkeypatch):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    replica = ray_serve.Replica(FLAGS)
    route = Route("/{path:path}", replica.__call__, methods=["GET", "POST"])

    async def ask() -> None:
        transport = httpx.ASGITransport(Starlette(routes=[route]))
        async with httpx.AsyncClient(transport=transport, base_url="http://serve") as client:
            (model,) = (await client.get("/v1/models")).json()["data"]
            body = {"model": model["id"], "prompt": "x", "max_tokens": 4, "ignore_eos": True}
            whole = await client.post("/v1/completions", json=body, headers={"x-request-id": "a"})
            assert whole.json()["usage"]["completion_tokens"] == 4
            assert whole.headers["x-request-id"] == "a"
            stream = await client.post("/v1/completions", json=body | {"stream": True})
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.text.endswith("data: [DONE]\n\n") and stream.text.count("data: ") > 4
            wrong = await client.post("/v1/completions", json=body | {"temperature": -1})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
        await replica.check_health()
        await replica._client.aclose()  # this loop ends before the replica does

    asyncio.run(ask())
    replica._process.kill()
    wait_until(lambda: ends)
    assert ends == [-signal.SIGKILL]


def test_a_replica_that_is_killed_leaves_no_server_behind(tmp_path):
    code = "import ray_serve, sys; r = ray_serve.Replica(sys.argv[1:]); print(r._process.pid)"
    command = [sys.executable, "-c", code + "; sys.stdout.flush(); sys.stdin.read()", *FLAGS]
    environ = os.environ | {"PYTHONPATH": f"{FILE.parent}:{FILE.parents[1]}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environ, cwd=tmp_path, text=True, **pipes) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: not Path(f"/proc/{server}").exists())


def test_a_server_that_does_not_start_is_an_error(ray_serve):
    with pytest.raises(RuntimeError, match="ended with 2"):
        ray_serve.Replica(["--no-such-flag"])
