"""Write `benchmarks/gpu_goldens.json`: greedy tokens of a small model with hashed weights.

    PYTHONPATH=.:tests:scripts python tests/oracle/make_gpu_goldens.py

By the decoder of `numpy_llama.py` in float64, from weights made here from their description in
`scripts/gpu_weights.py`.
"""

import json
import zlib

import numpy as np
from gpu_goldens import GOLDENS, MODEL, NUM_TOKENS, PROMPTS
from gpu_weights import prompt

from oracle.numpy_llama import forward, tensor_shapes
from shiftjax.weights.hf_config import to_json

MASK = 0xFFFFFFFF


def hashed(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of a checkpoint."""
    if len(shape) == 1:
        return np.ones(shape)
    h = (np.arange(np.prod(shape), dtype=np.uint64) * 0x9E3779B1 + zlib.crc32(name.encode())) & MASK
    h = ((h ^ (h >> 15)) * 0x85EBCA77) & MASK
    byte = (h ^ (h >> 13)) >> 24
    return ((byte - 127.5) * 2.0 ** round(np.log2(shape[-1] ** -0.5 / 73.9))).reshape(shape)


def cases(lengths: tuple[int, ...] = PROMPTS, num_tokens: int = NUM_TOKENS) -> list[dict]:
    """Return prompts with what becomes of them."""
    config = to_json(MODEL, "float32")
    tensors = {name: hashed(name, shape) for name, shape in tensor_shapes(config).items()}
    return [
        case(config, tensors, prompt(i, length), num_tokens) for i, length in enumerate(lengths)
    ]


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
