"""Hugging Face transformers on CPU, bfloat16: static batches, greedy.

Equal requests run as one batch. Unequal ones are sorted by how many tokens they will generate,
which only a benchmark can know and wastes the fewest steps, and padded on the left in batches of
`--batch`. Its own continuous batching (`init_continuous_batching`, 5.23) works on CPU, but took 73
CPU seconds for 64 mixed requests where batches of 8 and 16 took 49, 32 took 67 and 64 took 93.

    python scripts/peers/transformers_worker.py MODEL_DIRECTORY [--batch 16] [--threads 2]
"""

# pyright: reportMissingImports=false
import argparse
import functools

import torch
import transformers
from protocol import Generate, main


def pad_left(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `token_ids[requests, tokens]` and the mask of its real tokens."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(padded), torch.tensor(mask)


def generate_batch(model, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Generate `num_tokens` for every prompt of one static batch."""
    token_ids, mask = pad_left(prompts)
    equal = bool(mask.all())  # no padding: let the model choose its causal fast path
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    tokens, fed, options = [], token_ids, {"use_cache": True, "logits_to_keep": 1}
    for _ in range(num_tokens):
        attended = None if equal else mask
        output = model(fed, attention_mask=attended, position_ids=positions, **options)
        tokens.append(output.logits[:, -1].argmax(-1))
        fed, positions = tokens[-1][:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        options["past_key_values"] = output.past_key_values
    return torch.stack(tokens, dim=1).tolist()


@torch.inference_mode()
def generate(model, batch: int, prompts: list[list[int]], max_tokens: list[int]) -> dict:
    """Run all requests in static batches: one if they are alike, else of up to `batch`."""
    if len(set(map(len, prompts))) == len(set(max_tokens)) == 1:
        return {"token_ids": generate_batch(model, prompts, max_tokens[0])}
    order = sorted(range(len(prompts)), key=lambda i: (max_tokens[i], len(prompts[i])))
    outputs: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), batch):
        members = order[first : first + batch]
        longest = max(max_tokens[i] for i in members)
        rows = generate_batch(model, [prompts[i] for i in members], longest)
        for i, row in zip(members, rows, strict=True):
            outputs[i] = row[: max_tokens[i]]
    return {"token_ids": outputs}


OPTIONS = {"--batch": (16, "unequal requests in one batch"), "--threads": (2, "of torch")}
OPTIONS |= {"--dtype": ("bfloat16", "of weights"), "--adapter": ("", "one of PEFT's, not merged")}


def start(args: argparse.Namespace) -> tuple[dict, Generate]:
    """Load the model."""
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    if args.adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, args.adapter)
    versions = {"version": transformers.__version__, "torch": torch.__version__}
    engine = functools.partial(generate, model.eval(), args.batch)
    return {"engine": "transformers"} | versions, engine


if __name__ == "__main__":
    main(__doc__, OPTIONS, start)
