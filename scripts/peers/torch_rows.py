"""What PyTorch reaches on the same GPU, a JSON object a line: the baseline of `gpu_run.py`.

A copy, GEMMs of bfloat16 and of e4m3 codes (`torch._scaled_mm`, cuBLASLt), SDPA of a prompt, which
picks cuDNN or FlashAttention by itself. The median of some chains of calls counts.

    python torch_rows.py [--dry-run]      dry: tiny, on the CPU
"""

# pyright: reportMissingImports=false
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

CALLS, REPEATS = 16, 7
COPIES = 2  # of what is read, in turns, so that no cache holds it


class Sizes(NamedTuple):
    """What to measure."""

    device: str
    copy_bytes: int
    width: int  # of a square matrix
    tokens: tuple[int, ...]  # of products of codes
    prompt: int
    heads: tuple[int, int, int]  # of queries, of keys and values; their size


GPU = Sizes("cuda", 2 << 30, 8192, (16, 64, 4096), 8192, (32, 8, 128))
DRY = Sizes("cpu", 1 << 16, 64, (16,), 32, (4, 2, 64))


def chain_seconds(sizes: Sizes, call: Callable[[int], object]) -> float:
    """Median seconds of one call."""

    def chain() -> None:
        for i in range(CALLS):
            call(i)
        if sizes.device == "cuda":
            torch.cuda.synchronize()

    chain()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        chain()
        seconds.append((time.perf_counter() - start) / CALLS)
    return statistics.median(seconds)


def copy(sizes: Sizes) -> dict[str, Any]:
    """Read and write."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    seconds = chain_seconds(sizes, lambda _: target.copy_(source))
    return {"us": seconds * 1e6, "rate": 2 * sizes.copy_bytes / seconds / 1e9, "unit": "GB/s"}


def _rate(flops: int, seconds: float) -> dict[str, Any]:
    return {"us": seconds * 1e6, "rate": flops / seconds / 1e12, "unit": "TFLOP/s"}


def _random(sizes: Sizes, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=sizes.device).to(torch.bfloat16)


def gemm(sizes: Sizes) -> dict[str, Any]:
    """Multiply square matrices of bfloat16."""
    n = sizes.width
    left, right = _random(sizes, n, n), _random(sizes, n, n)
    return _rate(2 * n**3, chain_seconds(sizes, lambda _: left @ right))


def codes(sizes: Sizes, tokens: int) -> dict[str, Any]:
    """Multiply codes, with a scale for each token and each channel; quantising is not in it."""
    n, fp8 = sizes.width, torch.float8_e4m3fn
    x = _random(sizes, tokens, n).to(fp8)
    matrices = [_random(sizes, n, n).to(fp8).t() for _ in range(COPIES)]
    rows, columns = (torch.ones(size, device=sizes.device) for size in ((tokens, 1), (1, n)))

    def call(i: int) -> object:
        return torch._scaled_mm(
            x, matrices[i % COPIES], scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16
        )

    seconds = chain_seconds(sizes, call)
    return _rate(2 * tokens * n**2, seconds) | {"gb_per_second": n**2 / seconds / 1e9}


def sdpa(sizes: Sizes) -> dict[str, Any]:
    """One prompt, causal; operations as `PrefillShape` counts them."""
    heads, kv_heads, size = sizes.heads
    q, k, v = (_random(sizes, 1, n, sizes.prompt, size) for n in (heads, kv_heads, kv_heads))
    flops = 2 * heads * size * sizes.prompt * (sizes.prompt + 1)

    def call(_: int) -> object:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return _rate(flops, chain_seconds(sizes, call))


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield every row; what this version of PyTorch cannot do says so."""
    yield {"row": "versions", "torch": torch.__version__, "cuda": torch.version.cuda}
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "copy": lambda: copy(sizes),
        "GEMM": lambda: gemm(sizes),
        **{f"codes, {n:,} tokens": lambda n=n: codes(sizes, n) for n in sizes.tokens},
        f"SDPA, {sizes.prompt:,}": lambda: sdpa(sizes),
    }
    for name, call in calls.items():
        try:
            yield {"row": name} | call()
        except Exception as error:
            yield {"row": name, "unavailable": str(error).strip().splitlines()[0][:200]}


if __name__ == "__main__":
    for row in rows(DRY if "--dry-run" in sys.argv else GPU):
        print(json.dumps(row), flush=True)
