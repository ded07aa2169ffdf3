"""What KV events cost the engine's thread, step by step, and what telling a whole index costs it.

    python scripts/bench.py kv_events [--sequences 64] [--prompt 512] [--output 64] [--rounds 6]

Two engines that make up tokens do the same work in turns, one of them with events, to which another
process listens. Counted are CPU seconds of the engine's thread (a busy machine's clock would say
more of others); each step is compared with the same step of the other engine. Prompts are new in
every round and the pool holds two rounds, so blocks come and go. Rows are of kinds of steps, in
microseconds, and of sizes of an index, in milliseconds of the engine's thread and of the other; the
result has the CPU time of all other threads (encoding, sockets) a step.
"""

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Generator
from functools import partial
from itertools import product
from typing import Any

from cases.kit import BLOCK_SIZE, VOCAB_SIZE, Row, echo_engine, medians

from serving.server.kv_events import KvEvents
from shiftjax.core.blocks import BlockAllocator
from shiftjax.core.cache_events import CacheFeed
from shiftjax.core.request import Request, SamplingParams
from shiftjax.sim.echo import EchoRunner

STEP_TOKENS = 1024
OPTIONS = {"--sequences": 64, "--prompt": 512, "--output": 64, "--rounds": 6}
COLUMNS = ("off", "on", "difference")
INDEX_SIZES = (1000, 10_000, 100_000)


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield rows of steps and of indexes; return what is of neither."""
    events = KvEvents("tcp://127.0.0.1:*", "kv@here@echo")
    listener = multiprocessing.get_context("spawn").Process(
        target=listen, args=(events.address,), daemon=True
    )
    listener.start()
    try:
        found = steps_of(args, events)
        while not events.counts["sent"]:
            time.sleep(0.01)
    finally:
        listener.terminate()
        events.close()
    for kind in ("prompts", "decodes"):
        yield {"microseconds a step": kind} | found[kind]
    for size in INDEX_SIZES:
        mine, other = tell_all_ms(size)
        yield {"milliseconds for blocks": size, "engine": mine, "other": other}
    return found


def steps_of(options: argparse.Namespace, events: KvEvents) -> dict:
    """Microseconds of the engine's thread, by kind of step: (off, on, difference)."""
    blocks = options.sequences * -(-(options.prompt + options.output) // BLOCK_SIZE)
    sizes = options.sequences, STEP_TOKENS, options.prompt + options.output, 1 + 2 * blocks
    engines = [echo_engine([EchoRunner(VOCAB_SIZE)], *sizes) for _ in range(2)]
    feed = CacheFeed([engines[1].lanes[0].scheduler.tables.device])
    after = (lambda: None, partial(events.send_from, feed))
    taken: dict[str, list[Row]] = {"prompts": [], "decodes": []}
    rng, num_steps, begin = random.Random(0), 0, (time.process_time(), time.thread_time())
    for number, index in product(range(options.rounds), range(options.sequences)):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(options.prompt)]
        sampling = SamplingParams(max_tokens=options.output, ignore_eos=True)
        for engine in engines:
            engine.add_request(Request(f"{number}:{index}", prompt, sampling))
        while index == options.sequences - 1 and engines[0].has_work():
            pair = [0.0, 0.0]
            for which in (0, 1) if num_steps % 2 else (1, 0):
                start = time.thread_time()
                engines[which].step(0.0)
                after[which]()
                pair[which] = 1e6 * (time.thread_time() - start)
            ended = engines[0].ended_steps
            if number and ended:  # the first round warms up
                kind = "prompts" if ended[0].num_tokens > options.sequences else "decodes"
                columns = (*pair, pair[1] - pair[0])
                taken[kind].append(dict(zip(COLUMNS, columns, strict=True)))
            num_steps += 1
    assert not events.counts["dropped"]
    others = time.process_time() - begin[0] - (time.thread_time() - begin[1])
    found = {"other_us": 1e6 * others / num_steps, "num_events": events.counts["sent"]}
    return found | {kind: medians(rows) for kind, rows in taken.items()}


def tell_all_ms(num_blocks: int) -> tuple[float, float]:
    """Milliseconds to tell of an index of chains of 64 blocks: the engine's thread, the other."""
    blocks = BlockAllocator(num_blocks + 1, BLOCK_SIZE)
    parent = None
    for number in range(num_blocks):
        name = number.to_bytes(16, "big")
        parent = parent if number % 64 else None
        blocks.register(blocks.allocate(), name, [number] * BLOCK_SIZE, parent)
        parent = name
    feed, taken, made = CacheFeed([blocks]), [], []
    for _ in range(5):
        feed.tell_all()
        begin = time.thread_time()
        batches, _ = feed.take()
        taken.append(1e3 * (time.thread_time() - begin))
        begin = time.thread_time()
        assert sum(len(batch.events) for batch in batches) > 1
        made.append(1e3 * (time.thread_time() - begin))
    return statistics.median(taken), statistics.median(made)


def listen(address: str) -> None:
    """Another process that reads everything."""
    import zmq  # pyright: ignore[reportMissingImports]

    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(address)
    while True:
        socket.recv_multipart()
