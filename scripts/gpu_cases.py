"""The shapes whose times `gpu_run.py` measures and `gpu_predictions.py` predicts."""

from typing import Any

from pallas_kernels.measure import DecodeShape, ExpertsShape, PrefillShape, Shape

FP8 = "float8_e4m3fn"
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
EXPERTS = {  # of one of 8 devices, each with an eighth of them
    "Qwen3-30B-A3B, 64 tokens": _DECODES,
    "Qwen3-30B-A3B, 64 tokens, fp8": _DECODES._replace(dtype=FP8),
    "GPT-OSS-120B, 64 tokens, fp8": _DECODES._replace(dtype=FP8, hidden=2880, width=2880, k=4),
    "Qwen3-30B-A3B, 4,096 tokens": _CHUNK,
    "Qwen3-30B-A3B, 4,096 tokens, fp8": _CHUNK._replace(dtype=FP8),
    "Mixtral 8x7B, 4,096 tokens": ExpertsShape(4096, 4096, 14_336, experts=8, own=1, k=2),
}
DRY_EXPERTS = {"dry": ExpertsShape(6, 64, 64, 4, 2, 2, FP8, "GB/s")}
_SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64}
DRY_SHAPES: Shapes = {
    "decode": {"dry, fp8": (DecodeShape(2, 64, **_SMALL, dtype=FP8), {})},
    "prefill": {"dry, fp8": (PrefillShape(32, 16, **_SMALL, dtype=FP8), {"ping_pong": False})},
}
