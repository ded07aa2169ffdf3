"""The one table of cases of `gpu_run.py`.

Shapes whose times are measured, and predicted by `gpu_predictions.py`; then configurations of the
kernels, and the steps in which `gpu_checks.py` holds each of them against float64.
"""

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from tune_kernels import candidates_for

from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.grouped import GroupedConfig
from pallas_kernels.measure import DecodeShape, ExpertsShape, PrefillShape, Shape
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.step_work import KernelConfig
from pallas_kernels.window import Chunk, Window

FP8, FP8_DTYPE = "float8_e4m3fn", jnp.float8_e4m3fn
ONE_HEAD: dict[str, Any] = {"heads": 8, "kv_heads": 1}  # of Llama-70B on each of 8 GPUs
_TURNS, _NO_TURNS = {"ping_pong": True}, {"ping_pong": False}
_ONE, _AFTER = PrefillShape(8192, **ONE_HEAD), PrefillShape(512, 32_768, **ONE_HEAD)
Shapes = dict[str, dict[str, tuple[Shape, dict[str, Any]]]]
SHAPES: Shapes = {
    "decode": {
        "64 x 2,048, 8 KV heads": (DecodeShape(64, 2048), {}),
        "64 x 2,048, 1 KV head": (DecodeShape(64, 2048, **ONE_HEAD), {}),
        "1 x 4,096, 1 KV head": (DecodeShape(1, 4096, **ONE_HEAD), {}),
        "1 x 32,768, 1 KV head": (DecodeShape(1, 32_768, **ONE_HEAD), {}),
        "64 x 2,048, 8 KV heads, fp8": (DecodeShape(64, 2048, dtype=FP8), {}),
        "64 x 2,048, 1 KV head, fp8": (DecodeShape(64, 2048, **ONE_HEAD, dtype=FP8), {}),
        "1 x 32,768, 1 KV head, fp8": (DecodeShape(1, 32_768, **ONE_HEAD, dtype=FP8), {}),
    },
    "prefill": {
        "8,192, 8 KV heads": (PrefillShape(8192), _TURNS),
        "8,192, 1 KV head": (_ONE, _TURNS),
        "8,192, 1 KV head, sinks": (_ONE._replace(has_sinks=True), _TURNS),
        "512 after 32,768, 1 KV head": (_AFTER, _TURNS),
        "8,192, 1 KV head, fp8": (_ONE._replace(dtype=FP8), _TURNS),
        "8,192, 8 KV heads, no ping-pong": (PrefillShape(8192), _NO_TURNS),
        "512 after 32,768, 1 KV head, no ping-pong": (_AFTER, _NO_TURNS),
    },
}
_DECODES, _CHUNK = ExpertsShape(64, unit="GB/s"), ExpertsShape(4096)
_GPT_OSS: dict[str, Any] = {"hidden": 2880, "width": 2880, "k": 4}
EXPERTS = {  # of one of 8 devices, each with an eighth of them
    "Qwen3-30B-A3B, 64 tokens": _DECODES,
    "Qwen3-30B-A3B, 64 tokens, fp8": _DECODES._replace(dtype=FP8),
    "GPT-OSS-120B, 64 tokens, fp8": _DECODES._replace(dtype=FP8, **_GPT_OSS),
    "GPT-OSS-120B, 64 tokens, mxfp4": _DECODES._replace(dtype="mxfp4", **_GPT_OSS),
    "Qwen3-30B-A3B, 64 tokens, int4": _DECODES._replace(dtype="int4"),
    "Qwen3-30B-A3B, 4,096 tokens": _CHUNK,
    "Qwen3-30B-A3B, 4,096 tokens, fp8": _CHUNK._replace(dtype=FP8),
    "GPT-OSS-120B, 4,096 tokens, mxfp4": _CHUNK._replace(dtype="mxfp4", **_GPT_OSS),
    "Mixtral 8x7B, 4,096 tokens": ExpertsShape(4096, 4096, 14_336, experts=8, own=1, k=2),
}
DRY_EXPERTS = {"dry": ExpertsShape(6, 64, 64, 4, 2, 2, FP8, "GB/s")}
_SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64}
DRY_SHAPES: Shapes = {
    "decode": {"dry, fp8": (DecodeShape(2, 64, **_SMALL, dtype=FP8), {})},
    "prefill": {"dry, fp8": (PrefillShape(32, 16, **_SMALL, dtype=FP8), {"ping_pong": False})},
}

