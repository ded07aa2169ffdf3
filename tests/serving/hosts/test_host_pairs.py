"""Two processes of four devices are one of eight; and what becomes of a pair that loses one."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from engines import checkpoint
from served import SLOW, Served

from serving.run.hosts import check_free
from shiftjax.options import ConfigError
from shiftjax.weights.locate import open_source, resolve_model
from shiftjax.weights.source import identify

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
LOST = 75
ABORTED = -signal.SIGABRT  # by JAX's own client, if it hears of the leader's end first


def environ() -> dict[str, str]:
    """Of processes that make their own devices."""
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return own | {"PYTHONPATH": f"{ROOT}{os.pathsep}{own.get('PYTHONPATH', '')}"}


@pytest.mark.parametrize(
    ("flags", "ways"),
    [
        (("--devices=4", "--numerics=invariant"), 1),
        (("--devices=2", "--experts"), 1),
        (("--devices=4", "--split"), 2),
        (("--devices=2", "--loras"), 1),
        (("--devices=2", "--latents", "--split"), 4),
    ],
)
def test_two_processes_give_the_tokens_of_one(flags, ways, tmp_path):
    """In random modes, with drafts, tables, preemption, prefix hits and a request given up.

    With strict numerics, and then to the bit; with experts, of which both count the same pairs; and
    with positions that devices of both split.
    """
    command = [sys.executable, ROOT / "scripts/bench.py", "two_hosts", *flags, "--quick"]
    run = subprocess.run(
        command, check=False, cwd=tmp_path, env=environ(), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    *rows, told = [json.loads(line) for line in run.stdout.splitlines() if line[:1] == "{"]
    assert told["tokens_equal"] and told["routed_equal"]
    assert told["logprobs_equal"] or "--numerics=invariant" not in flags
    assert told["position_ways"] == ways
    has_experts = not {"--experts", "--latents"}.isdisjoint(flags)
    assert (told["routed_pairs"] > 500) == has_experts
    assert told["compiles"] == [0, 0]
    assert min(told[name] for name in ("preemptions", "prefix_hit_tokens", "drafted_steps")) > 0
    assert min(told["steps"]["base"], told["steps"]["shift"]) > 10
    assert told["message_bytes_p50"] < 1000
    (largest,) = [row for row in rows if row["message_of_sequences"] == 256]
    assert largest["bytes"] < 18 * 256


# ------------------------------------------------------------------ losses of two servers


def free_pair() -> int:
    """The first of two ports that are free; clients' ports, which come and go, are higher."""
    for port in random.sample(range(20_000, 30_000, 2), 100):
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("", port))
            second.bind(("", port + 1))
            return port
    raise AssertionError("no two ports in a row are free")


class Pair:
    """A leader and a follower of one device each."""

    def __init__(self, cache: Path, secret: Path, *flags: str, fault: str = ""):
        secret.write_text("between us")
        coordinator = f"--coordinator=127.0.0.1:{free_pair()}"
        both = ["--hosts=2", coordinator, f"--host-secret-file={secret}", *flags]
        directory = checkpoint()[0]
        self.leader = Served(directory, cache, *both, fault=SLOW)
        self.follower = Served(directory, cache, *both, "--host-rank=1", fault=fault)

    def begin(self) -> list:
        """A request that takes long, with what it is answered when it ends."""
        answers: list = []
        ask = lambda: answers.append(self.leader.complete(max_tokens=60))  # noqa: E731
        threading.Thread(target=ask, daemon=True).start()
        return answers

    def ends_with(self, answers: list) -> None:
        """The leader is gone within seconds, and has answered."""
        assert self.leader.end()[0] == LOST
        for _ in range(100):
            if answers:
                break
            time.sleep(0.05)
        (answer,) = answers
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "engine_restarting"

    def close(self) -> None:
        """Kill what runs."""
        self.follower.process.send_signal(signal.SIGCONT)
        self.follower.close()
        self.leader.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@contextmanager
def pair_of(cache: Path, secret: Path, *flags: str, fault: str = ""):
    pair = Pair(cache, secret, *flags, fault=fault)
    try:
        pair.leader.wait_for("/health/ready", 200)
        yield pair
    finally:
        pair.close()


def test_a_drained_leader_ends_its_follower_well(cache, tmp_path):
    with pair_of(cache, tmp_path / "secret") as pair:
        leader, follower = pair.leader, pair.follower
        assert leader.complete(max_tokens=4).status_code == 200
        assert "shiftjax:follower_last_step_age_seconds{" in leader.client.get("/metrics").text
        assert follower.status("/health/live") == 200
        assert follower.status("/health/ready") == follower.status("/v1/models") == 404
        follower.process.send_signal(signal.SIGTERM)  # as a pod's, together with the leader's
        leader.process.send_signal(signal.SIGTERM)
        assert (leader.end()[0], follower.end()[0]) == (0, 0), [*leader.texts(), *follower.texts()]


@pytest.mark.parametrize(
    ("number", "flags", "words"),
    [
        (signal.SIGKILL, (), "host 1 has gone"),
        (signal.SIGSTOP, ("--watchdog-timeout=6",), "host 1 has been silent for 6 s"),
    ],
)
def test_a_follower_that_dies_or_stops_ends_the_leader(cache, tmp_path, number, flags, words):
    with pair_of(cache, tmp_path / "secret", *flags) as pair:
        answers = pair.begin()
        pair.leader.wait_until_running()
        pair.follower.process.send_signal(number)
        pair.ends_with(answers)
        assert words in pair.leader.texts()[1]


def test_a_leader_that_dies_ends_its_follower(cache, tmp_path):
    with pair_of(cache, tmp_path / "secret") as pair:
        pair.leader.process.kill()
        assert pair.follower.end()[0] in (LOST, ABORTED)


def test_no_memory_on_one_host_ends_both(cache, tmp_path):
    with pair_of(cache, tmp_path / "secret", fault="following:oom:8") as pair:
        pair.ends_with(pair.begin())
        assert "host 1 failed: RuntimeError: RESOURCE_EXHAUSTED" in pair.leader.texts()[1]
        assert pair.follower.end()[0] == LOST


def test_hosts_are_of_one_checkpoint(tmp_path):
    """Known by what it holds, wherever it lies."""
    other = checkpoint(num_key_value_heads=9)[0]
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(checkpoint()[0], elsewhere)
    one, same, another = (
        identify(open_source(resolve_model(str(each))))
        for each in (checkpoint()[0], elsewhere, other)
    )
    assert one == same != another


def test_a_port_that_jax_cannot_have_is_said_before_it_aborts():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"at the next port, {port}: Address already in use"):
            check_free(f"127.0.0.1:{port}")
    check_free(f"127.0.0.1:{free_pair()}")
