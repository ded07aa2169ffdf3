"""Time to first token of a long prompt that comes again, with and without the host tier.

    python scripts/bench_host_tier.py [--tokens 3000] [--rounds 5] [--out rows.jsonl]
    python scripts/bench_host_tier.py --assembly

SmolLM2-135M on one device whose KV pool holds one such prompt, and two prompts that come in turns:
each has been evicted by the other when it is asked again. Without a host tier it is computed again;
with one its blocks come back, and the other's go there in the same step. Engines take turns, prompt
by prompt. What the restore has to move is 2 * layers * KV heads * head_dim * tokens numbers, what
computing has to compute about 2 operations for each parameter of a layer and token, and attention.
Prints a row an answer (and keeps it in --out); the last line is JSON: medians, the median ratio of
a round, whether the first tokens are the same.

With --assembly alone: how fast the host puts together what 8 devices of TP 8 need of a chunk that 8
stages have written (8 layers each, 8 heads, 512 tokens, head_dim 128, 134 MB), by one thread.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from bench_machine import describe_machine

from shiftjax import LLM, SamplingParams
from shiftjax.host_tier.store_device import Shard, piece

BLOCK_SIZE = 16
ENGINES = {"without": "0", "with": "1GiB"}  # host memory
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def start(host_memory: str, num_tokens: int) -> LLM:
    """An engine whose pool holds one prompt."""
    return LLM(
        "smollm2-135m",
        devices=1,
        host_memory=host_memory,
        block_size=BLOCK_SIZE,
        num_blocks=2 + -(-num_tokens // BLOCK_SIZE),  # the null block, and one to spare
        max_model_len=num_tokens + BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        token_buckets=[8, 512],
    )


def ask(llm: LLM, prompt: list[int]) -> dict[str, float]:
    """Serve a prompt alone: seconds until its first token, what was cached, and the token."""
    begin, cpu = time.perf_counter(), time.process_time()
    (out,) = llm.generate([prompt], FIRST)
    took = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    cached = out.metrics.num_cached_tokens if out.metrics else 0
    return took | {"cached_tokens": cached, "token": out.outputs[0].token_ids[0]}


def summary(rows: list[dict]) -> dict[str, object]:
    """Medians by engine, the median ratio of a round, and whether tokens were the same."""
    found: dict[str, object] = {}
    for what in ("seconds", "cpu_seconds"):
        values = {name: [row[what] for row in rows if row["tier"] == name] for name in ENGINES}
        ratios = [a / b for a, b in zip(values["without"], values["with"], strict=True)]
        found[what] = {name: round(statistics.median(each), 4) for name, each in values.items()}
        found[f"ratio_{what}"] = round(statistics.median(ratios), 2)
    tokens = [{row["token"] for row in rows if row["prompt"] == prompt} for prompt in (0, 1)]
    return found | {"same_tokens": all(len(each) == 1 for each in tokens)}


def assembly(rounds: int) -> dict[str, float]:
    """Bytes a second, and a CPU second, of what has to be copied together for another layout."""
    each, heads = 8, tuple(range(8))
    size = 2 * each, len(heads), 512, 128
    shards = [
        Shard(np.full(size, stage, np.int16), range(each * stage, each * (stage + 1)), heads)
        for stage in range(8)
    ]
    seconds, cpu_seconds = [], []
    for _ in range(rounds):
        begin, cpu = time.perf_counter(), time.process_time()
        for head in heads:
            piece(shards, range(8 * each), (head,), len(heads))
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu)
    num_bytes = sum(shard.values.nbytes for shard in shards)
    return {
        "bytes": num_bytes,
        "bytes_per_second": num_bytes / statistics.median(seconds),
        "bytes_per_cpu_second": num_bytes / statistics.median(cpu_seconds),
    }


def main() -> None:
    """Take turns and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--assembly", action="store_true")
    args = parser.parse_args()
    if args.assembly:
        print(json.dumps(assembly(args.rounds) | {"machine": describe_machine()}))
        return
    engines = {name: start(memory, args.tokens) for name, memory in ENGINES.items()}
    prompts = np.random.default_rng(0).integers(3, 40_000, (2, args.tokens)).tolist()
    rows = []
    for number in range(-1, args.rounds):  # the round before fills caches and is not counted
        for which, prompt in enumerate(prompts):
            for name, llm in engines.items():
                row = {"tier": name, "round": number, "prompt": which, "tokens": args.tokens}
                row |= ask(llm, prompt)
                if number >= 0:
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    moved = engines["with"].stats()["host_tier"]
    told = summary(rows) | {"machine": describe_machine(), "host_tier": moved}
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in [*rows, told]))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
