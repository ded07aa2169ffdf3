"""Time to first token of a long prompt that comes again, with and without the host tier.

    python scripts/bench.py host_tier [--tokens 3000] [--rounds 5]
    python scripts/bench.py host_tier --assembly

SmolLM2-135M on one device whose KV pool holds one such prompt, and two prompts that come in turns:
each has been evicted by the other when it is asked again. Without a host tier it is computed again;
with one its blocks come back, and the other's go there in the same step. Engines take turns, prompt
by prompt. What the restore has to move is 2 * layers * KV heads * head_dim * tokens numbers, what
computing has to compute about 2 operations for each parameter of a layer and token, and attention.
A row is an answer; the result has medians, the median ratio of a round, and whether the first
tokens are the same.

With --assembly alone: how fast the host puts together what 8 devices of TP 8 need of an extent that
8 stages have written (8 layers each, 8 heads, 512 tokens, head_dim 128, 134 MB), by one thread.
"""

import argparse
from collections.abc import Generator, Sequence
from itertools import product

import numpy as np
from cases.kit import Row, compared, medians, spent

from shiftjax import LLM, SamplingParams
from shiftjax.host_tier.store_device import Row as HeldRow
from shiftjax.host_tier.store_device import Rows, Shard, piece
from shiftjax.parallel.positions import Positions

BLOCK_SIZE = 16
ENGINES = {"without": "0", "with": "1GiB"}  # host memory
OPTIONS = {"--tokens": 3000, "--rounds": 5, "--assembly": False}
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def start(host_memory: str, num_tokens: int) -> LLM:
    """Return an engine whose pool holds one prompt."""
    num_blocks = 2 + -(-num_tokens // BLOCK_SIZE)  # the null block, and one to spare
    sizes: Row = {"block_size": BLOCK_SIZE, "num_blocks": num_blocks, "max_num_seqs": 8}
    sizes |= {"max_model_len": num_tokens + BLOCK_SIZE, "max_num_batched_tokens": 512}
    sizes |= {"token_buckets": [8, 512], "host_memory": host_memory}
    return LLM("smollm2-135m", devices=1, **sizes)


def ask(llm: LLM, prompt: list[int]) -> Row:
    """Serve a prompt alone: seconds until its first token, what was cached, and the token."""
    (out,), took = spent(lambda: llm.generate([prompt], FIRST))
    cached = out.metrics.num_cached_tokens if out.metrics else 0
    return took | {"cached_tokens": cached, "token": out.outputs[0].token_ids[0]}


def summary(rows: Sequence[Row]) -> Row:
    """Medians by engine, the median ratio of a round, and whether tokens were the same."""
    tokens = {(row["prompt"], row["token"]) for row in rows}
    same = len(tokens) == len(dict(tokens))  # one token of each prompt
    return compared(rows, "without", "with") | {"same_tokens": same}


def assembly(rounds: int) -> Row:
    """Bytes a second, and a CPU second, of what has to be copied together for another layout."""
    each, heads, whole = 8, tuple(map(HeldRow, range(8))), Positions(1, BLOCK_SIZE)
    size = 2 * each, len(heads), 512, 128
    shards = [
        Shard(
            np.full(size, stage, np.int16),
            range(each * stage, each * (stage + 1)),
            Rows(heads, whole),
        )
        for stage in range(8)
    ]

    def join() -> None:
        for head in heads:
            piece(shards, range(8 * each), Rows((head,), whole), len(heads))

    taken = medians((spent(join)[1] for _ in range(rounds)), 9)
    num_bytes = sum(shard.values.nbytes for shard in shards)
    return {"bytes": num_bytes} | {f"bytes_per_{w[:-1]}": num_bytes / taken[w] for w in taken}


def measure(args: argparse.Namespace) -> Generator[Row, None, Row | None]:
    """Yield a row for each answer, engines in turns; return the summary."""
    if args.assembly:
        yield assembly(args.rounds)
        return None
    engines = {name: start(memory, args.tokens) for name, memory in ENGINES.items()}
    prompts = np.random.default_rng(0).integers(3, 40_000, (2, args.tokens)).tolist()
    rows: list[Row] = []
    for number, which, name in product(range(-1, args.rounds), (0, 1), engines):
        row = {"engine": name, "round": number, "prompt": which, "tokens": args.tokens}
        row |= ask(engines[name], prompts[which])
        rows.append(row)
        yield row
    return summary(rows) | {"host_tier": engines["with"].stats()["host_tier"]}
