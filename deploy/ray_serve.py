"""Replicas under Ray Serve: each starts `shiftjax serve` with the devices that Ray gives it.

    pip install 'ray[serve]' httpx '.[serving,cuda12]'
    cd deploy
    serve run ray_serve:app flags="--model /models/llama --sp 4 --tp 2" replicas=2 gpus=8

Every path of the server is there at Serve's address, streams too. A replica ends with its server,
or when no step finishes, and Serve starts another; one that Serve takes away drains. Of Linux:
setpriv is of util-linux. Tried with Ray 2.60, on CPUs.
"""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

SHUTDOWN_SECONDS = 60.0  # that requests have when a replica is asked to end
ONGOING = 1024  # requests that Serve may hand to a replica: the server has a queue of its own
# Headers that each of the two connections has for itself.
OWN = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length", "host", "date"))


class Replica:
    """A server process on a port of its own, and the way to it."""

    def __init__(self, flags: Sequence[str]):
        """Start the server and wait until it is ready. Raises RuntimeError if it ends instead."""
        # A replica that is killed must not leave a server behind that holds its devices.
        command = ["setpriv", "--pdeathsig=KILL", sys.executable, "-m", "serving.cli.main", "serve"]
        command += [*flags, "--port=0", "--no-grpc", f"--shutdown-timeout={SHUTDOWN_SECONDS}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._is_leaving = False
        assert self._process.stdout is not None
        with self._process.stdout as lines:  # the addresses, once it is ready, are all it prints
            line = next((line for line in lines if line.startswith("HTTP")), None)
        if line is None:
            raise RuntimeError(f"shiftjax serve ended with {self._process.wait()}: see its log")
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=line.split()[1], timeout=None, limits=limits)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        """End with the server, at once: Serve sends nothing here while it starts another."""
        code = self._process.wait()
        if not self._is_leaving:
            os._exit(code or 1)

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its answer back as it comes."""
        headers = [(k, v) for k, v in request.headers.items() if k not in OWN]
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        content = await request.body()
        asked = self._client.build_request(request.method, url, headers=headers, content=content)
        answer = await self._client.send(asked, stream=True)
        kept = {k: v for k, v in answer.headers.items() if k not in OWN}
        return StreamingResponse(pieces(answer), answer.status_code, kept)

    async def check_health(self) -> None:
        """Raises RuntimeError where steps hang; Serve asks, and ends the replica."""
        if (await self._client.get("/health/progress", timeout=10)).status_code != 200:
            raise RuntimeError("no step has finished for a while")

    def __del__(self):
        """Drain; called by Serve when it takes a replica away."""
        self._is_leaving = True
        self._process.terminate()
        self._process.wait()


async def pieces(answer: httpx.Response):
    """The body as it comes; the server cancels the request if nobody wants the rest."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def app(arguments: Mapping[str, Any]) -> Any:
    """The application that `serve run` and Serve's YAML name, with their arguments.

    `flags` of `shiftjax serve`, in one text; number of `replicas`; `gpus` of each.
    """
    from ray import serve

    deployment = serve.deployment(
        Replica,
        name="shiftjax",
        num_replicas=int(arguments.get("replicas", 1)),
        ray_actor_options={"num_gpus": float(arguments.get("gpus", 0))},
        max_ongoing_requests=ONGOING,
        graceful_shutdown_timeout_s=SHUTDOWN_SECONDS,
    )
    return deployment.bind(shlex.split(arguments["flags"]))
