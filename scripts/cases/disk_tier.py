"""Time to first token of a long prompt that comes again, by the tier that has it.

    python scripts/bench.py disk_tier [--tokens 2000] [--rounds 5] [--dir DIRECTORY]

SmolLM2-135M on one device, in bfloat16. Its KV pool holds one such prompt, host memory three, and
there are more. Each of them comes

    computed   for the first time
    device     again at once
    disk       after all others; what the page cache has of the files is dropped before
    host       again, after one other
    restart    in another engine on the same directory, files dropped from the page cache before

Rows are answers; the result has the median seconds of each, how many times they go into those of
`computed`, and whether first tokens were the same. A prompt from the disk has the read, the copy to
the device and a step of its last tokens.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
from cases.kit import Row, medians, spent

from shiftjax import LLM, SamplingParams
from shiftjax.core.stats import EngineStats
from shiftjax.disk_tier.disk_stats import DiskStats

BLOCK_SIZE = 16
OPTIONS = {"--tokens": 2000, "--rounds": 5, "--dir": ""}
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
TIERS = "computed", "device", "host", "disk", "restart"


def start(directory: Path, num_tokens: int) -> LLM:
    """Return an engine whose pool holds one prompt, and its host memory another."""
    num_blocks = 2 + -(-num_tokens // BLOCK_SIZE)  # the null block, and one to spare
    sizes: Row = {"block_size": BLOCK_SIZE, "num_blocks": num_blocks, "max_num_seqs": 8}
    sizes |= {"max_model_len": num_tokens + BLOCK_SIZE, "max_num_batched_tokens": 512}
    sizes |= {"token_buckets": [8, 512], "disk_cache_dir": str(directory)}
    block = 2 * 30 * 3 * 64 * BLOCK_SIZE * 2  # bytes
    memory = str(int(3.2 * num_blocks * block))
    return LLM("smollm2-135m", devices=1, dtype="bfloat16", host_memory=memory, **sizes)


def ask(llm: LLM, prompt: list[int]) -> Row:
    """Serve a prompt alone: seconds until its first token, what was cached, and the token."""
    (out,), took = spent(lambda: llm.generate([prompt], FIRST))
    cached = out.metrics.num_cached_tokens if out.metrics else 0
    return took | {"cached_tokens": cached, "token": out.outputs[0].token_ids[0]}


def told(llm: LLM) -> DiskStats:
    """Return what the disk has done."""
    stats: EngineStats = llm.engine.stats()
    found = stats.find(DiskStats)
    assert found is not None
    return found


def settle(llm: LLM, directory: Path) -> None:
    """Wait until nothing is written any more, and have the kernel drop what it keeps of files."""
    before = -1
    while before != (before := sum(path.stat().st_size for path in directory.glob("*"))):
        time.sleep(0.5)
    for path in directory.glob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def summary(rows: Sequence[Row]) -> Row:
    """Median seconds by tier, their ratios, tokens that were cached, whether tokens agree."""
    kept = [row for row in rows if row["round"] >= 0]
    result: Row = {"seconds": {}, "cached_tokens": {}, "times_quicker": {}}
    for tier in TIERS:
        own = [{"s": r["seconds"], "c": r["cached_tokens"]} for r in kept if r["tier"] == tier]
        middle = medians(own)
        result["seconds"][tier], result["cached_tokens"][tier] = middle["s"], middle["c"]
        result["times_quicker"][tier] = round(result["seconds"]["computed"] / middle["s"], 1)
    tokens = {(row["round"], row["token"]) for row in rows}
    return result | {"same_tokens": len(tokens) == len(dict(tokens))}


def measure(args: argparse.Namespace) -> Generator[Row, None, Row]:
    """Yield a row for each answer; return the summary."""
    directory = Path(tempfile.mkdtemp(dir=args.dir or None))
    draw = np.random.default_rng(0).integers
    numbers = range(-1, max(5, args.rounds))
    prompts = {n: draw(3, 40_000, args.tokens).tolist() for n in numbers}
    rows: list[Row] = []
    llm = start(directory, args.tokens)

    def row(number: int, tier: str) -> Row:
        rows.append({"round": number, "tier": tier} | ask(llm, prompts[number]))
        return rows[-1]

    for number in prompts:
        yield row(number, "computed")
        yield row(number, "device")
    for number in prompts:
        settle(llm, directory)
        yield row(number, "disk")
        if number >= 0:
            yield row(number - 1, "host")
    first = told(llm)
    llm.close()
    settle(llm, directory)
    llm = start(directory, args.tokens)
    for number in prompts:
        yield row(number, "restart")
    second = told(llm)
    llm.close()
    shutil.rmtree(directory)
    stats = {"first": first, "second": second}
    counts = {name: [s.num_read_bytes, s.num_written_bytes] for name, s in stats.items()}
    return summary(rows) | {"read_and_written_bytes": counts}
