"""`shiftjax serve` as a process of its own, over a tiny model; what tests of it share."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from cases.load_kit import free_port
from kit import metric_total, metric_values

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7]
NUM_TOKENS = 12  # that most tests let follow the prompt
SLOW = "dispatch:delay:4+"  # 0.2 s a step, after the warm-up


class Served:
    """A server process and its addresses."""

    def __init__(
        self,
        directory: Path | str,
        cache_dir: Path,
        *flags: str,
        fault: str = "",
        port: int | None = None,
        admin: bool = False,
        inside: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        uds: Path | None = None,
        before: str = "",
        **limits: int | str,
    ):
        """`inside`: a command that runs the server's; `uds`: where a bridge to its port listens.

        `before`: Python that runs first in the process.
        """
        self.port, self.grpc_port, self.admin_port = port or free_port(), free_port(), free_port()
        start = f"{before}\nfrom serving.cli.main import main\nraise SystemExit(main())"
        command = [sys.executable, "-c", start, "serve", "--model", str(directory)]
        command += ["--sp=2", "--tp=1", "--dtype=float32", "--max-model-len=64", "--block-size=4"]
        command += ["--num-blocks=64", "--max-num-seqs=4", "--max-num-batched-tokens=16"]
        command += ["--token-buckets=16", f"--cache-dir={cache_dir}", f"--port={self.port}"]
        variables = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | dict(environ or {})
        variables |= {"SHIFTJAX_TESTING": "1", "SHIFTJAX_FAULT": fault} if fault else {}
        command += [f"--admin-port={self.admin_port}"] if admin else []
        if limits:  # of the process, by the names of `ulimit`
            command = ["prlimit", *(f"--{name}={n}" for name, n in limits.items()), *command]
        command = [*inside, *command]
        # Files, because nobody reads while the server runs, and a full pipe would stop it.
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, f"--grpc-port={self.grpc_port}", "--served-model-name=tiny", *flags],
            cwd=ROOT,
            env=variables,
            stdout=self._files[0],
            stderr=self._files[1],
        )
        limits_of_client = httpx.Limits(keepalive_expiry=60)
        path = None if uds is None else str(uds)
        transport = httpx.HTTPTransport(uds=path, limits=limits_of_client)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(
            base_url=self.url, timeout=60, transport=transport, trust_env=False
        )

    def status(self, path: str) -> int:
        """The status of a path; 0: nobody listens."""
        try:
            return self.client.get(path).status_code
        except httpx.TransportError:
            return 0

    def wait_for(self, path: str, status: int) -> None:
        while self.status(path) != status:
            assert self.process.poll() is None, self.texts()
            time.sleep(0.05)

    def complete(self, **fields) -> httpx.Response:
        body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.client.post("/v1/completions", json=body | fields)

    def tokens(self) -> list[int]:
        """The tokens that the server continues the prompt with."""
        answer = self.complete(max_tokens=NUM_TOKENS)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def wait_until_running(self, count: int = 1) -> None:
        """Wait until the engine computes so many requests at once."""
        name = "shiftjax:num_requests_running"
        while metric_total(metric_values(self.client), name) < count:
            assert self.process.poll() is None, self.texts()
            time.sleep(0.05)

    def wait_for_log(self, *words: str) -> None:
        """Wait until the log has all words; the test fails if they do not come."""
        for _ in range(600):
            if all(word in self.texts()[1] for word in words):
                return
            time.sleep(0.1)
        raise AssertionError(f"no {words} in the log: {self.texts()[1]}")

    def end_well(self) -> str:
        """Ask for the end, which must be a good one; what the log says."""
        self.process.send_signal(signal.SIGTERM)
        code, _, err = self.end()
        assert code == 0, err
        return err

    def end(self) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout, stderr."""
        code = self.process.wait(timeout=60)
        return code, *self.texts()

    def texts(self) -> list[str]:
        """What stdout and stderr say so far."""
        for file in self._files:
            file.seek(0)
        return [file.read() for file in self._files]

    def close(self) -> None:
        """Kill the process if it runs, and let go of everything."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for file in self._files:
            file.close()


@contextmanager
def serve(directory: Path | str, cache_dir: Path, *flags: str, **options: Any) -> Iterator[Served]:
    """A server that is killed at the end if it still runs."""
    served = Served(directory, cache_dir, *flags, **options)
    try:
        yield served
    finally:
        served.close()


def inside(script: str, *, flags: str = "-rm") -> tuple[str, ...]:
    """A command that runs another in namespaces of its own, after a script."""
    return ("unshare", flags, "sh", "-euc", f'{script}\nexec "$@"', "sh")


def in_background(function) -> tuple[threading.Thread, list]:
    answers: list = []

    def run() -> None:
        try:
            answers.append(function())
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers
