"""Write `tests/data/sampling.json`: what Hugging Face transformers' processors make of logits.

Runs in an environment with torch and transformers, which the project itself never needs:

    python tests/oracle/make_sampling.py [tests/data/sampling.json]

Processors run in vLLM's order. Every case of `CASES` comes twice, the second time with logits
that are multiples of 1/4, so that ties stand at the thresholds.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB_SIZE = 48
ORDER = {  # parameter -> processor, in the order in which vLLM applies them
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "min_p": MinPLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
}
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_k": 47},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.35},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "min_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.7},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.02, "top_k": 15, "top_p": 0.95},
    {"temperature": 0.6, "repetition_penalty": 1.1, "min_p": 0.01, "top_k": 30, "top_p": 0.7},
]


def main(path: Path) -> None:
    """Write the cases to `path`."""
    rng = np.random.default_rng(20260801)
    cases = []
    for index, asked in enumerate(CASES * 2):
        logits = rng.normal(0, 2, VOCAB_SIZE).astype(np.float32)
        if index >= len(CASES):
            logits = np.round(logits * 4) / 4
        history = rng.integers(0, VOCAB_SIZE, 10).tolist()
        cases.append(run(logits, history, asked))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    path.write_text(json.dumps({"versions": versions, "cases": cases}, indent=None) + "\n")


def run(logits: np.ndarray, history: list[int], asked: dict) -> dict:
    """Apply the processors to one row."""
    ids, scores = torch.tensor([history]), torch.tensor(logits)[None]
    for name, make in ORDER.items():
        if name in asked:
            scores = make(asked[name])(ids, scores)
    probabilities = torch.softmax(scores, dim=-1)[0]
    return {
        "asked": asked | {"output": history},
        "logits": [float(x) for x in logits],
        "probabilities": [float(f"{x:.7g}") for x in probabilities.tolist()],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/sampling.json"))
