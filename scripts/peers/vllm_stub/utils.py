"""What vLLM's tests take from their utilities: a server, which is ours."""
# pyright: reportMissingImports=false

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import anthropic
import openai
import requests

ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}
START_SECONDS = 600


class RemoteOpenAIServer:
    """A server process with the arguments of a test."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, args: Sequence[str], *, env_dict: Any = None, **_: Any):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.host, self.port = free.getsockname()
        names = [] if "--served-model-name" in args else ["--served-model-name", str(model)]
        python, ours = os.environ["SHIFTJAX"], os.environ["OURS"]
        command = [python, "-m", "shiftjax", "serve", "smollm2-135m", *args, *names]
        command += [*os.environ["SMALL"].split(), "--port", str(self.port), "--no-grpc"]
        environ = os.environ | {"PYTHONPATH": ours, "JAX_PLATFORMS": "cpu"} | (env_dict or {})
        with tempfile.NamedTemporaryFile("w", delete=False) as log:
            self.proc = subprocess.Popen(command, env=environ, cwd=ours, stdout=log, stderr=log)
        self._wait(log.name)

    def _wait(self, log: str) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.proc.poll() is None:
            try:
                if requests.get(self.url_for("health"), timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        with open(log, encoding="utf-8") as file:
            raise RuntimeError("the server did not start: " + file.read()[-2000:])

    @property
    def url_root(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """An address of it."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600} | given

    def get_client(self, **given: Any) -> openai.OpenAI:
        """OpenAI's client of it."""
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(given))

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        """The same with coroutines."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(given))

    def get_client_anthropic(self, **given: Any) -> anthropic.Anthropic:
        """Anthropic's client of it, without coroutines."""
        return anthropic.Anthropic(base_url=self.url_root, **self._options(given))

    def get_async_client_anthropic(self, **given: Any) -> anthropic.AsyncAnthropic:
        """Anthropic's client of it."""
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._options(given))

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.proc.terminate()
        self.proc.wait(60)
