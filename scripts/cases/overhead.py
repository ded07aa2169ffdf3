"""What serving costs over the bare engine: an engine without a model behind HTTP and gRPC.

    python scripts/bench.py overhead --streams 64 --tokens 512 --step-milliseconds 0 0.5 1 2 8

The runner makes up tokens at once, so all that is measured is Python: scheduling, text, JSON or
protobuf, sockets. With a step time of 0 the engine outruns the front ends, and tokens that come
while a client is not reading are merged into one event; with a step time as of a real model every
token is an event of its own, and what is measured is the latency that serving adds to a step.

The server runs in a process of its own and the clients in another, on the same machine. The first
step waits until all streams are accepted, and tokens count from the first one that comes: a round
may take a third of a second, of which streaming must be all. How long the streams take to start is
a number of its own. Both clients run on uvloop, parse what they read and do nothing else: the one
for HTTP is a lean one, that for gRPC is grpc.aio with one channel, which costs three times as much
per event and leaves the server that much less of the machine.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from cases.kit import BLOCK_SIZE, VOCAB_SIZE, Row, echo_engine, medians
from cases.load_kit import clients

from serving.bench.client import Sample, parse_url
from serving.bench.load import body_of
from serving.bench.steps import generate
from serving.run.listeners import Server
from serving.run.serve import GIL_SECONDS
from serving.server.async_engine import AsyncEngine
from serving.server.options import ServerOptions
from serving.server.served import ServedModel
from serving.server.service import Service
from shiftjax.core.engine import Engine
from shiftjax.core.request import StepOutput
from shiftjax.sim.echo import EchoRunner
from shiftjax.sim.trace import TraceRequest
from shiftjax.text.tokenizer import load_tokenizer
from shiftjax.weights.locate import resolve_model

SIDES = ("server", "client")
PROMPT_TOKENS, MAX_MODEL_LEN = 32, 2048


class TimedRunner(EchoRunner):
    """An echo runner whose steps take a time and end only while `is_open`."""

    def __init__(self, vocab_size: int, step_seconds: float):
        super().__init__(vocab_size)
        self.step_seconds = step_seconds
        self.is_open: Callable[[], bool] = lambda: True

    def fetch(self, handle: StepOutput) -> StepOutput:
        """What `run` computed, a step's time later."""
        while not self.is_open():
            time.sleep(0.001)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        return handle


def make_engine(runner: TimedRunner, streams: int) -> Engine:
    """An engine that runs all streams at once."""
    num_blocks = 1 + streams * MAX_MODEL_LEN // BLOCK_SIZE
    return echo_engine([runner], streams, max(1024, streams), MAX_MODEL_LEN, num_blocks)


def bare(streams: int, tokens: int, step_seconds: float) -> dict[str, float]:
    """The engine alone: no text, no sockets."""
    engine = make_engine(TimedRunner(VOCAB_SIZE, step_seconds), streams)
    prompts = [[number % 200] * PROMPT_TOKENS for number in range(streams)]
    start = time.perf_counter()
    count = sum(map(len, generate(engine, prompts, tokens)))
    return {"tokens_per_second": count / (time.perf_counter() - start)}


def serve(pipe: Connection, streams: int, step_seconds: float) -> None:
    """A server until the pipe closes."""

    async def main() -> None:
        tokenizer = load_tokenizer(str(resolve_model("smollm2-135m").path))
        service = Service(ServerOptions(port=0, grpc_port=0, max_num_queued_reqs=4096))
        runner = TimedRunner(VOCAB_SIZE, step_seconds)
        core = make_engine(runner, streams)
        engine = AsyncEngine(core, tokenizer, service.observers, service.options)
        runner.is_open = lambda: engine.counts.accepted % streams == 0
        service.open(ServedModel(("echo",), tokenizer, None), engine)
        server = Server(service)
        await server.start()
        assert server.grpc is not None
        gc.collect()
        gc.freeze()  # as `shiftjax serve` does, and
        sys.setswitchinterval(GIL_SECONDS)
        pipe.send((server.http_address, server.grpc.address))
        await asyncio.to_thread(pipe.recv)
        await server.stop(1.0)
        await service.close()

    uvloop.run(main())


async def load(over_grpc: bool, url: str, address: str, lengths: tuple[int, int]) -> list[Sample]:
    """Send `lengths` = (streams, tokens of each) at once over one of the protocols."""
    request = TraceRequest(0.0, PROMPT_TOKENS, lengths[1])
    async with clients(parse_url(url), address) as senders:
        bodies = (body_of(request, number, None) for number in range(lengths[0]))
        sent = (senders.send(body, over_grpc=over_grpc, streams=True) for body in bodies)
        return [answer.sample for answer in await asyncio.gather(*sent)]


def numbers(samples: Sequence[Sample], step_seconds: float) -> dict[str, float]:
    """Tokens and events per second; what a gap between events has beyond a step's time."""
    assert all(sample.error is None for sample in samples), [s.error for s in samples][:3]
    firsts = [sample.token_times[0] for sample in samples]
    seconds = max(sample.ended_at for sample in samples) - min(firsts)
    gaps = [gap for sample in samples for gap in sample.gaps]
    p50, p99 = np.percentile(gaps, (50, 99)) - step_seconds
    return {
        "start_milliseconds": 1000 * (max(firsts) - min(sample.sent_at for sample in samples)),
        "tokens_per_second": sum(sample.num_output_tokens for sample in samples) / seconds,
        "events_per_second": sum(len(sample.token_times) for sample in samples) / seconds,
        "added_gap_p50_milliseconds": 1000 * float(p50),
        "added_gap_p99_milliseconds": 1000 * float(p99),
    }


def _cpu_seconds(process: int | None) -> float:
    """What a process has used so far (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def medians_of(streams: int, tokens: int, step_seconds: float, rounds: int) -> dict[str, Any]:
    """Medians over rounds, after one that warms up, of the engine alone, HTTP and gRPC."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, streams, step_seconds), daemon=True)
    process.start()
    url, address = ours.recv()
    rows: dict[str, list[Row]] = {"engine": [], "http": [], "grpc": []}
    for _ in range(rounds + 1):
        rows["engine"].append(bare(streams, tokens, step_seconds))
        for name in ("http", "grpc"):
            before = _cpu_seconds(process.pid), time.process_time()
            samples = uvloop.run(load(name == "grpc", url, address, (streams, tokens)))
            row = numbers(samples, step_seconds)
            spent = _cpu_seconds(process.pid) - before[0], time.process_time() - before[1]
            row |= {f"{who}_cpu_seconds": s for who, s in zip(SIDES, spent, strict=True)}
            rows[name].append(row)
    ours.send(None)
    process.join()
    return {name: medians(each[1:]) for name, each in rows.items()}


OPTIONS = {
    "--streams": 64,
    "--tokens": 512,
    "--step-milliseconds": [0.0, 0.5, 1.0, 2.0, 8.0],
    "--rounds": 5,
}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield medians for each time of a step and each way to the engine."""
    for milliseconds in args.step_milliseconds:
        found = medians_of(args.streams, args.tokens, milliseconds / 1000, args.rounds)
        for name, row in found.items():
            yield {"step_ms": milliseconds, "over": name} | row
