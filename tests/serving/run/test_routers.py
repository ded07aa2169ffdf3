"""Routers that nobody here wrote, before two real servers of which one drains, and one is killed.

Both routers stand before the same servers and send their loads at once. They are installed in an
environment of their own (`make .venv/.routers`).
"""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import httpx
import pytest
from cases.load_kit import free_port
from cases.router import PROMPTS, Answer, load
from engines import checkpoint
from kit import EOS, VOCAB_SIZE, byte_tokenizer, metric_values
from served import Served

PYTHON = Path(__file__).parents[3] / ".venv/routers/bin/python"
ROUTERS = ("sglang_router", "vllm_router")
HEALTH = "--health-check-interval-secs=1 --health-failure-threshold=1 --health-success-threshold=1"
DRAIN_DELAY = 5  # seconds; longer than the interval, also where the machine is busy
NUM_REQUESTS, CONCURRENT = 500, 8  # of each router
NUM_BEFORE = 200  # of both, before something happens

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not PYTHON.with_name("vllm-router").exists(), reason="needs routers: make .venv/.routers"
    ),
]


class Routed:
    """Two servers, and the routers before them."""

    def __init__(self, start: Callable[[int], Served], stack: ExitStack, logs: Path):
        self._start = start
        # One after the other: the first compiles for both.
        self.servers = [start(free_port()), start(free_port())]
        self.urls = [self._route(name, stack, logs) for name in ROUTERS]

    def _route(self, name: str, stack: ExitStack, logs: Path) -> str:
        port = free_port()
        command = [str(PYTHON), "-m", f"{name}.launch_router", "--host=127.0.0.1", f"--port={port}"]
        command += [f"--prometheus-port={free_port()}", *HEALTH.split(), "--policy=round_robin"]
        command += ["--worker-startup-check-interval=1", "--worker-urls"]
        command += [server.url for server in self.servers]
        environ = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}  # one looks for tokenizers
        file = stack.enter_context((logs / name).open("w"))
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environ)
        stack.callback(process.wait)
        stack.callback(process.kill)
        return f"http://127.0.0.1:{port}"

    def make_whole(self) -> None:
        """Start what has ended again, and wait until both routers send to both servers."""
        for place, server in enumerate(self.servers):
            if server.process.poll() is not None:
                self.servers[place] = self._start(server.port)
        for url in self.urls:
            while num_healthy(url) != len(self.servers):
                time.sleep(0.1)

    def load_while(self, server: Served, number: int) -> list[list[Answer]]:
        """What clients of each router see while a server gets a signal and ends.

        Prompts are continued greedily, so it may not matter who does.
        """
        num_answers = count(1)

        def on_answer() -> None:
            if next(num_answers) == NUM_BEFORE:
                server.process.send_signal(number)

        async def loads() -> list[list[Answer]]:
            is_over = lambda: server.process.poll() is not None  # noqa: E731
            how = "tiny", NUM_REQUESTS, CONCURRENT, on_answer, is_over
            return await asyncio.gather(*(load(url, *how) for url in self.urls))

        answers = asyncio.run(loads())
        whole = [each for some in answers for each in some if not each.failure]
        assert len({(each.prompt, each.text) for each in whole}) == len(PROMPTS)
        return answers


def num_healthy(url: str) -> int:
    """How many servers a router sends requests to."""
    try:
        workers = httpx.get(f"{url}/workers", timeout=10).json()["workers"]
    except (httpx.TransportError, ValueError):
        return 0
    return sum(each["is_healthy"] for each in workers)


@pytest.fixture(scope="module")
def routed(tmp_path_factory, cache_dir):
    """Servers of a model with a tokenizer, of the sizes that other tests have compiled."""
    folder = tmp_path_factory.mktemp("routed")
    shutil.copytree(checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS)[0], folder / "model")
    byte_tokenizer().save(folder / "model")
    flags = ("--metrics-prefix=vllm", f"--drain-delay={DRAIN_DELAY}")
    with ExitStack() as stack:

        def start(port: int) -> Served:
            served = Served(folder / "model", cache_dir, *flags, port=port)
            stack.callback(served.close)
            served.wait_for("/health/ready", 200)
            return served

        yield Routed(start, stack, folder)


def test_routers_and_pickers_find_what_they_ask_for(routed):
    routed.make_whole()
    for url in routed.urls:
        (model,) = httpx.get(f"{url}/v1/models", timeout=10).json()["data"]
        assert model["id"] == "tiny"
    values = metric_values(routed.servers[0].client)
    (cache,) = [dict(labels) for name, labels in values if name == "vllm:cache_config_info"]
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("4", "64")
    names = {name for name, _ in values}
    pickers = {f"vllm:{name}" for name in ("num_requests_waiting", "num_requests_running")}
    assert names >= pickers | {"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"}


def test_nobody_notices_that_a_server_drains(routed):
    """Nor is a request refused and sent to the other server, which would open its circuit."""
    routed.make_whole()
    leaving, _ = routed.servers
    for answers in routed.load_while(leaving, signal.SIGTERM):
        assert [each for each in answers if each.failure] == []
    assert leaving.process.returncode == 0
    log = leaving.texts()[1]
    assert "POST /v1/completions 200" in log
    assert "POST /v1/completions 503" not in log


def test_a_killed_server_costs_the_streams_that_it_had(routed):
    routed.make_whole()
    _, victim = routed.servers
    for answers in routed.load_while(victim, signal.SIGKILL):
        failures = [each for each in answers if each.failure]
        assert all(each.is_stream for each in failures), failures
        assert len(failures) <= NUM_REQUESTS / 100, failures
    assert "POST /v1/completions 200" in victim.texts()[1]
