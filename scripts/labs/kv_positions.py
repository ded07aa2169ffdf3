"""Decode steps where devices split positions of KV, beside steps where they hold copies.

    python scripts/bench.py kv_positions --context 2048 --rounds 5

A random model with 2 KV heads is served on 8 virtual devices, both ways in one process, the two in
turns. It has two small layers, so attention has a larger share than in real models. CPU
milliseconds of a step are those of an answer less those of its first token, whose prompt is in the
prefix cache. The result is the median ratio, with the least and the most.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from shiftjax.config import EngineConfig
from shiftjax.settings import make_virtual_devices

DEVICES, STEPS, CHUNK = 8, 16, 512
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 1 << 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
OPTIONS = {
    "--context": (2048, "tokens of each prompt"),
    "--sequences": (4, "that decode together"),
    "--sp": 4,
    "--rounds": 5,
}


def measure(asked: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield a row of each round, and return the ratio of split positions to copies."""
    make_virtual_devices(EngineConfig.from_options(devices=DEVICES))
    from shiftjax.llm import LLM

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        room = {"max_model_len": asked.context + 2 * STEPS, "max_num_seqs": asked.sequences}
        sizes = {"max_num_batched_tokens": CHUNK, "token_buckets": (8, CHUNK), "dtype": "float32"}
        mesh = {"sp": asked.sp, "tp": DEVICES // asked.sp, "policy": "shift"}
        engines = {
            how: LLM(f"random:{directory}", kv_split=how, **room, **sizes, **mesh)
            for how in ("position", "replicate")
        }
    ratios = []
    for number in range(-1, asked.rounds):
        found = {how: step_ms(llm, asked.context, asked.sequences) for how, llm in engines.items()}
        ratios += [found["position"] / found["replicate"]] * (number >= 0)
        yield {"round": number, **{f"{how}_ms": ms for how, ms in found.items()}}
    return {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def step_ms(llm: Any, context: int, sequences: int) -> float:
    """Return CPU milliseconds of a decode step; the first call computes the prompts, too."""
    from shiftjax import SamplingParams

    prompts = [[(7 * n + i) % 1000 for i in range(context)] for n in range(sequences)]

    def seconds(num_tokens: int) -> float:
        begin = time.process_time()
        greedy = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy)
        return time.process_time() - begin

    first = seconds(1)
    return 1e3 * (seconds(STEPS + 1) - first) / STEPS
