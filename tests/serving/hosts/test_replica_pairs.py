"""Two servers that have groups of one engine each: one is killed under load, and comes back."""

import threading
import time
from pathlib import Path

import pytest
from engines import checkpoint
from kit import metric_total, metric_values
from oracle import numpy_llama
from served import SLOW, Served
from test_host_pairs import free_pair

pytestmark = pytest.mark.thorough

PROMPTS = [[5 + n, 6, 7, 8, 9 + n, 11, 12, 13, 14] for n in range(8)]
NUM_TOKENS = 24


class Replicas:
    """A leader and a follower, with a group of two devices each."""

    def __init__(self, cache: Path, secret: Path, *flags: str):
        secret.write_text("between us")
        coordinator = f"--coordinator=127.0.0.1:{free_pair()}"
        self.both = ["--hosts=2", "--dp=2", coordinator, f"--host-secret-file={secret}", *flags]
        self.cache, (self.directory, self.config, self.tensors) = cache, checkpoint()
        self.leader = Served(self.directory, cache, *self.both, fault=SLOW)
        self.follower = self.follow()

    def follow(self) -> Served:
        return Served(self.directory, self.cache, *self.both, "--host-rank=1")

    def value(self, name: str) -> float:
        return metric_total(metric_values(self.leader.client), f"shiftjax:{name}")

    def ask(self) -> tuple[list[threading.Thread], dict]:
        """Ask for all prompts at once."""
        answers: dict = {}

        def one(number: int) -> None:
            fields = {"prompt": PROMPTS[number], "max_tokens": NUM_TOKENS}
            answers[number] = self.leader.complete(**fields)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        return threads, answers

    def check(self, threads: list[threading.Thread], answers: dict) -> None:
        """Everybody was answered with the tokens of the oracle."""
        for thread in threads:
            thread.join()
        for number, prompt in enumerate(PROMPTS):
            answer = answers[number]
            assert answer.status_code == 200, answer.text
            wanted = numpy_llama.greedy(self.config, self.tensors, prompt, NUM_TOKENS)
            assert answer.json()["choices"][0]["token_ids"] == wanted

    def wait_for_hosts(self, num: int) -> None:
        for _ in range(1200):
            if self.value("hosts") == num:
                return
            assert self.leader.process.poll() is None, self.leader.texts()
            time.sleep(0.05)
        raise AssertionError(f"not {num} hosts: {self.leader.texts()[1]}")

    def close(self) -> None:
        self.follower.close()
        self.leader.close()


def test_a_killed_host_costs_no_request_and_comes_back(tmp_path):
    pair = Replicas(tmp_path / "compiled", tmp_path / "secret", "--host-memory=1MB")
    try:
        pair.leader.wait_for("/health/ready", 200)
        pair.check(*pair.ask())
        pair.wait_for_hosts(2)
        threads, answers = pair.ask()
        pair.leader.wait_until_running(len(PROMPTS))  # four in each group
        pair.follower.process.kill()
        pair.check(threads, answers)
        pair.wait_for_hosts(1)
        assert pair.value("lost_host_sequences_total") == 4
        pair.follower.close()
        pair.follower = pair.follow()
        for _ in range(600):
            if pair.value("hosts") == 2:
                break
            pair.leader.complete(max_tokens=1)  # the leader looks between steps
            time.sleep(0.1)
        pair.wait_for_hosts(2)
        threads, answers = pair.ask()
        pair.leader.wait_until_running(len(PROMPTS))
        pair.check(threads, answers)
        assert pair.leader.end_well() and pair.follower.end()[0] == 0
    finally:
        pair.close()
