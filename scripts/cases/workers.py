"""The engines' processes, as the throughput benchmark starts them and talks to them."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from cases.machine import busy_core_seconds

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ROOT / "scripts" / "peers"
OURS = "shiftjax"


class Worker:
    """One engine's process. Its stderr goes to a log file beside the weights."""

    def __init__(self, name: str, command: list[Any], log: Path) -> None:
        """`command`: a Python, a file of `scripts/peers`, and its arguments."""
        python, script, *words = command
        command = [str(word) for word in (python, WORKERS / script, *words)]
        self.name, self.log = name, log
        environment = os.environ | {"PYTHONPATH": str(ROOT)} if name == OURS else None
        with log.open("w") as stderr:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
            self.process = subprocess.Popen(command, **pipes, text=True, env=environment)
        self.description = self._receive()

    def _receive(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            raise RuntimeError(f"the worker of {self.name} ended; the end of {self.log}:\n{tail}")
        return json.loads(line)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> dict:
        """Run requests; the reply, with the load of the machine and what others used of it.

        Raises RuntimeError if the engine did not generate exactly what was asked for.
        """
        assert self.process.stdin is not None
        busy = busy_core_seconds()
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        reply = self._receive()
        others = busy_core_seconds() - busy - reply["cpu_seconds"]
        lens = [len(ids) for ids in reply["token_ids"]]
        if lens != max_tokens:
            raise RuntimeError(f"{self.name} generated {lens} tokens, not {max_tokens}")
        reply["other_cores"] = round(max(0.0, others) / reply["seconds"], 2)
        reply["load"] = round(os.getloadavg()[0], 2)
        return reply

    def close(self) -> None:
        """Let the worker end."""
        self.process.communicate(timeout=60)
