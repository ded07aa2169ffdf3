"""What late layers save: prefill of a model with SwiftKV beside the same model without.

    python scripts/bench.py swiftkv --layers 8 --early 4 --tokens 1024 --rounds 9

Both have random weights, so only their speed means something. Engines take turns, prompt by prompt,
in one process on one device; no prompt comes twice. A row is a prefill; the result has the medians
of seconds and CPU seconds, and of both the median ratio of a round.
"""

import argparse
import json
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from cases.kit import compared, spent

from shiftjax import LLM, SamplingParams
from shiftjax.arch.config import ModelConfig
from shiftjax.arch.presets import preset
from shiftjax.weights.hf_config import to_json

OPTIONS = {"--layers": 8, "--early": 4, "--tokens": 1024, "--rounds": 9, "--dtype": "bfloat16"}


def model(layers: int, early: int | None, tokens: int) -> ModelConfig:
    """Return a model whose layers are what matters: a small vocabulary."""
    family = {"architecture": "llama" if early is None else "llama_swiftkv", "vocab_size": 4096}
    family |= {"max_position_embeddings": 2 * tokens, "num_kv_layers": early}
    return preset("bench", family | {"tie_word_embeddings": True}, 768, 2048, layers, 12, 4, 64)


def engine(config: ModelConfig, tokens: int, dtype: str) -> LLM:
    """An engine with one size of steps."""
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-bench-"))
    (directory / "config.json").write_text(json.dumps(to_json(config, dtype)))
    sizes = {"max_num_batched_tokens": tokens, "token_buckets": [8, tokens], "max_num_seqs": 8}
    sizes |= {"devices": 1, "policy": "shift", "num_blocks": 4 * tokens // 16, "dtype": dtype}
    return LLM(f"random:{directory}", prefix_caching=False, **sizes)


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield a row for each prefill, engines in turns; return what they come to."""
    depths = {"plain": None, "swiftkv": args.early}
    engines = {
        name: engine(model(args.layers, early, args.tokens), args.tokens, args.dtype)
        for name, early in depths.items()
    }
    draw, rows, first = np.random.default_rng(0), [], SamplingParams(temperature=0, max_tokens=1)
    for number in range(-1, args.rounds):
        prompt = draw.integers(1, 4096, args.tokens).tolist()
        for name, llm in engines.items():
            _, taken = spent(lambda llm=llm, prompt=prompt: llm.generate([prompt], first))
            rows.append({"round": number, "engine": name} | taken)
            yield rows[-1]
    return compared(rows, "plain", "swiftkv")
