"""Greedy tokens of a small model with hashed weights, which NumPy has computed in float64.

`benchmarks/gpu_goldens.json` has them, with each token's margin to the runner-up. Weights are
functions of their names (`gpu_weights.py`), so there is no checkpoint to carry.
`tests/oracle/make_gpu_goldens.py` writes the file.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_adapters import options_with, write_adapter
from gpu_parts import ENGINES, Run
from gpu_weights import prompt

from shiftjax.arch.presets import preset
from shiftjax.build import Built
from shiftjax.core.request import Request, SamplingParams

GOLDENS = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_goldens.json"
PROMPTS = (1, 15, 16, 17, 63, 130, 337, 700)  # tokens of each
NUM_TOKENS = 16
ADAPTERS = None, 0, 1  # of prompts in turn, by their seeds
NEAR_TIE = 0.05  # a margin, in logits of about 1, that bfloat16 may turn
_FAMILY = {"architecture": "llama", "vocab_size": 1024, "max_position_embeddings": 1024}
_ENDS = {"bos_token_id": 0, "eos_token_ids": (1,)}
MODEL = preset("goldens", _FAMILY | _ENDS, 256, 512, 4, 8, 2, 64)


def golden_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield one row for each prompt: where tokens first differ, and the margin there.

    First of the model alone, then of one with adapters, in one batch.
    """
    yield from _rows(run, adapters=False)
    yield from _rows(run, adapters=True)


def _rows(run: Run, *, adapters: bool) -> Iterator[dict[str, Any]]:
    from gpu_engine import Sizes, make_engine

    options: dict[str, Any] = {} if run.dry else dict(ENGINES["pallas, one graph"])
    sizes = Sizes((len(PROMPTS),), 1024, (512,), (len(PROMPTS), PROMPTS[-1], NUM_TOKENS), 1)
    names = [None] * len(PROMPTS)
    if adapters:
        seeds = [ADAPTERS[i % len(ADAPTERS)] for i in range(len(PROMPTS))]
        names = [None if seed is None else f"a{seed}" for seed in seeds]
    with tempfile.TemporaryDirectory(prefix="shiftjax-adapters-") as folder:
        if adapters:
            own = [seed for seed in ADAPTERS if seed is not None]
            options |= options_with({f"a{n}": write_adapter(Path(folder), MODEL, n) for n in own})
        built = make_engine(MODEL, sizes, options)
        attention = built.runners[0].step.attention.name
        found = _generated(built, names)
    cases = json.loads(GOLDENS.read_text(encoding="utf-8"))
    cases = [case for case in cases if ("adapter" in case) == adapters]
    for case, got in zip(cases, found, strict=True):
        pairs = enumerate(zip(got, case["token_ids"], strict=True))
        first = next((i for i, (one, other) in pairs if one != other), None)
        margin = None if first is None else case["margins"][first]
        where = {"first_difference": first, "margin": margin}
        is_right = margin is None or margin < NEAR_TIE
        row = f"prompt of {case['prompt']}" + ", adapters" * adapters
        yield {"row": row, "attention": attention, "right": is_right} | where


def _generated(built: Built, names: Sequence[str | None]) -> list[list[int]]:
    """Continue all prompts greedily, all at once, each with the adapter of a name, or with none."""
    from serving.bench.steps import answers

    def key(name: str | None) -> str | None:
        return built.adapters.key_of(name) if built.adapters is not None and name else None

    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    pairs = enumerate(zip(PROMPTS, names, strict=True))
    requests = [
        Request(str(n), prompt(n, length), sampling, adapter=key(name))
        for n, (length, name) in pairs
    ]
    return list(answers(built.engine, requests).values())
