"""Soak: a real server under half of what it can do, with clients that come and go, for long.

    python scripts/soak.py --minutes 30 -- --model smollm2-135m --sp 4 --tp 2 --num-blocks 512

Starts `shiftjax serve` with the flags after `--`, measures what a closed loop gets out of it, then
sends half of that: Poisson arrivals, mixed lengths, a shared prefix, n = 2, schemas, top
log-probabilities, HTTP and gRPC; one request in five is cancelled at some moment. Watched from
outside: memory, file descriptors and threads of the process; programs compiled after the warm-up;
and at the end, idle, that nothing is held. The last line is JSON. Loopback only.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from serving.bench.client import Target, complete, get
from serving.progress import print_table
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

MEASURE_SECONDS, CLIENTS = 20.0, 8  # of the closed loop that finds the capacity
WARM_UP_SHARE = 0.25  # of the run, not counted in slopes
SAMPLE_SECONDS = 10.0
CANCELLED, OVER_GRPC = 0.2, 0.25  # shares of requests
SHARED = list(range(30, 62))  # a prefix of one prompt in five
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
IDLE_METRICS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass
class Soak:
    """A server process, its addresses, and what has been seen of it."""

    flags: list[str]
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    ends: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.target = Target("127.0.0.1", free_port(), "", False)
        self.grpc_address = f"127.0.0.1:{free_port()}"
        ports = [f"--port={self.target.port}", f"--grpc-port={self.grpc_address.split(':')[1]}"]
        command = [sys.executable, "-m", "serving.cli", "serve", *ports, *self.flags]
        print(f"http://127.0.0.1:{self.target.port}/ui", flush=True)
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    async def wait_until_ready(self) -> None:
        """Poll until the model is loaded; raises if the process ends instead."""
        while True:
            if self.process.poll() is not None:
                raise SystemExit("the server did not start: run its command to see why")
            try:
                if (await get(self.target, "/health/ready"))[0] == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.5)

    # -------------------------------------------------------------- requests

    def body(self) -> dict[str, Any]:
        """Some request: mostly plain, sometimes with what costs the server more."""
        rng, kind = self.rng, self.rng.random()
        length = int(2 ** rng.uniform(1, 7))
        shared = SHARED if rng.random() < 0.2 else []
        body: dict[str, Any] = {"prompt": shared + [rng.randrange(200) for _ in range(length)]}
        body |= {"max_tokens": rng.randint(4, 48), "seed": rng.randrange(1000)}
        if kind < 0.1:
            return body | {"n": 2}
        if kind < 0.2:
            return body | {"structured_outputs": {"json": SCHEMA}}
        return body | ({"logprobs": 5} if kind < 0.25 else {})

    async def one(self) -> None:
        """Send one request, perhaps give it up, and count how it ended."""
        is_grpc = self.rng.random() < OVER_GRPC
        work: Awaitable[str] = self._over_grpc() if is_grpc else self._over_http()
        seconds = self.rng.uniform(0, 3) if self.rng.random() < CANCELLED else None
        try:
            self.ends[await asyncio.wait_for(work, seconds)] += 1
        except TimeoutError:
            self.ends["cancelled"] += 1

    async def _over_http(self) -> str:
        sample = await complete(self.target, self.body())
        return "finished" if sample.error is None else sample.error[:60]

    async def _over_grpc(self) -> str:
        body = self.body()
        sampling = pb.Sampling(max_tokens=body["max_tokens"], seed=body["seed"])
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=body["prompt"]), sampling=sampling)
        try:
            async for _ in self.stub.Generate(request):
                pass
        except grpc.RpcError as error:
            return str(error.code())
        return "finished"

    # -------------------------------------------------------------- load

    async def run(self, seconds: float) -> float:
        """The whole soak; returns the rate of the load in requests per second."""
        await self.wait_until_ready()
        async with grpc.aio.insecure_channel(self.grpc_address) as channel:
            self.stub = pb_grpc.InferenceStub(channel)
            rate = 0.5 * await self._capacity()
            watcher = asyncio.create_task(self._watch())
            end, tasks = time.monotonic() + seconds, set()
            while time.monotonic() < end:
                await asyncio.sleep(self.rng.expovariate(rate))
                task = asyncio.create_task(self.one())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
            watcher.cancel()
        return rate

    async def _capacity(self) -> float:
        """Requests per second of a closed loop, after a round that warms up."""
        end, count = time.monotonic() + MEASURE_SECONDS, 0

        async def client() -> None:
            nonlocal count
            while time.monotonic() < end:
                await complete(self.target, self.body())
                count += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return count / MEASURE_SECONDS

    # -------------------------------------------------------------- looks from outside

    async def _watch(self) -> None:
        while True:
            self.samples.append({"at": time.monotonic(), **self.look()})
            await asyncio.sleep(SAMPLE_SECONDS)

    def look(self) -> dict[str, float]:
        """Memory, descriptors and threads of the server (Linux).

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

    async def metrics(self) -> dict[str, float]:
        """Sums over the labels of every metric."""
        _, text = await get(self.target, "/metrics")
        sums: dict[str, float] = {}
        for line in text.decode().splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0].removeprefix("shiftjax:")
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums


def slope_per_10_minutes(samples: list[dict[str, float]], name: str) -> float:
    """Of a line through what came after the warm-up."""
    rest = samples[int(WARM_UP_SHARE * len(samples)) :]
    return float(np.polyfit([s["at"] for s in rest], [s[name] for s in rest], 1)[0] * 600)


async def soak(run: Soak, minutes: float) -> dict[str, Any]:
    """Run and judge; `failures` is what should not have been."""
    rate = await run.run(60 * minutes)
    await asyncio.sleep(5)  # connections close
    idle, metrics = run.look(), await run.metrics()
    held = {name: metrics[name] for name in IDLE_METRICS}
    names = ("anonymous_mib", "descriptors", "threads")
    slopes = {name: slope_per_10_minutes(run.samples, name) for name in names}
    run.process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(run.process.wait, 60)
    row = {"minutes": minutes, "requests_per_second": rate, "ends": dict(run.ends), "idle": idle}
    rest = run.samples[int(WARM_UP_SHARE * len(run.samples)) :]
    ranges = {n: [min(s[n] for s in rest), max(s[n] for s in rest)] for n in names}
    row |= {"slope_per_10_minutes": slopes, "after_warm_up": ranges}
    row |= {"held": held, "exit_code": code}
    row |= {n: metrics[f"{n}_total"] for n in ("recompiles_after_warmup", "mode_switches")}
    row |= {n: metrics[f"{n}_total"] for n in ("generation_tokens", "num_preemptions")}
    checks = {
        "memory grows": slopes["anonymous_mib"] > 1.0,
        "descriptors grow": slopes["descriptors"] > 3,
        "threads grow": slopes["threads"] > 3,  # pools still grow to their bounds
        "something is held": any(held.values()),
        "compiled while serving": row["recompiles_after_warmup"] > 0,
        "requests failed": set(run.ends) - {"finished", "cancelled"},
        "the end was not clean": code != 0,
    }
    return row | {"failures": [words for words, is_so in checks.items() if is_so]}


def main() -> int:
    """Run; 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("flags", nargs="*", help="of shiftjax serve, after --")
    arguments = parser.parse_args()
    run = Soak(arguments.flags)
    try:
        row = asyncio.run(soak(run, arguments.minutes))
    finally:
        if run.process.poll() is None:
            run.process.kill()
    print_table("soak", row, stderr=False)
    print(json.dumps(row))
    return 1 if row["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
