"""The decoders: their names, and what all models of each have and no file says. No JAX."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702  # of the activation clamped_swiglu (gpt-oss)
_GEMMA = {
    "norm_offset": True,
    "norm_in_float32": True,
    "activation": "gelu_tanh",
    "scaled_embedding": True,
}
_GEMMA4 = {
    "norm_in_float32": True,
    "activation": "gelu_tanh",
    "scaled_embedding": True,
    "qk_norm": True,
    "value_unit_norm": True,
    "layer_scalars": True,
    "query_scale": 1.0,
}
_OLMO = {"qk_norm": True, "wide_qk_norm": True}
_COHERE = {
    "norm_centred": True,
    "norm_in_float32": True,
    "parallel_block": True,
    "rope_interleaved": True,
}
_GPT_OSS = {"norm_in_float32": True, "attention_sinks": True, "activation": "clamped_swiglu"}


class Decoder(NamedTuple):
    """An architecture that the forward pass `models/llama.py` computes."""

    model_class: str  # as transformers calls it
    traits: Mapping[str, Any] = MappingProxyType({})  # fields of `ModelConfig`


DECODERS: dict[str, Decoder] = dict(
    {
        "llama": Decoder("LlamaForCausalLM"),
        "llama_swiftkv": Decoder("LlamaSwiftKVForCausalLM"),
        "mistral": Decoder("MistralForCausalLM"),
        "ministral3": Decoder("Ministral3ForCausalLM"),
        "qwen2": Decoder("Qwen2ForCausalLM"),
        "qwen3": Decoder("Qwen3ForCausalLM", {"qk_norm": True}),
        "qwen2_moe": Decoder("Qwen2MoeForCausalLM"),
        "qwen3_moe": Decoder("Qwen3MoeForCausalLM", {"qk_norm": True}),
        "mixtral": Decoder("MixtralForCausalLM"),
        "gemma2": Decoder("Gemma2ForCausalLM", _GEMMA),
        "gemma3_text": Decoder("Gemma3ForCausalLM", _GEMMA | {"qk_norm": True}),
        "gemma4_text": Decoder("Gemma4ForCausalLM", _GEMMA4),
        "gemma4_unified_text": Decoder("Gemma4UnifiedForCausalLM", _GEMMA4),
        "olmo2": Decoder("Olmo2ForCausalLM", _OLMO | {"norm_in_float32": True}),
        "olmo3": Decoder("Olmo3ForCausalLM", _OLMO | {"norm_in_float32": True}),
        "olmoe": Decoder("OlmoeForCausalLM", _OLMO),
        "phi3": Decoder("Phi3ForCausalLM"),
        "glm": Decoder("GlmForCausalLM", {"rope_interleaved": True}),
        "glm4": Decoder("Glm4ForCausalLM", {"rope_interleaved": True}),
        "glm4_moe": Decoder("Glm4MoeForCausalLM"),
        "gpt_oss": Decoder("GptOssForCausalLM", _GPT_OSS),
        "deepseek_v2": Decoder("DeepseekV2ForCausalLM", {"rope_interleaved": True}),
        "deepseek_v3": Decoder("DeepseekV3ForCausalLM"),
        "kimi_k2": Decoder("DeepseekV3ForCausalLM"),
        "glm_moe_dsa": Decoder("GlmMoeDsaForCausalLM", {"rope_interleaved": True}),
        "seed_oss": Decoder("SeedOssForCausalLM"),
        "granite": Decoder("GraniteForCausalLM"),
        "ernie4_5": Decoder("Ernie4_5ForCausalLM", {"rope_interleaved": True}),
        "smollm3": Decoder("SmolLM3ForCausalLM"),
        "exaone4": Decoder("Exaone4ForCausalLM", {"qk_norm": True}),
        "minimax_m2": Decoder("MiniMaxM2ForCausalLM", _OLMO),
        "llama4_text": Decoder("Llama4ForCausalLM", {"rope_interleaved": True}),
        "cohere": Decoder("CohereForCausalLM", _COHERE),
        "cohere2": Decoder("Cohere2ForCausalLM", _COHERE),
    }
)
"""By the `model_type` of a `config.json`, which is `ModelConfig.architecture`, too."""


def traits_of(architecture: str) -> Mapping[str, Any]:
    """Return them; none for an architecture that is the plain one, or unknown."""
    return DECODERS[architecture].traits if architecture in DECODERS else {}
