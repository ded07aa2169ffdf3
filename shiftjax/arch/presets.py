"""Published architectures by name: shapes for planning, measuring and random weights. No JAX."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from shiftjax.arch.config import ModelConfig, RopeScaling

Sizes = dict[str, Any]
_COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def _sizes(*numbers: int) -> Sizes:
    return dict(zip(_COLUMNS, numbers, strict=True))


def _llama3(name: str, sizes: Sizes, *, factor: float = 8.0, tied: bool = False) -> ModelConfig:
    """Llama 3.1 and later: one vocabulary, one rotary base, `llama3` scaling."""
    return ModelConfig(
        name=name,
        architecture="llama",
        vocab_size=128_256,
        **sizes,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling("llama3", factor, 1.0, 4.0, 8192),
        tie_word_embeddings=tied,
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
    )


def _qwen3(
    name: str, sizes: Sizes, *, vocab_size: int = 151_936, tied: bool = False
) -> ModelConfig:
    """Qwen3: norm on q and k."""
    return ModelConfig(
        name=name,
        architecture="qwen3",
        vocab_size=vocab_size,
        **sizes,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=tied,
        qk_norm=True,
        bos_token_id=151_643,
        eos_token_ids=(151_645, 151_643),
    )


def _qwen2(name: str, sizes: Sizes, **more) -> ModelConfig:
    """Qwen2.5: Qwen3 with a bias on q, k and v instead of the norms, and a shorter context."""
    return replace(
        _qwen3(name, sizes, **more),
        architecture="qwen2",
        max_position_embeddings=32_768,
        attention_bias=True,
        qk_norm=False,
    )


_TINY = ModelConfig(
    name="tiny",
    architecture="llama",
    vocab_size=256,
    **_sizes(64, 128, 2, 8, 4, 8),
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_ids=(1,),
)
_SMOLLM2 = ModelConfig(
    name="smollm2-135m",
    architecture="llama",
    vocab_size=49_152,
    **_sizes(576, 1536, 30, 9, 3, 64),
    max_position_embeddings=8192,
    rope_theta=100_000.0,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)
_MISTRAL = ModelConfig(
    name="mistral-7b-v0.3",
    architecture="mistral",
    vocab_size=32_768,
    **_sizes(4096, 14_336, 32, 32, 8, 128),
    max_position_embeddings=32_768,
    rope_theta=1_000_000.0,
    bos_token_id=1,
    eos_token_ids=(2,),
)

_PRESETS = (
    _TINY,
    replace(_TINY, name="tiny-qwen2", architecture="qwen2", attention_bias=True),
    replace(_TINY, name="tiny-qwen3", architecture="qwen3", qk_norm=True, head_dim=16),
    replace(_TINY, name="tiny-mistral", architecture="mistral", sliding_window=32),
    _SMOLLM2,
    # hidden, intermediate, layers, heads, KV heads, head_dim
    _llama3("llama-3.2-1b", _sizes(2048, 8192, 16, 32, 8, 64), factor=32.0, tied=True),
    _llama3("llama-3.1-8b", _sizes(4096, 14_336, 32, 32, 8, 128)),
    _llama3("llama-3.3-70b", _sizes(8192, 28_672, 80, 64, 8, 128)),
    _MISTRAL,
    _qwen2("qwen2.5-0.5b", _sizes(896, 4864, 24, 14, 2, 64), tied=True),
    _qwen2("qwen2.5-32b", _sizes(5120, 27_648, 64, 40, 8, 128), vocab_size=152_064),
    _qwen3("qwen3-0.6b", _sizes(1024, 3072, 28, 16, 8, 128), tied=True),
    _qwen3("qwen3-8b", _sizes(4096, 12_288, 36, 32, 8, 128)),
    _qwen3("qwen3-32b", _sizes(5120, 25_600, 64, 64, 8, 128)),
)

_SHORT_NAMES = {
    "llama-1b": "llama-3.2-1b",
    "llama-8b": "llama-3.1-8b",
    "llama-70b": "llama-3.3-70b",
    "mistral-7b": "mistral-7b-v0.3",
    "qwen-32b": "qwen3-32b",
}

_BY_NAME = {config.name: config for config in _PRESETS}

PRESETS = MappingProxyType(
    _BY_NAME | {short: _BY_NAME[name] for short, name in _SHORT_NAMES.items()}
)
"""Architecture by name; the shapes are those of the published `config.json` files."""
