"""Write `tests/data/generation.json`: what transformers makes of a generation_config.json.

    python tests/oracle/make_generation.py [tests/data/generation.json]

It runs in an environment with torch and transformers. The model is that of
`tests/data/parity/qwen3` with its first prompt. Each case has the file's fields, and

    token_ids  [12]  what `generate` gives, where the fields leave one token at each place
    first      [(token, probability)] of the first draw, where they leave several
"""
# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

DATA = Path(__file__).parents[1] / "data"
NUM_TOKENS = 12
CASES = [
    {"do_sample": False, "repetition_penalty": 1.7},
    {"do_sample": True, "top_k": 1, "repetition_penalty": 1.3},
    {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"do_sample": True, "temperature": 1.5, "top_k": 0, "min_p": 0.3},
]


def case(model, ids: torch.Tensor, given: dict) -> dict:
    """What one file's fields come to; `top_k` is 0 where a case names none, as in files."""
    fields = {"top_k": 0} | given | {"eos_token_id": None, "max_new_tokens": NUM_TOKENS}
    config = GenerationConfig(**fields)
    options = {"return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(0)
    found = model.generate(ids, generation_config=config, **options)
    drawn = found.sequences[0, ids.shape[1] :].tolist()
    first = torch.softmax(found.scores[0][0].double(), -1).numpy()
    support = np.flatnonzero(first > 0)
    told = {"file": given | {"max_new_tokens": NUM_TOKENS}, "first": None, "token_ids": None}
    if given.get("top_k") == 1 or not given["do_sample"]:
        return told | {"token_ids": drawn}
    return told | {"first": [[int(token), round(float(first[token]), 9)] for token in support]}


def main() -> None:
    """Write every case."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / "generation.json"
    folder = DATA / "parity" / "qwen3"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(np.load(folder / "expected.npz")["token_ids_0"])[None]
    model.generation_config = GenerationConfig()
    told = {
        "transformers": transformers.__version__,
        "prompt_token_ids": ids[0].tolist(),
        "cases": [case(model, ids, given) for given in CASES],
    }
    path.write_text(json.dumps(told) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