# ---------------------------------------------------------------------- checked

Step = tuple[tuple[int, int], ...]  # (new tokens, context); the first have one new token each
Steps = tuple[tuple[str, Step], ...]
WRAPPING = 0  # a context that fills every place of all rings again, `wrapping_tokens`
STEPS: dict[str, Step] = {
    "mixed": ((1, 337), (1, 64), (17, 17), (5, 640), (130, 196)),
    "long": ((1, 1), (1, 17), (1, 64), (1, WRAPPING)),  # rings, queries' places, jobs of a row
    "chunk": ((100, 700), (150, 8200)),  # the second is put together from parts
    "edges": ((1, 15), (1, 16), (1, 17), (1, 1), (16, 32), (17, 33), (64, 64)),
    "decodes": tuple((1, n) for n in (1, 15, 16, 17, 63, 64, 65, 128, 129, 2000)),
}
SMALL: dict[str, Step] = {"mixed": ((1, 70), (1, 17), (18, 45))}
SMALL_EXPERTS, SMALL_TILES = ExpertsShape(6, 128, 128, 4, 2, 2), GroupedConfig(16, 2)


class Kernel(NamedTuple):
    """One configuration of the kernels; without `config` the safe one."""

    heads: tuple[int, int] = (8, 2)  # of queries, of keys and values
    head_dim: int = 128
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = jnp.bfloat16
    window: Window | None = None
    soft_cap: float | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    has_sinks: bool = False
    config: KernelConfig | None = None

    def described(self) -> dict[str, Any]:
        """Return what differs from the defaults, for people."""
        values = self._asdict().items()
        changed = {n: v for n, v in values if v != self._field_defaults[n]}
        return {n: v.__name__ if isinstance(v, type) else str(v) for n, v in changed.items()}


def kernels() -> list[Kernel]:
    """Return every shape and option, and every candidate of the tuning for one shape."""
    some = [Kernel((h, kv)) for h, kv in ((8, 1), (32, 8), (8, 8), (12, 4), (7, 1), (32, 1))]
    some += [Kernel(block_size=block_size) for block_size in (16, 32, 64, 128)]
    for head_dim, block_size in itertools.product((64, 256), (16, 128)):
        some.append(Kernel(head_dim=head_dim, block_size=block_size))
    fp8 = Kernel(kv_dtype=FP8_DTYPE, scales=(0.5, 2.0))
    some += [Kernel((8, 8), head_dim=96), Kernel(dtype=jnp.float16, kv_dtype=jnp.float16), fp8]
    some += [
        Kernel(window=100),
        Kernel((40, 8), window=Chunk(1000)),
        Kernel(soft_cap=30.0),
        Kernel(has_sinks=True),
    ]
    some += [fp8._replace(window=100, soft_cap=30.0, block_size=64)]
    prefill = (PrefillConfig(**one) for one in candidates_for("prefill", 128, 16))
    decode = (DecodeConfig(**one) for one in candidates_for("decode", 128, 16))
    some += [Kernel(config=KernelConfig(prefill=one)) for one in prefill]
    return some + [Kernel(config=KernelConfig(decode=one)) for one in decode]


# What an interpreter can run: few thread blocks, which it runs one by one.
SMALL_CONFIG = KernelConfig(PrefillConfig(64, 2, 2), DecodeConfig(64, 2, 45_000))
SMALL_KERNEL = Kernel((4, 2), head_dim=64, has_sinks=True, config=SMALL_CONFIG)
