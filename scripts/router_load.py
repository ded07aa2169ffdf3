"""Load through a router before several servers, and what the end of one of them does to clients.

    python scripts/router_load.py http://127.0.0.1:30000 --pid PID --signal TERM

Requests go out `--concurrent` at a time, one in five as a stream. After a fifth of them the process
PID, a server, gets the signal; the load ends with the last request or with that process, whichever
comes later. Prints a line of JSON: answers, failures (streams and others), the seconds of the
slowest answer, and the longest time in which nothing was answered.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import NamedTuple

import httpx

STREAM_EVERY = 5
PROMPTS = tuple(f"{number}: a conversation begins like this" for number in range(6))


class Answer(NamedTuple):
    """What a client saw of a request; `failure` is empty where it got a whole answer."""

    prompt: str
    is_stream: bool
    text: str
    failure: str
    began: float  # time.monotonic()
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
    answers: list[Answer] = []
    numbers = count()

    async def send(client: httpx.AsyncClient) -> None:
        while len(answers) < num_requests or not is_over():
            answers.append(await ask(client, model, next(numbers)))
            on_answer()

    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        await asyncio.gather(*(send(client) for _ in range(concurrent)))
    return answers


async def ask(client: httpx.AsyncClient, model: str, number: int) -> Answer:
    """One request, whose prompt and kind are those of its number."""
    prompt, is_stream = PROMPTS[number % len(PROMPTS)], number % STREAM_EVERY == 0
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    began = time.monotonic()
    try:
        response = await client.post("/v1/completions", json=body | {"stream": is_stream})
        text, failure = _read(response, is_stream)
    except httpx.TransportError as error:
        text, failure = "", repr(error)
    return Answer(prompt, is_stream, text, failure, began, time.monotonic())


def _read(response: httpx.Response, is_stream: bool) -> tuple[str, str]:
    """The text of an answer, and what is wrong with it."""
    body = response.text
    if response.status_code != 200:
        return "", f"{response.status_code} {body}"
    lines = [body]
    if is_stream:
        *lines, last = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
        if last != "[DONE]":
            return "", f"the stream ends with {last}"
    objects = [json.loads(line) for line in lines]
    if "error" in objects[-1]:
        return "", json.dumps(objects[-1])
    return "".join(choice["text"] for each in objects for choice in each["choices"]), ""


def summary(answers: Sequence[Answer]) -> dict[str, object]:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="of the router, or of a server")
    parser.add_argument("--model", default="tiny", help="name that requests call the model")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--pid", type=int, help="the server that gets the signal")
    parser.add_argument("--signal", choices=("TERM", "KILL"), default="KILL")
    return parser


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Run a load, and say what became of it."""
    arguments = _parser().parse_args()
    num_answers = count(1)

    def on_answer() -> None:
        if next(num_answers) == arguments.requests // 5 and arguments.pid is not None:
            os.kill(arguments.pid, signal.Signals[f"SIG{arguments.signal}"])

    is_over = lambda: arguments.pid is None or not _is_running(arguments.pid)  # noqa: E731
    sizes = arguments.requests, arguments.concurrent
    answers = asyncio.run(load(arguments.url, arguments.model, *sizes, on_answer, is_over))
    print(json.dumps(summary(answers)))


if __name__ == "__main__":
    main()
