"""What late layers save: prefill of a model with SwiftKV beside the same model without.

    python scripts/bench_swiftkv.py --layers 8 --early 4 --tokens 1024 --rounds 9

Both have random weights, so only their speed means something. Engines take turns, prompt by prompt,
in one process on one device; no prompt comes twice. Prints seconds and CPU seconds of a prefill,
medians, and of both the median ratio of a round, as one line of JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_machine import describe_machine

from shiftjax import LLM, SamplingParams
from shiftjax.arch.config import ModelConfig
from shiftjax.weights.hf_config import to_json


def model(layers: int, early: int | None, tokens: int) -> ModelConfig:
    """A model whose layers are what matters: a small vocabulary."""
    config = ModelConfig(
        name="bench",
        architecture="llama" if early is None else "llama_swiftkv",
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=layers,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        max_position_embeddings=2 * tokens,
        num_kv_layers=early,
    )
    return replace(config, tie_word_embeddings=True)


def engine(config: ModelConfig, tokens: int, dtype: str) -> LLM:
    """An engine with one size of steps."""
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-bench-"))
    (directory / "config.json").write_text(json.dumps(to_json(config, dtype)))
    sizes = {"max_num_batched_tokens": tokens, "token_buckets": [8, tokens], "max_num_seqs": 8}
    sizes |= {"devices": 1, "policy": "shift", "num_blocks": 4 * tokens // 16, "dtype": dtype}
    return LLM(f"random:{directory}", prefix_caching=False, **sizes)


def prefill(llm: LLM, prompt: list[int]) -> tuple[float, float]:
    """Seconds and CPU seconds until the first token."""
    begin, cpu = time.perf_counter(), time.process_time()
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
    return time.perf_counter() - begin, time.process_time() - cpu


def main() -> None:
    """Take turns and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--early", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    depths = {"plain": None, "swiftkv": args.early}
    engines = {
        name: engine(model(args.layers, early, args.tokens), args.tokens, args.dtype)
        for name, early in depths.items()
    }
    random = np.random.default_rng(0)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(args.rounds + 1):
        prompt = random.integers(1, 4096, args.tokens).tolist()
        for name, llm in engines.items():
            rounds[name].append(prefill(llm, prompt))
    found: dict[str, object] = {"tokens": args.tokens, "dtype": args.dtype}
    for place, what in enumerate(("seconds", "cpu_seconds")):
        plain, swiftkv = ([one[place] for one in rounds[name][1:]] for name in engines)
        found[what] = [round(statistics.median(each), 4) for each in (plain, swiftkv)]
        ratios = [a / b for a, b in zip(plain, swiftkv, strict=True)]
        found[f"ratio_{what}"] = round(statistics.median(ratios), 3)
    print(json.dumps(found | {"machine": describe_machine()}))


if __name__ == "__main__":
    main()
