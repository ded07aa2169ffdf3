"""Models by name for planning: the engine's presets, and some that it does not load. No JAX."""

from types import MappingProxyType

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.presets import PRESETS, preset
from shiftjax.options import ConfigError, unknown_name

_LONG = {"max_position_embeddings": 131_072}
_PLANNED = (
    preset(  # Code Llama 34B's config.json
        "codellama-34b",
        {
            "architecture": "llama",
            "vocab_size": 32_000,
            "max_position_embeddings": 16_384,
            "rope_theta": 1_000_000.0,
        },
        *(8192, 22_016, 48, 64, 8, 128),
    ),
    preset(  # Llama 2 70B's config.json
        *("llama-2-70b", {"architecture": "llama", "vocab_size": 32_000} | _LONG),
        *(8192, 28_672, 80, 64, 8, 128),
    ),
    preset(  # Qwen3-14B's config.json
        *("qwen3-14b", {"architecture": "qwen3", "vocab_size": 151_936} | _LONG),
        *(5120, 17_408, 40, 40, 8, 128),
    ),
    preset(  # elinas/Llama-3-15B-Instruct-zeroed's config.json: Llama-3-8B with layers twice
        "llama-3-15b",
        {
            "architecture": "llama",
            "vocab_size": 128_256,
            "max_position_embeddings": 8192,
            "rope_theta": 500_000.0,
        },
        *(4096, 14_336, 64, 32, 8, 128),
    ),
)

MODELS = MappingProxyType(dict(PRESETS) | {each.name: each for each in _PLANNED})
"""Models by name; the engine loads those of `PRESETS` only."""


def find_model(name: str | ModelConfig) -> ModelConfig:
    """The model of this name, if it is one. Raises ConfigError with the nearest one."""
    if isinstance(name, ModelConfig):
        return name
    if name not in MODELS:
        raise ConfigError([f"{unknown_name(name, MODELS, 'model')}; known: {', '.join(MODELS)}"])
    return MODELS[name]
