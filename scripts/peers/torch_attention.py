"""PyTorch's attentions on a GPU, contiguous keys and values: a JSON object of seconds on stdout.

SDPA picks FlashAttention or cuDNN by itself; FlexAttention is compiled for the shape. The median of
some chains of calls counts; each call of a decode chain reads another copy of the keys and values,
so that the cache of the chip does not help.

    python torch_attention.py '{"decode": [[64, 2048]], "prefill": [[8192, 0]], "head_dim": 128}'
"""

# pyright: reportMissingImports=false
import json
import sys

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_rows import GPU, chain_seconds

HEADS, KV_HEADS = 32, 8
CACHE_BYTES = 64 << 20


def random(*shape: int) -> torch.Tensor:
    """Random bfloat16 on the GPU."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def decode(seqs: int, context: int, head_dim: int) -> dict[str, float]:
    """One token for each sequence."""
    copies = 1 + CACHE_BYTES // (4 * seqs * context * KV_HEADS * head_dim)
    q, flex = random(seqs, HEADS, 1, head_dim), torch.compile(flex_attention)
    kv = [[random(seqs, KV_HEADS, context, head_dim) for _ in "kv"] for _ in range(copies)]
    of_sdpa = chain_seconds(GPU, lambda i: sdpa(q, *kv[i % copies], enable_gqa=True))
    of_flex = chain_seconds(GPU, lambda i: flex(q, *kv[i % copies], enable_gqa=True))
    return {"PyTorch SDPA": of_sdpa, "PyTorch FlexAttention": of_flex}


def prefill(tokens: int, head_dim: int) -> dict[str, float]:
    """One prompt, causal."""
    q, k, v = (random(1, heads, tokens, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens)
    flex, gqa = torch.compile(flex_attention), {"enable_gqa": True}
    of_flex = chain_seconds(GPU, lambda _: flex(q, k, v, block_mask=mask, **gqa))
    of_sdpa = chain_seconds(GPU, lambda _: sdpa(q, k, v, is_causal=True, **gqa))
    return {"PyTorch SDPA": of_sdpa, "PyTorch FlexAttention": of_flex}


def main() -> None:
    """Measure every shape."""
    shapes, found = json.loads(sys.argv[1]), {}
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
