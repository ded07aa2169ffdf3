"""Write `long.npz` beside checkpoints of latent attention: what follows prompts of some length.

As `make_parity.py`, which has made the checkpoints, in an environment with torch and transformers:

    python tests/oracle/make_long_latents.py [tests/data/parity]

For prompts i = 0, 1, the second of which begins with half of the first:

    token_ids_i      [tokens]      int16
    greedy_i         [12]          continuation, end-of-sequence ignored
    margin_i         [12]          logit of each over its runner-up, at least `LEAST_MARGIN`

What an indexer chooses is all of these contexts: `index_topk` is `MOST_TOKENS`.
"""
# pyright: reportMissingImports=false, reportArgumentType=false

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_parity import COMMON, GREEDY_TOKENS, LEAST_MARGIN

MODELS = "deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_halves", "glm_moe_dsa"
LENGTHS = (453, 301)
MOST_TOKENS = 512
SEEDS = range(20261126, 20261226)


def load(directory: Path) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(directory)
    if hasattr(config, "index_topk"):
        config.index_topk = MOST_TOKENS
    own = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **own).eval()


def greedy(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[list[int], list[float]]:
    chosen, margins = [], []
    for _ in range(GREEDY_TOKENS):
        best = model(prompt[None], use_cache=False).logits[0, -1].topk(2)
        chosen.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        prompt = torch.cat([prompt, best.indices[:1]])
    return chosen, margins


def expected(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Of the first seed with no choice that rounding could turn."""
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        first, second = (
            torch.randint(3, COMMON["vocab_size"], (length,), generator=generator)
            for length in LENGTHS
        )
        half = LENGTHS[1] // 2
        second[:half] = first[:half]
        found: dict[str, np.ndarray] = {}
        for i, prompt in enumerate((first, second)):
            chosen, margins = greedy(model, prompt)
            found[f"token_ids_{i}"] = prompt.numpy().astype(np.int16)
            found[f"greedy_{i}"] = np.array(chosen, np.int16)
            found[f"margin_{i}"] = np.array(margins, np.float32)
        if min(found["margin_0"].min(), found["margin_1"].min()) >= LEAST_MARGIN:
            return found
    raise SystemExit("every seed gives near-ties")


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/parity")
    torch.set_grad_enabled(False)
    for name in MODELS:
        found = expected(load(directory / name))
        np.savez_compressed(directory / name / "long.npz", **found)
        print(name, float(min(found["margin_0"].min(), found["margin_1"].min())))


if __name__ == "__main__":
    main()
