"""PyTorch's attentions on a GPU, contiguous keys and values: a JSON object of seconds on stdout.

SDPA picks FlashAttention or cuDNN by itself; FlexAttention is compiled for the shape. CUDA events
time a chain of calls, whose median over several chains counts; each call of a decode chain reads
another copy of the keys and values, so that the cache of the chip does not help.

    python torch_attention.py '{"decode": [[64, 2048]], "prefill": [[8192, 0]], "head_dim": 128}'
"""

# pyright: reportMissingImports=false
import json
import statistics
import sys
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS = 32, 8
CACHE_BYTES = 64 << 20
CALLS, REPEATS = 16, 7


def chain_seconds(call: Callable[[int], object]) -> float:
    """Median seconds of one call."""
    for i in range(3):
        call(i)
    seconds = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(CALLS):
            call(i)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(seconds)


def random(*shape: int) -> torch.Tensor:
    """Random bfloat16 on the GPU."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def decode(seqs: int, context: int, head_dim: int) -> dict[str, float]:
    """One token for each sequence."""
    num_bytes = 4 * seqs * context * KV_HEADS * head_dim
    copies = 1 + CACHE_BYTES // num_bytes
    q = random(seqs, HEADS, 1, head_dim)
    kv = [[random(seqs, KV_HEADS, context, head_dim) for _ in "kv"] for _ in range(copies)]
    flex = torch.compile(flex_attention)
    return {
        "PyTorch SDPA": chain_seconds(
            lambda i: scaled_dot_product_attention(q, *kv[i % copies], enable_gqa=True)
        ),
        "PyTorch FlexAttention": chain_seconds(lambda i: flex(q, *kv[i % copies], enable_gqa=True)),
    }


def prefill(tokens: int, head_dim: int) -> dict[str, float]:
    """One prompt, causal."""
    q, k, v = (random(1, heads, tokens, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens)
    flex = torch.compile(flex_attention)
    return {
        "PyTorch SDPA": chain_seconds(
            lambda _: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        ),
        "PyTorch FlexAttention": chain_seconds(
            lambda _: flex(q, k, v, block_mask=mask, enable_gqa=True)
        ),
    }


def main() -> None:
    """Measure every shape."""
    shapes = json.loads(sys.argv[1])
    found = {}
    for seqs, context in shapes["decode"]:
        key = json.dumps(["DecodeShape", seqs, context])
        found[key] = decode(seqs, context, shapes["head_dim"])
    for tokens, context in shapes["prefill"]:
        if context == 0:
            key = json.dumps(["PrefillShape", tokens, context])
            found[key] = prefill(tokens, shapes["head_dim"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
