"""Load through a router before several servers, and what the end of one of them does to clients.

    python scripts/bench.py router http://127.0.0.1:30000 --pid PID --signal TERM

Requests go out `--concurrent` at a time, one in five as a stream. After a fifth of them the process
PID, a server, gets the signal; the load ends with the last request or with that process, whichever
comes later. The row has answers, failures (streams and others), the seconds of the slowest answer,
and the longest time in which nothing was answered.
"""

import argparse
import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from serving.bench.client import complete, parse_url
from serving.bench.load import closed_loop

STREAM_EVERY = 5
PROMPTS = tuple(f"{number}: a conversation begins like this" for number in range(6))


class Answer(NamedTuple):
    """What a client saw of a request; `failure` is empty where it got a whole answer."""

    prompt: str
    is_stream: bool
    text: str
    failure: str
    began: float  # time.perf_counter()
    ended: float


async def load(
    url: str,
    model: str,
    num_requests: int,
    concurrent: int,
    on_answer: Callable[[], None] = lambda: None,
    is_over: Callable[[], bool] = lambda: True,
) -> list[Answer]:
    """Answers to `num_requests` requests, and more until something is over."""
    target, answers = parse_url(url), []

    async def send(number: int) -> None:
        prompt, is_stream = PROMPTS[number % len(PROMPTS)], number % STREAM_EVERY == 0
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        found = await complete(target, body, streams=is_stream)
        times, text = (found.sent_at, found.ended_at), found.texts.get(0, "")
        answers.append(Answer(prompt, is_stream, text, found.error or "", *times))
        on_answer()

    def numbers() -> Iterator[int]:
        for number in count():
            if len(answers) >= num_requests and is_over():
                return
            yield number

    await closed_loop(send, concurrent, numbers())
    return answers


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """What became of the requests of a load; times in seconds."""
    whole = sorted((each for each in answers if not each.failure), key=lambda each: each.ended)
    failed = Counter("streams" if each.is_stream else "others" for each in answers if each.failure)
    gaps = [later.ended - earlier.ended for earlier, later in pairwise(whole)]
    return {
        "answered": len(whole),
        "failed": dict(failed),
        "failures": sorted({each.failure for each in answers if each.failure})[:3],
        "slowest_seconds": round(max((each.ended - each.began for each in whole), default=0.0), 2),
        "longest_silence_seconds": round(max(gaps, default=0.0), 2),
    }


OPTIONS = {
    "url": (str, "of the router, or of a server"),
    "--model": ("tiny", "name that requests call the model"),
    "--requests": 500,
    "--concurrent": 8,
    "--pid": (int, "the server that gets the signal"),
    "--signal": ("KILL", {"choices": ("TERM", "KILL")}),
}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run a load, and yield what became of it."""
    num_answers = count(1)

    def on_answer() -> None:
        if next(num_answers) == args.requests // 5 and args.pid is not None:
            os.kill(args.pid, signal.Signals[f"SIG{args.signal}"])

    is_over = lambda: args.pid is None or not Path(f"/proc/{args.pid}").exists()  # noqa: E731
    sizes = args.requests, args.concurrent
    yield summary(asyncio.run(load(args.url, args.model, *sizes, on_answer, is_over)))
