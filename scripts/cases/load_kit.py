"""What the load scripts and tests share: a server process, mixed requests, and what came of each.

The mixture is that of many users at once: prompt lengths log-uniform, one in five begins with a
shared prefix, one in ten wants two continuations, one in ten a structure, one in twenty
log-probabilities; half of them greedy; over HTTP and gRPC, streamed and not. Every request has a
seed, so that its text is a function of the request alone.
"""

import asyncio
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from serving.bench.client import Sample, Target, complete, get
from serving.bench.load import TOKEN_IDS, closed_loop, numbers_for
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

LONGEST_PROMPT, MOST_TOKENS = 128, 48  # of the scripts
NUM_CLIENTS = 8  # that find the capacity
HELD = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")  # while idle: 0
OVER_GRPC, STREAMED = 0.5, 0.5  # shares of requests
SCHEMA = '{"type":"object","properties":{"ok":{"type":"boolean"}},"required":["ok"]}'
REFUSED = "refused"
REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


def mixed_body(number: int, longest_prompt: int, most_tokens: int) -> dict[str, Any]:
    """Request `number` of the mixture, as the body of an HTTP completion."""
    rng = random.Random(number)
    length, shares = int(longest_prompt ** rng.random()), rng.random() < 0.2
    prompt = [rng.randrange(TOKEN_IDS) for _ in range(length)]
    if shares:
        prompt = list(range(longest_prompt // 2)) + prompt[: longest_prompt // 4]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, most_tokens)}
    body |= {"seed": number, "temperature": number % 2}
    kind = rng.random()
    if kind < 0.1:
        return body | {"n": 2}
    if kind < 0.2:
        constraint = {"json": SCHEMA} if kind < 0.15 else {"choice": ["yes", "no", "perhaps"]}
        return body | {"structured_outputs": constraint}
    return body | ({"logprobs": 5} if kind < 0.25 else {})


def to_grpc(body: dict[str, Any]) -> pb.GenerateRequest:
    """The same request as a message."""
    names = ("max_tokens", "seed", "temperature", "n", "logprobs", "ignore_eos")
    sampling = pb.Sampling(**{name: body[name] for name in names if name in body})
    constraint = body.get("structured_outputs", {})
    if "json" in constraint:
        sampling.json_schema = constraint["json"]
    if "choice" in constraint:
        sampling.choice.options.extend(constraint["choice"])
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=body["prompt"]), sampling=sampling)


