"""What all models of an architecture have in common, and no file says. No JAX."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702  # of the activation clamped_swiglu (gpt-oss)
_GEMMA = {
    "norm_offset": True,
    "norm_in_float32": True,
    "activation": "gelu_tanh",
    "scaled_embedding": True,
}

TRAITS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3": {"qk_norm": True},
        "qwen3_moe": {"qk_norm": True},
        "gemma2": _GEMMA,
        "gemma3_text": _GEMMA | {"qk_norm": True},
        "olmo2": {"qk_norm": True, "wide_qk_norm": True, "norm_in_float32": True},
        "olmoe": {"qk_norm": True, "wide_qk_norm": True},
        "glm": {"rope_interleaved": True},
        "glm4": {"rope_interleaved": True},
        "gpt_oss": {
            "norm_in_float32": True,
            "attention_sinks": True,
            "activation": "clamped_swiglu",
        },
    }
)
"""Fields of `ModelConfig` by architecture; what is not here has the defaults."""


def traits_of(architecture: str) -> Mapping[str, Any]:
    """Return them; none for an architecture that is the plain one, or unknown."""
    return TRAITS.get(architecture, {})
