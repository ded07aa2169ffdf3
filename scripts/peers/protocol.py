"""How the throughput benchmark talks to an engine's worker: JSON lines over stdin and stdout.

    -> {"prompts": [[token id, ...], ...], "max_tokens": [int, ...]}
    <- {"seconds": float, "cpu_seconds": float, "token_ids": [[token id, ...], ...], ...}

A worker that knows them adds "tpot_seconds": of each request the mean time per token after the
first, null where there was none.

The first line out describes the engine. A worker generates greedily, ignores end-of-sequence
tokens and keeps nothing between requests; all prompts are there at once, and the clock runs from
the request to the last token. Anything else that an engine prints goes to stderr.

Standard library only and Python 3.11: every engine's environment imports this.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], list[int]], dict]  # token_ids and what a worker adds
Start = Callable[[argparse.Namespace], tuple[dict, Generate]]  # a description of the engine, and it


def main(documentation: str | None, options: dict[str, tuple], start: Start) -> None:
    """Run a worker with options, name -> (default, help): load its model and serve."""
    channel = reserve_stdout()
    parser = argparse.ArgumentParser(description=(documentation or "").partition("\n")[0])
    parser.add_argument("model", help="GGUF file, or a Hugging Face directory")
    for name, (default, text) in options.items():
        parser.add_argument(name, type=type(default), default=default, help=text)
    args = parser.parse_args()
    description, generate = start(args)
    serve(channel, vars(args) | {"model": None} | description, generate)


def reserve_stdout():
    """Keep stdout for the protocol and send what libraries print there to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def send(channel, message: dict) -> None:
    """Write one line."""
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def serve(channel, description: dict, generate: Generate) -> None:
    """Describe the engine, then answer requests until stdin closes."""
    send(channel, description)
    for line in sys.stdin:
        request = json.loads(line)
        start, cpu_start = time.perf_counter(), time.process_time()
        reply = generate(request["prompts"], request["max_tokens"])
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        send(channel, {"seconds": seconds, "cpu_seconds": cpu_seconds} | reply)