# ---------------------------------------------------------------- clients


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it. `end`: finished, refused, cancelled, or what went wrong."""

    end: str
    sample: Sample
    outcome: tuple[tuple[str, str], ...] = ()  # text and finish reason of every continuation
    says_when: bool = False  # a refusal that tells when to come again


class Clients:
    """Senders of requests to one server, over both protocols."""

    def __init__(self, target: Target, stub: pb_grpc.InferenceStub):
        self.target, self._stub = target, stub

    async def send(self, body: dict[str, Any], *, over_grpc: bool, streams: bool) -> Answer:
        """Send a request and wait for its end, whatever that is."""
        if over_grpc:
            return await self._over_grpc(to_grpc(body), streams)
        sample = await complete(self.target, body, streams=streams)
        if sample.error is None:
            return Answer("finished", sample, _outcome(sample))
        is_refusal = sample.error.startswith("429")
        end = REFUSED if is_refusal else sample.error
        return Answer(end, sample, says_when=sample.retry_after is not None)

    async def send_any(self, body: dict[str, Any], rng: random.Random) -> Answer:
        """Send it one way or another."""
        over_grpc, streams = rng.random() < OVER_GRPC, rng.random() < STREAMED
        return await self.send(body, over_grpc=over_grpc, streams=streams)

    async def _over_grpc(self, request: pb.GenerateRequest, streams: bool) -> Answer:
        sample = Sample.begin()
        try:
            await (self._stream(request, sample) if streams else self._once(request, sample))
        except grpc.aio.AioRpcError as error:
            sample.end(str(error.code()))
            is_refusal = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            says_when = "google.rpc.RetryInfo" in str(error.trailing_metadata())
            return Answer(REFUSED if is_refusal else str(error.code()), sample, says_when=says_when)
        sample.end()
        return Answer("finished", sample, _outcome(sample))

    async def _stream(self, request: pb.GenerateRequest, sample: Sample) -> None:
        async for event in self._stub.Generate(request):
            if event.HasField("delta"):
                sample.add_text(event.delta.index, event.delta.text)
                sample.num_output_tokens += len(event.delta.token_ids)
            elif event.HasField("finished"):
                sample.finish_reasons[event.finished.index] = REASONS[event.finished.reason]

    async def _once(self, request: pb.GenerateRequest, sample: Sample) -> None:
        result = await self._stub.GenerateOnce(request)
        for one in result.completions:
            sample.texts[one.index] = one.text
            sample.finish_reasons[one.index] = REASONS[one.finished.reason]


def _outcome(sample: Sample) -> tuple[tuple[str, str], ...]:
    reasons = sample.finish_reasons
    return tuple((sample.texts.get(index, ""), reasons[index]) for index in sorted(reasons))


@asynccontextmanager
async def clients(target: Target, grpc_address: str) -> AsyncIterator[Clients]:
    """Clients of the server at these addresses."""
    async with grpc.aio.insecure_channel(grpc_address) as channel:
        yield Clients(target, pb_grpc.InferenceStub(channel))


async def metrics_of(target: Target) -> dict[str, float]:
    """Sums over the labels of every metric, without the prefix."""
    _, text = await get(target, "/metrics")
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            sums[sample.name.removeprefix("shiftjax:")] += sample.value
    return sums


async def capacity(send: Callable[[int], Awaitable[Any]], seconds: float) -> float:
    """Requests per second that a few clients in a closed loop get answered."""
    return len(await closed_loop(send, NUM_CLIENTS, numbers_for(seconds))) / seconds


# ---------------------------------------------------------------- a server process


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class ServerProcess:
    """`shiftjax serve` with some flags on free ports, looked at from outside (Linux)."""

    def __init__(self, flags: list[str]) -> None:
        port, grpc_port = free_port(), free_port()
        self.target, self.grpc_address = (
            Target("127.0.0.1", port, "", False),
            f"127.0.0.1:{grpc_port}",
        )
        ports = [f"--port={port}", f"--grpc-port={grpc_port}"]
        self.command = [sys.executable, "-m", "serving.cli.main", "serve", *ports, *flags]
        print(f"http://127.0.0.1:{port}/ui", flush=True)
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL)

    async def wait_until_ready(self) -> None:
        """Poll until the model is loaded; raises SystemExit if the process ends instead."""
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"did not start: {shlex.join(self.command)}")
            try:
                if (await get(self.target, "/health/ready"))[0] == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.5)

    def look(self) -> dict[str, float]:
        """Memory, descriptors and threads of the server.

        Memory without mapped files, whose pages the system takes away and brings back as it likes.
        """
        process = Path(f"/proc/{self.process.pid}")
        status = (process / "status").read_text(encoding="utf-8")
        kibibytes = int(status.partition("RssAnon:")[2].split()[0])
        return {
            "anonymous_mib": kibibytes / 1024,
            "descriptors": len(os.listdir(process / "fd")),
            "threads": len(os.listdir(process / "task")),
        }

    async def stop(self) -> int:
        """Ask it to end, wait, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, 60)

    def kill(self) -> None:
        """End it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()


def on_server[T](flags: list[str], action: Callable[[ServerProcess, Clients], Awaitable[T]]) -> T:
    """Return what an action gives, with clients of a server that is started for it."""
    server = ServerProcess(flags)

    async def run() -> T:
        await server.wait_until_ready()
        async with clients(server.target, server.grpc_address) as senders:
            return await action(server, senders)

    try:
        return asyncio.run(run())
    finally:
        server.kill()
