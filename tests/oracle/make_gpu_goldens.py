"""Write `benchmarks/gpu_goldens.json`: greedy tokens of a small model with hashed weights.

    PYTHONPATH=.:tests:scripts python tests/oracle/make_gpu_goldens.py

By the decoder of `numpy_llama.py` in float64, from weights made here from their description in
`scripts/gpu_weights.py`.
"""

import itertools
import json

import numpy as np
from gpu_adapters import factors, hashed
from gpu_goldens import ADAPTERS, GOLDENS, MODEL, NUM_TOKENS, PROMPTS
from gpu_weights import prompt

from oracle.numpy_llama import forward, tensor_shapes
from shiftjax.weights.hf_config import to_json


def tensors_of(config: dict, seed: int | None = None) -> dict[str, np.ndarray]:
    """Return the tensors of the model, with an adapter in its matrices."""
    shapes = tensor_shapes(config).items()
    found = {n: np.ones(s) if len(s) == 1 else hashed(n, s) for n, s in shapes}
    if seed is not None:
        found |= {name: found[name] + b @ a for name, (a, b) in factors(MODEL, seed).items()}
    return found


def cases(lengths: tuple[int, ...] = PROMPTS, num_tokens: int = NUM_TOKENS) -> list[dict]:
    """Return prompts with what becomes of them: of all without adapters, then with them in turn."""
    config = to_json(MODEL, "float32")
    prompts = [prompt(i, length) for i, length in enumerate(lengths)]
    tensors = {seed: tensors_of(config, seed) for seed in ADAPTERS}
    alone = [case(config, tensors[None], each, num_tokens) for each in prompts]
    turns = zip(prompts, itertools.cycle(ADAPTERS), strict=False)
    adapted = [
        {"adapter": seed} | case(config, tensors[seed], each, num_tokens) for each, seed in turns
    ]
    return alone + adapted


def case(config: dict, tensors: dict, token_ids: list[int], num_tokens: int) -> dict:
    """Return one prompt's tokens, and the margin of each."""
    length, margins = len(token_ids), []
    for _ in range(num_tokens):
        logits = forward(config, tensors, token_ids)["logits"][-1]
        second, first = np.partition(logits, -2)[-2:]
        margins.append(round(float(first - second), 4))
        token_ids = [*token_ids, int(logits.argmax())]
    return {"prompt": length, "token_ids": token_ids[length:], "margins": margins}


if __name__ == "__main__":
    rows = ",\n".join(json.dumps(one) for one in cases())
    GOLDENS.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
