"""Published architectures by name: shapes for planning, measuring and random weights. No JAX."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shiftjax.arch.config import (
    Codes,
    Encoder,
    Experts,
    LayerKind,
    ModelConfig,
    QueryGrowth,
    RopeScaling,
)
from shiftjax.arch.latent import Latent
from shiftjax.arch.traits import traits_of

_COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def preset(name: str, family: Mapping[str, Any], *sizes: int, **more: Any) -> ModelConfig:
    """A model of a family: hidden, intermediate, layers, heads, KV heads, head_dim, and more."""
    shape = dict(zip(_COLUMNS, sizes, strict=True))
    fields = {"name": name, **family, **shape, **more}
    return ModelConfig(**{**traits_of(fields["architecture"]), **fields})


# What the models of a family have in common.
_TINY = {
    "architecture": "llama",
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_ids": (1,),
}
_TINY_BERT = {
    "architecture": "bert",
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "encoder": Encoder(),
}
_MINILM = _TINY_BERT | {"vocab_size": 30_522, "max_position_embeddings": 512}
_SMOLLM2 = {
    "architecture": "llama",
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}
_MISTRAL = {
    "architecture": "mistral",
    "vocab_size": 32_768,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}
_LLAMA3 = {  # 3.1 and later
    "architecture": "llama",
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    "bos_token_id": 128_000,
    "eos_token_ids": (128_001, 128_008, 128_009),
}
_QWEN = {
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 151_643,
    "eos_token_ids": (151_645, 151_643),
}
_QWEN2 = _QWEN | {
    "architecture": "qwen2",
    "max_position_embeddings": 32_768,
    "attention_bias": True,
}
_QWEN2_MOE = _QWEN2 | {"architecture": "qwen2_moe", "max_position_embeddings": 8192}
_QWEN3 = _QWEN | {"architecture": "qwen3", "max_position_embeddings": 40_960}
_QWEN3_MOE = _QWEN3 | {"architecture": "qwen3_moe"}
_MIXTRAL = _MISTRAL | {"architecture": "mixtral", "vocab_size": 32_000}
_GEMMA3 = {
    "architecture": "gemma3_text",
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_ids": (1, 106),
}
_GEMMA4 = {
    "architecture": "gemma4_text",
    "vocab_size": 262_144,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "logit_soft_cap": 30.0,
    "bos_token_id": 2,
    "eos_token_ids": (1, 106),
}
_PHI4 = {
    "architecture": "phi3",
    "vocab_size": 100_352,
    "max_position_embeddings": 16_384,
    "rope_theta": 250_000.0,
    "bos_token_id": 100_257,
    "eos_token_ids": (100_265,),
}
_GLM4 = {
    "architecture": "glm4",
    "vocab_size": 151_552,
    "max_position_embeddings": 32_768,
    "attention_bias": True,
    "rotary_dim": 64,
    "eos_token_ids": (151_329, 151_336, 151_338),
}
_GLM45 = {
    **_GLM4,
    "architecture": "glm4_moe",
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
}
_SIGMOIDS = {"scores": "sigmoid", "has_correction": True}
_DEEPSEEK = {
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_interleaved": True,
    "rotary_dim": 64,
}
# Square blocks, as they are published; heads are 192 wide.
_FP8_BLOCKS = {"codes": Codes(rows_of_scale=64)}
_DEEPSEEK_YARN = RopeScaling("yarn", 40.0, 1.0, 32.0, 4096)
_DEEPSEEK2 = _DEEPSEEK | {
    "architecture": "deepseek_v2",
    "vocab_size": 102_400,
    "rope_scaling": _DEEPSEEK_YARN,
    "bos_token_id": 100_000,
    "eos_token_ids": (100_001,),
}
_DEEPSEEK3 = _DEEPSEEK | {
    "architecture": "deepseek_v3",
    "vocab_size": 129_280,
    "rope_scaling": _DEEPSEEK_YARN,
    "latent": Latent(512, 64, 128, 128, 1536, mscale=1.0),
    "bos_token_id": 0,
    "eos_token_ids": (1,),
}
_KIMI2 = _DEEPSEEK3 | {
    "architecture": "kimi_k2",
    "vocab_size": 163_840,
    "max_position_embeddings": 131_072,
    "rope_theta": 50_000.0,
    "rope_scaling": RopeScaling("yarn", 32.0, 1.0, 1.0, 4096),
    "bos_token_id": 163_584,
    "eos_token_ids": (163_585, 163_586),
}
_OLMO2 = {
    "architecture": "olmo2",
    "vocab_size": 100_352,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "bos_token_id": 100_257,
    "eos_token_ids": (100_257,),
}
_OLMOE = {
    "architecture": "olmoe",
    "vocab_size": 50_304,
    "max_position_embeddings": 4096,
    "eos_token_ids": (50_279,),
}
_GPT_OSS = {
    "architecture": "gpt_oss",
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "attention_bias": True,
    "output_bias": True,
    "eos_token_ids": (200_002,),
}


def _llama4(
    chunk: int, experts: Experts, growth: QueryGrowth, scaling: RopeScaling | None = None
) -> dict[str, Any]:
    """Three layers whose contexts are cut into chunks and then one that has no positions."""
    near, far = LayerKind(None, 500_000.0, scaling, chunk=chunk), LayerKind(has_rope=False)
    own = {"architecture": "llama4_text", "experts": experts, "query_growth": growth}
    return own | {"layer_kinds": (near,) * 3 + (far,)}


def _gpt_oss(window: int, theta: float, scaling: RopeScaling, experts: Experts) -> dict[str, Any]:
    """Layers with a window and without one take turns."""
    kinds = LayerKind(window, theta, scaling), LayerKind(None, theta, scaling)
    return {"layer_kinds": kinds, "experts": experts}


def _gemma3_kinds(window: int, scaling: RopeScaling | None = None) -> dict[str, Any]:
    """Five layers with a window and then one without, whose positions turn more slowly."""
    kinds = LayerKind(window, 10_000.0), LayerKind(None, 1_000_000.0, scaling)
    return {"layer_kinds": (kinds[0],) * 5 + kinds[1:]}


def _gemma4_kinds(window: int, far: tuple[int, int], *, near: int = 5, **more: Any) -> dict:
    """So many layers with a window and then one without, whose heads are fewer and wider."""
    scaling = RopeScaling("proportional", 1.0, part=0.25)
    full = LayerKind(None, 1_000_000.0, scaling, heads=far, **more)
    return {"layer_kinds": (LayerKind(window, 10_000.0),) * near + (full,)}


_OF_LLAMA4 = {"scores": "sigmoid", "scales_input": True, "norm_topk": False}
_LLAMA4 = {
    "vocab_size": 202_048,
    "bos_token_id": 200_000,
    "eos_token_ids": (200_001, 200_007, 200_008),
}
_LLAMA4_GROWTH = QueryGrowth(0.1, 8192, first=1, in_rotary=False)
_LLAMA4_SCOUT = _llama4(
    *(8192, Experts(16, 1, 8192, 8192, **_OF_LLAMA4), _LLAMA4_GROWTH),
    RopeScaling("llama3", 16.0, 1.0, 1.0, 8192),
)
_LLAMA4_SCOUT |= {"qk_unit_norm": True, "max_position_embeddings": 10_485_760}
_EVERY_OTHER = tuple(range(0, 48, 2))
_LLAMA4_MAVERICK = _llama4(
    *(8192, Experts(128, 1, 8192, 8192, dense_layers=_EVERY_OTHER, **_OF_LLAMA4), _LLAMA4_GROWTH)
)
_LLAMA4_MAVERICK |= {"max_position_embeddings": 1_048_576}
_TINY_LLAMA4 = _llama4(
    *(32, Experts(8, 1, 32, 32, dense_layers=(0,), **_OF_LLAMA4)),
    QueryGrowth(0.1, 64, first=1, in_rotary=False),
)
_TINY_LLAMA4 |= {"qk_unit_norm": True}
_LESS = {"rope_scaling": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)}
_TIED = {"tie_word_embeddings": True}

_GEMMA3_1B = _gemma3_kinds(512) | {"vocab_size": 262_144, "max_position_embeddings": 32_768}
_GEMMA4_31B = _gemma4_kinds(1024, (4, 512), keys_are_values=True)
_GEMMA4_26B = _gemma4_kinds(1024, (2, 512), keys_are_values=True)
_GEMMA4_26B |= {"experts": Experts(128, 8, 704, beside_mlp=True)}
_SMALL_GEMMA4 = {"layer_input_width": 256, "max_position_embeddings": 131_072}
_GEMMA4_E2B = _SMALL_GEMMA4 | _gemma4_kinds(512, (1, 512), near=4)
_GEMMA4_E2B |= {"num_shared_kv_layers": 20, "has_wide_sharers": True}
_GEMMA4_E4B = _SMALL_GEMMA4 | _gemma4_kinds(512, (2, 512)) | {"num_shared_kv_layers": 18}
_GEMMA3_27B = _gemma3_kinds(1024, RopeScaling("linear", 8.0)) | {"query_scale": 168**-0.5}
_GPT_OSS_YARN = RopeScaling(
    "yarn", 32.0, 1.0, 32.0, 4096, attention_factor=0.1 * math.log(32) + 1, truncate=False
)
_MXFP4 = {"codes": Codes(format="mxfp4", group=32)}  # of the experts, as they are published
_GPT_OSS_20B = _gpt_oss(128, 150_000.0, _GPT_OSS_YARN, Experts(32, 4, 2880, has_bias=True))
_GPT_OSS_120B = _gpt_oss(128, 150_000.0, _GPT_OSS_YARN, Experts(128, 4, 2880, has_bias=True))
_TINY_YARN = RopeScaling("yarn", 4.0, 1.0, 8.0, 64, attention_factor=1.1, truncate=False)
_TINY_GPT_OSS = {
    "architecture": "gpt_oss",
    "attention_bias": True,
    "output_bias": True,
    **_gpt_oss(16, 10_000.0, _TINY_YARN, Experts(8, 2, 32, has_bias=True)),
}
_TINY_GEMMA3 = {"architecture": "gemma3_text", "tie_word_embeddings": True} | _gemma3_kinds(16)
_TINY_GLM4 = {"architecture": "glm4", "attention_bias": True, "rotary_dim": 4}
_TINY_GLM45 = _TINY_GLM4 | {
    "architecture": "glm4_moe",
    "qk_norm": True,
    "experts": Experts(
        *(8, 2, 32, 64),
        dense_layers=(0,),
        num_groups=4,
        groups_per_token=2,
        scale=1.5,
        **_SIGMOIDS,
    ),
}
_TINY_DEEPSEEK3 = _TINY_GLM45 | {
    "architecture": "deepseek_v3",
    "attention_bias": False,
    "qk_norm": False,
    "rope_interleaved": True,
    "rotary_dim": 8,
    "latent": Latent(24, 8, 8, 8, 16),
}

_PRESETS = (
    preset("tiny", _TINY, 64, 128, 2, 8, 4, 8),
    preset("tiny-qwen2", _TINY, 64, 128, 2, 8, 4, 8, architecture="qwen2", attention_bias=True),
    preset("tiny-qwen3", _TINY, 64, 128, 2, 8, 4, 16, architecture="qwen3"),
    preset("tiny-mistral", _TINY, 64, 128, 2, 8, 4, 8, architecture="mistral", sliding_window=32),
    preset(
        *("tiny-qwen3-moe", _TINY, 64, 128, 2, 8, 4, 16),
        architecture="qwen3_moe",
        experts=Experts(num=16, per_token=4, intermediate_size=32),
    ),
    preset(
        *("tiny-mixtral", _TINY, 64, 128, 2, 8, 4, 8),
        architecture="mixtral",
        experts=Experts(num=8, per_token=2, intermediate_size=128),
    ),
    preset(
        *("tiny-qwen2-moe", _TINY, 64, 128, 2, 8, 4, 8),
        architecture="qwen2_moe",
        attention_bias=True,
        experts=Experts(8, 2, 32, 48, has_shared_gate=True, norm_topk=False),
    ),
    preset(
        "tiny-olmoe", _TINY, 64, 32, 2, 8, 4, 8, architecture="olmoe", experts=Experts(8, 2, 32)
    ),
    preset("tiny-glm4-moe", _TINY, 64, 128, 2, 8, 4, 8, **_TINY_GLM45),
    preset("tiny-deepseek-v3", _TINY, 64, 128, 2, 8, 1, 32, **_TINY_DEEPSEEK3),
    preset("tiny-llama4", _TINY, 64, 128, 4, 8, 4, 8, **_TINY_LLAMA4),
    preset("tiny-gemma3", _TINY, 64, 128, 6, 8, 4, 8, **_TINY_GEMMA3),
    preset("tiny-olmo2", _TINY, 64, 128, 2, 8, 4, 8, architecture="olmo2"),
    preset("tiny-phi3", _TINY, 64, 128, 2, 8, 4, 8, architecture="phi3"),
    preset("tiny-glm4", _TINY, 64, 128, 2, 8, 4, 8, **_TINY_GLM4),
    preset("tiny-gpt-oss", _TINY, 64, 32, 2, 8, 4, 8, **_TINY_GPT_OSS),
    preset("tiny-bert", _TINY_BERT, 64, 128, 2, 4, 4, 16),
    preset("minilm-l6", _MINILM, 384, 1536, 6, 12, 12, 32),
    preset("smollm2-135m", _SMOLLM2, 576, 1536, 30, 9, 3, 64, **_TIED),
    preset("llama-3.2-1b", _LLAMA3, 2048, 8192, 16, 32, 8, 64, **_LESS, **_TIED),
    preset("llama-3.1-8b", _LLAMA3, 4096, 14_336, 32, 32, 8, 128),
    preset("llama-3.3-70b", _LLAMA3, 8192, 28_672, 80, 64, 8, 128),
    preset("llama-3.1-405b", _LLAMA3, 16_384, 53_248, 126, 128, 8, 128),
    preset("mistral-7b-v0.3", _MISTRAL, 4096, 14_336, 32, 32, 8, 128),
    preset("qwen2.5-0.5b", _QWEN2, 896, 4864, 24, 14, 2, 64, **_TIED),
    preset("qwen2.5-32b", _QWEN2, 5120, 27_648, 64, 40, 8, 128, vocab_size=152_064),
    preset("qwen3-0.6b", _QWEN3, 1024, 3072, 28, 16, 8, 128, **_TIED),
    preset("qwen3-8b", _QWEN3, 4096, 12_288, 36, 32, 8, 128),
    preset("qwen3-32b", _QWEN3, 5120, 25_600, 64, 64, 8, 128),
    preset(
        *("qwen3-30b-a3b", _QWEN3_MOE, 2048, 6144, 48, 32, 4, 128),
        experts=Experts(num=128, per_token=8, intermediate_size=768),
    ),
    preset(
        *("qwen3-235b-a22b", _QWEN3_MOE, 4096, 12_288, 94, 64, 4, 128),
        experts=Experts(num=128, per_token=8, intermediate_size=1536),
    ),
    preset(
        *("mixtral-8x7b", _MIXTRAL, 4096, 14_336, 32, 32, 8, 128),
        experts=Experts(num=8, per_token=2, intermediate_size=14_336),
    ),
    preset(
        *("olmoe-1b-7b", _OLMOE, 2048, 1024, 16, 16, 16, 128),
        experts=Experts(num=64, per_token=8, intermediate_size=1024, norm_topk=False),
    ),
    preset(
        *("qwen1.5-moe-a2.7b", _QWEN2_MOE, 2048, 5632, 24, 16, 16, 128),
        experts=Experts(60, 4, 1408, 5632, has_shared_gate=True, norm_topk=False),
    ),
    preset(
        *("glm-4.5-air", _GLM45, 4096, 10_944, 46, 96, 8, 128),
        experts=Experts(128, 8, 1408, 1408, dense_layers=(0,), **_SIGMOIDS),
    ),
    preset(
        *("glm-4.6", _GLM45, 5120, 12_288, 92, 96, 8, 128),
        **{"qk_norm": True, "max_position_embeddings": 202_752},
        experts=Experts(160, 8, 1536, 1536, dense_layers=(0, 1, 2), scale=2.5, **_SIGMOIDS),
    ),
    preset(
        *("deepseek-v2-lite", _DEEPSEEK2, 2048, 10_944, 27, 16, 1, 576),
        latent=Latent(512, 64, 128, 128, mscale=0.707),
        experts=Experts(64, 6, 1408, 2816, norm_topk=False, dense_layers=(0,)),
    ),
    preset(
        *("deepseek-v2", _DEEPSEEK2, 5120, 12_288, 60, 128, 1, 576),
        latent=Latent(512, 64, 128, 128, 1536, mscale=0.707),
        experts=Experts(
            *(160, 6, 1536, 3072),
            norm_topk=False,
            dense_layers=(0,),
            num_groups=8,
            groups_per_token=3,
            scale=16.0,
        ),
    ),
    preset(
        *("deepseek-v3", _DEEPSEEK3, 7168, 18_432, 61, 128, 1, 576),
        experts=Experts(
            *(256, 8, 2048, 2048),
            dense_layers=(0, 1, 2),
            num_groups=8,
            groups_per_token=4,
            scale=2.5,
            **_SIGMOIDS,
        ),
        **_FP8_BLOCKS,
    ),
    preset(
        *("kimi-k2", _KIMI2, 7168, 18_432, 61, 64, 1, 576),
        experts=Experts(384, 8, 2048, 2048, dense_layers=(0,), scale=2.827, **_SIGMOIDS),
        **_FP8_BLOCKS,
    ),
    preset("gemma-3-1b", _GEMMA3, 1152, 6912, 26, 4, 1, 256, **_GEMMA3_1B),
    preset("gemma-3-27b", _GEMMA3, 5376, 21_504, 62, 32, 16, 128, **_GEMMA3_27B),
    preset("gemma-4-e2b", _GEMMA4, 1536, 6144, 35, 8, 1, 256, **_GEMMA4_E2B),
    preset("gemma-4-e4b", _GEMMA4, 2560, 10_240, 42, 8, 2, 256, **_GEMMA4_E4B),
    preset("gemma-4-31b", _GEMMA4, 5376, 21_504, 60, 32, 16, 256, **_GEMMA4_31B),
    preset("gemma-4-26b-a4b", _GEMMA4, 2816, 2112, 30, 16, 8, 256, **_GEMMA4_26B),
    preset("phi-4", _PHI4, 5120, 17_920, 40, 40, 10, 128),
    preset("glm-4-9b", _GLM4, 4096, 13_696, 40, 32, 2, 128),
    preset("gpt-oss-20b", _GPT_OSS, 2880, 2880, 24, 64, 8, 64, **_GPT_OSS_20B, **_MXFP4),
    preset("gpt-oss-120b", _GPT_OSS, 2880, 2880, 36, 64, 8, 64, **_GPT_OSS_120B, **_MXFP4),
    preset("llama-4-scout", _LLAMA4, 5120, 16_384, 48, 40, 8, 128, **_LLAMA4_SCOUT),
    preset("llama-4-maverick", _LLAMA4, 5120, 16_384, 48, 40, 8, 128, **_LLAMA4_MAVERICK),
    preset("olmo-2-7b", _OLMO2, 4096, 11_008, 32, 32, 32, 128),
)

_SHORT_NAMES = {
    "llama-1b": "llama-3.2-1b",
    "llama-8b": "llama-3.1-8b",
    "llama-70b": "llama-3.3-70b",
    "llama-405b": "llama-3.1-405b",
    "mistral-7b": "mistral-7b-v0.3",
    "llama-17b-16e": "llama-4-scout",
    "qwen-32b": "qwen3-32b",
    "qwen-30b-a3b": "qwen3-30b-a3b",
}

_BY_NAME = {config.name: config for config in _PRESETS}

PRESETS = MappingProxyType(
    _BY_NAME | {short: _BY_NAME[name] for short, name in _SHORT_NAMES.items()}
)
"""Architecture by name; the shapes are those of the published `config.json` files."""
