"""Greedy tokens of a small model with hashed weights, which NumPy has computed in float64.

`benchmarks/gpu_goldens.json` has them, with each token's margin to the runner-up. Weights are
functions of their names (`gpu_weights.py`), so there is no checkpoint to carry.
`tests/oracle/make_gpu_goldens.py` writes the file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_parts import ENGINES, Run
from gpu_weights import prompt

from shiftjax.arch.presets import preset

GOLDENS = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_goldens.json"
PROMPTS = (1, 15, 16, 17, 63, 130, 337, 700)  # tokens of each
NUM_TOKENS = 16
NEAR_TIE = 0.05  # a margin, in logits of about 1, that bfloat16 may turn
_FAMILY = {"architecture": "llama", "vocab_size": 1024, "max_position_embeddings": 1024}
_ENDS = {"bos_token_id": 0, "eos_token_ids": (1,)}
MODEL = preset("goldens", _FAMILY | _ENDS, 256, 512, 4, 8, 2, 64)


def golden_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield one row for each prompt: where tokens first differ, and the margin there."""
    from gpu_engine import Sizes, make_engine

    from serving.bench.steps import generate

    options: dict[str, str] = {} if run.dry else ENGINES["pallas, one graph"]
    sizes = Sizes((len(PROMPTS),), 1024, (512,), (len(PROMPTS), PROMPTS[-1], NUM_TOKENS), 1)
    built = make_engine(MODEL, sizes, options)
    attention = built.runners[0].step.attention.name
    prompts = [prompt(i, length) for i, length in enumerate(PROMPTS)]
    cases = json.loads(GOLDENS.read_text(encoding="utf-8"))
    for case, got in zip(cases, generate(built.engine, prompts, NUM_TOKENS), strict=True):
        pairs = enumerate(zip(got, case["token_ids"], strict=True))
        first = next((i for i, (one, other) in pairs if one != other), None)
        margin = None if first is None else case["margins"][first]
        where = {"first_difference": first, "margin": margin}
        is_right = margin is None or margin < NEAR_TIE
        row = f"prompt of {case['prompt']}"
        yield {"row": row, "attention": attention, "right": is_right} | where
