"""Write `tests/data/lora`: adapters of the tiny models of `tests/data/parity`, and what PEFT says.

It runs in an environment with torch, transformers and peft, which the project never needs:

    python tests/oracle/make_lora.py [NAME ...]

An adapter changes every matrix that PEFT can change, but for routers, experts and the latents'
projection `kv_b_proj`, with factors drawn at random, so large that other tokens are said. Ranks,
scales and `use_rslora` differ by model. Each folder holds what `save_pretrained` writes, and
`expected.npz`, for the prompts i of the model's `parity` folder:

    greedy_i     [12]   tokens with the adapter, end-of-sequence ignored
    logprobs_i   [12]   of these
    plain_i      [12]   tokens without it
"""
# pyright: reportMissingImports=false, reportArgumentType=false

import json
import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from transformers.utils import logging

PARITY = Path(__file__).parent.parent / "data" / "parity"
OUT = Path(__file__).parent.parent / "data" / "lora"
GREEDY_TOKENS = 12
LEAST_MARGIN = 2e-3
NAMES = ("qkv_proj", "gate_up_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
NAMES += tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
LEFT_OUT = ("versions.json", "gpt_oss_mxfp4", "llama4_chunks_128e", "llama4_chunks")


def main(names: list[str]) -> None:
    logging.set_verbosity_error()
    torch.set_default_dtype(torch.float32)
    found = sorted(path.name for path in PARITY.iterdir() if path.name not in LEFT_OUT)
    for number, name in enumerate(found):
        if not names or name in names:
            make(name, number)
    versions = {"peft": peft.__version__, "transformers": transformers.__version__}
    (OUT / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


def make(name: str, number: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        PARITY / name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    targets = [
        module
        for module, part in model.named_modules()
        if isinstance(part, torch.nn.Linear)
        and module.rpartition(".")[2] in NAMES
        and ".experts." not in module
    ]
    expected = np.load(PARITY / name / "expected.npz")
    prompts = [expected[f"token_ids_{i}"] for i in (0, 1)]
    plain = [greedy(model, prompt)[0] for prompt in prompts]
    for attempt in range(40):
        torch.manual_seed(1000 * number + attempt)
        rank = (2, 3, 4)[number % 3]
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=(4, 3)[number % 2],
            use_rslora=number % 4 == 1,
            target_modules=targets,
            bias="none",
        )
        adapted = peft.get_peft_model(model, config)
        for key, values in adapted.named_parameters():
            if ".lora_" in key:
                size = values.shape[1] ** -0.5 if ".lora_A" in key else 0.25
                values.data = size * torch.randn_like(values)
        found = [greedy(adapted, prompt) for prompt in prompts]
        margin = min(each[2] for each in found)
        differs = any(not np.array_equal(one[0], p) for one, p in zip(found, plain, strict=True))
        if margin > LEAST_MARGIN and differs:
            break
        model = adapted.unload()
    else:
        print(f"{name}: every adapter gives near-ties; nothing is written")
        return
    folder = OUT / name
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": name, "target_modules": sorted(config["target_modules"])}
    text = json.dumps(config, indent=1, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n")
    data = {}
    for i, (tokens, logprobs, _) in enumerate(found):
        data |= {f"greedy_{i}": tokens, f"logprobs_{i}": logprobs, f"plain_{i}": plain[i]}
    np.savez_compressed(folder / "expected.npz", **data)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: {len(targets)} matrices of rank {rank}, margin {margin:.4f}, {size} bytes")


@torch.no_grad()
def greedy(model, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Tokens, their log-probabilities, and the least margin of a choice."""
    ids, tokens, logprobs, margins = list(map(int, prompt)), [], [], []
    for _ in range(GREEDY_TOKENS):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = torch.topk(logits, 2).values
        margins.append(float(best[0] - best[1]))
        token = int(logits.argmax())
        logprobs.append(float(torch.log_softmax(logits.double(), -1)[token]))
        tokens.append(token)
        ids.append(token)
    return np.array(tokens), np.array(logprobs), min(margins)


if __name__ == "__main__":
    main(sys.argv[1:])
