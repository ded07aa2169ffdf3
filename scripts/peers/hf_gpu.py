"""Hugging Face transformers on a GPU, with the weights of `scripts/gpu_weights.py`: JSON rows.

    python scripts/peers/hf_gpu.py hf_config.json --out hf_gpu.json

`hf_config.json` and the rows to compare with come from stage A of `scripts/gpu_run.py`, on the same
GPU: the file is in its `logs.tar.gz`. It
measures what that measures: greedy tokens; decode steps with a static cache, compiled with CUDA
graphs; prefill steps; and requests through transformers' own continuous batching. Needs torch and
transformers alone, not JAX.
"""

# pyright: reportMissingImports=false
import argparse
import json
import math
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StaticCache

CHUNK = 1 << 26  # elements of a weight that are made at a time
PREFILL_CHUNK = 32_768  # tokens of a step that fills a cache
MASK = 0xFFFFFFFF


def prompt(index: int, length: int) -> list[int]:
    """Return the token ids of a request: those of `gpu_weights.prompt`."""
    return [(7 * index + 3 * i) % 1000 for i in range(length)]


def fill(name: str, weight: torch.Tensor) -> None:
    """Give a parameter the values that `gpu_weights` describes."""
    if weight.dim() == 1:
        weight.fill_(1.0)
        return
    scale = 2.0 ** round(math.log2(weight.shape[-1] ** -0.5 / 73.9))
    flat, start = weight.view(-1), zlib.crc32(name.encode())
    for first in range(0, flat.numel(), CHUNK):
        last = min(first + CHUNK, flat.numel())
        h = torch.arange(first, last, dtype=torch.int64, device=weight.device)
        h = (h * 0x9E3779B1 + start) & MASK
        h = ((h ^ (h >> 15)) * 0x85EBCA77) & MASK  # the product may wrap: its low bits are right
        byte = ((h ^ (h >> 13)) >> 24).float()
        flat[first:last] = ((byte - 127.5) * scale).to(weight.dtype)


def load(config_file: Path, device: str) -> Any:
    """Return the model in bfloat16."""
    config = AutoConfig.for_model(**json.loads(config_file.read_text(encoding="utf-8")))
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        fill(name, weight.data)
    return model


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def median_seconds(action: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Median seconds of an action; the first is not counted."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def filled_cache(model: Any, batch: int, context: int, room: int) -> StaticCache:
    """Return a static cache of `batch` sequences of `context` tokens, with room for more."""
    cache = StaticCache(config=model.config, max_cache_len=context + room)
    tokens = torch.tensor([prompt(i, context) for i in range(batch)], device=model.device)
    each = max(1, PREFILL_CHUNK // batch)
    for chunk in tokens.split(each, dim=1):
        model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def decode_row(model: Any, batch: int, context: int, steps: int, compiles: bool) -> dict[str, Any]:
    """Time decode steps of a static cache; the token fed is always the same."""
    device = model.device.type
    cache = filled_cache(model, batch, context, 6 * steps)
    token = torch.ones((batch, 1), dtype=torch.int64, device=device)
    call = torch.compile(model, mode="reduce-overhead", fullgraph=True) if compiles else model

    def run() -> None:
        for _ in range(steps):
            call(token, past_key_values=cache, use_cache=True)

    seconds = median_seconds(run, device) / steps
    return {"part": "decode step", "batch": batch, "context": context, "device_seconds": seconds}


def prefill_row(model: Any, length: int) -> dict[str, Any]:
    """Time one prompt in one step."""
    tokens = torch.tensor([prompt(0, length)], device=model.device)

    def run() -> None:
        model(tokens, use_cache=True, logits_to_keep=1)

    seconds = median_seconds(run, model.device.type)
    rate = {"tokens_per_second": length / seconds}
    return {"part": "prefill step", "tokens": length, "device_seconds": seconds} | rate


def greedy_row(model: Any, num_tokens: int = 16) -> dict[str, Any]:
    """Return what one prompt becomes."""
    tokens = torch.tensor([prompt(0, 32)], device=model.device)
    options = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": -1}
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return {"part": "greedy", "token_ids": out[0, tokens.shape[1] :].tolist()}


def serve_row(model: Any, count: int, before: int, after: int) -> dict[str, Any]:
    """Serve requests that are all there at once through continuous batching."""
    options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    config = GenerationConfig(max_new_tokens=after, **options)
    prompts = [prompt(i, before) for i in range(count)]
    model.generate_batch(prompts[:2], generation_config=config)
    synchronize(model.device.type)
    start = time.perf_counter()
    outputs = model.generate_batch(prompts, generation_config=config)
    seconds = time.perf_counter() - start
    made = sum(len(one.generated_tokens) for one in outputs.values())
    assert made == count * after, f"{made} tokens were generated, not {count} x {after}"
    what = {"part": "serve", "requests": count, "prompt": before, "output": after}
    return what | {"seconds": seconds, "output_tokens_per_second": made / seconds}


@torch.no_grad()
def rows_of(model: Any, sizes: dict[str, Any], compiles: bool) -> Iterator[dict[str, Any]]:
    """Yield every row, quick ones first."""
    yield greedy_row(model)
    for length in sizes["prompts"]:
        yield prefill_row(model, length)
    for batch in sizes["batches"]:
        yield decode_row(model, batch, sizes["context"], sizes["steps"], compiles)
    yield serve_row(model, *sizes["serve"])


def main() -> int:
    """Measure everything; rows are on disk as they come."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, help="hf_config.json of scripts/gpu_run.py")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="do not compile the decode step")
    sizes = {"batches": [1, 8, 64, 256], "prompts": [2048, 8192], "serve": [64, 512, 128]}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    model = load(arguments.config, arguments.device)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    rows = [{"part": "environment", "torch": torch.__version__, "device": device}]
    for row in rows_of(model, vars(arguments), not arguments.eager):
        rows.append(row)
        print(json.dumps(row), flush=True)
        arguments.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
