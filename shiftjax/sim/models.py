"""Models by name for planning: the engine's presets, and mixtures of experts. No JAX."""

from types import MappingProxyType

from shiftjax.arch.config import Experts, ModelConfig
from shiftjax.arch.presets import PRESETS
from shiftjax.options import ConfigError, unknown_name

_SCOUT = ModelConfig(  # Llama 4 Scout's config.json, text part: every layer has experts
    name="llama-17b-16e",
    architecture="llama",
    vocab_size=202_048,
    hidden_size=5120,
    intermediate_size=8192,
    num_layers=48,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    experts=Experts(num=16, per_token=1, intermediate_size=8192, shared_intermediate_size=8192),
)
_QWEN_A3B = ModelConfig(  # Qwen3-30B-A3B's config.json
    name="qwen-30b-a3b",
    architecture="qwen3",
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=768,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    max_position_embeddings=131_072,
    qk_norm=True,
    experts=Experts(num=128, per_token=8, intermediate_size=768),
)

MODELS = MappingProxyType(dict(PRESETS) | {each.name: each for each in (_SCOUT, _QWEN_A3B)})
"""Models by name; the engine loads those of `PRESETS` only."""


def find_model(name: str) -> ModelConfig:
    """The model of this name. Raises ConfigError with the nearest one."""
    if name not in MODELS:
        raise ConfigError([f"{unknown_name(name, MODELS, 'model')}; known: {', '.join(MODELS)}"])
    return MODELS[name]
