"""A host with groups of its own is killed under load, and comes back: what each request sees.

    python scripts/bench.py lost_host --model smollm2-135m --requests 16 --tokens 96

Two servers on this machine have a group each. Requests are streamed twice, the second time with a
kill of the second server when a third of the tokens are there; then it is started again. The row
has the texts that are the same as without a kill, failures, the longest seconds between two tokens
after the kill of requests of the lost host and of others, and those until it serves again.
"""

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from cases.load_kit import ServerProcess, free_port, metrics_of

from serving.bench.client import Sample, complete

OPTIONS = {
    "--model": ("smollm2-135m", "a model, or its directory"),
    "--requests": 16,
    "--tokens": (96, "of each request"),
    "--prompt": (64, "tokens of each prompt"),
    "--flags": ("", "more flags of both servers, with spaces between"),
}
OF_BOTH = (
    *("--dp=2", "--hosts=2", "--sp=1", "--tp=1", "--max-model-len=512", "--num-blocks=600"),
    *("--max-num-batched-tokens=64", "--token-buckets=64", "--max-num-seqs=32"),
)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row; the machine's cores are shared by both servers."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("of the two", "utf-8")
        flags = [f"--model={arguments.model}", *OF_BOTH, *arguments.flags.split()]
        flags += [f"--coordinator=127.0.0.1:{free_port()}", f"--host-secret-file={secret}"]
        yield asyncio.run(_measure(arguments, flags))
    return {}


async def _measure(arguments: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    leader = ServerProcess(flags)
    follower = ServerProcess([*flags, "--host-rank=1"])
    try:
        await leader.wait_until_ready()
        await _ask(leader, arguments)  # to be warm
        before = await _ask(leader, arguments)
        after, killed_at = await _ask_and_kill(leader, follower, arguments)
        lost = int((await metrics_of(leader.target))["lost_host_sequences_total"])
        begin = time.perf_counter()
        follower = ServerProcess([*flags, "--host-rank=1"])
        while (await metrics_of(leader.target))["hosts"] < 2:
            await complete(leader.target, _body(arguments, 0) | {"max_tokens": 1})
        back = time.perf_counter() - begin
        again = await _ask(leader, arguments)
        code = await leader.stop()
    finally:
        leader.kill()
        follower.kill()
    waits = sorted(_longest_after(sample, killed_at) for sample in after)
    plain = sorted(max(sample.gaps) for sample in before)
    same = [one.texts == other.texts for one, other in zip(before, after, strict=True)]
    return {
        "requests": len(after),
        "of_the_lost_host": lost,
        "failed": sum(sample.error is not None for sample in (*before, *after, *again)),
        "same_texts": sum(same),
        "longest_gap_before": median(plain),
        "wait_of_lost_p50": median(waits[-lost:]) if lost else 0.0,
        "wait_of_lost_max": waits[-1],
        "wait_of_others_p50": median(waits[: len(waits) - lost]),
        "back_after": back,
        "exit_code": code,
    }


def _longest_after(sample: Sample, moment: float) -> float:
    """The longest time between two tokens of which the later one came after a moment."""
    pairs = itertools.pairwise(sample.token_times)
    return max((later - earlier for earlier, later in pairs if later > moment), default=0.0)


def _body(arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    prompt = [(31 * number + 7 * place) % 900 + 5 for place in range(arguments.prompt)]
    return {
        "prompt": prompt,
        "max_tokens": arguments.tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def _ask(leader: ServerProcess, arguments: argparse.Namespace) -> list[Sample]:
    bodies = (_body(arguments, number) for number in range(arguments.requests))
    return list(await asyncio.gather(*(complete(leader.target, body) for body in bodies)))


async def _ask_and_kill(
    leader: ServerProcess, follower: ServerProcess, arguments: argparse.Namespace
) -> tuple[list[Sample], float]:
    """Ask; the second server is killed after a third of the tokens. Returns when."""
    made, wanted = await metrics_of(leader.target), arguments.requests * arguments.tokens // 3
    asked = asyncio.create_task(_ask(leader, arguments))
    name = "generation_tokens_total"
    while (await metrics_of(leader.target))[name] < made[name] + wanted:
        await asyncio.sleep(0.02)
    killed_at = time.perf_counter()
    follower.process.kill()
    return await asked, killed_at
