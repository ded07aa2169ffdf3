"""Published architectures by name: shapes for planning, measuring and random weights. No JAX."""

from dataclasses import replace
from types import MappingProxyType

from shiftjax.models.config import ModelConfig, RopeScaling


def _llama3(name: str, factor: float = 8.0, **sizes) -> ModelConfig:
    """Llama 3.1 and later: one vocabulary, one rotary base, `llama3` scaling."""
    return ModelConfig(
        name=name,
        architecture="llama",
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling("llama3", factor, 1.0, 4.0, 8192),
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
        **sizes,
    )


def _qwen(name: str, architecture: str, **fields) -> ModelConfig:
    """Qwen2.5 (bias on q, k, v) and Qwen3 (norm on q and k)."""
    return ModelConfig(
        name=name,
        architecture=architecture,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        bos_token_id=151_643,
        eos_token_ids=(151_645, 151_643),
        **fields,
    )


_TINY = ModelConfig(
    name="tiny",
    architecture="llama",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_ids=(1,),
)

_PRESETS = (
    _TINY,
    replace(_TINY, name="tiny-qwen2", architecture="qwen2", attention_bias=True),
    replace(_TINY, name="tiny-qwen3", architecture="qwen3", qk_norm=True, head_dim=16),
    replace(_TINY, name="tiny-mistral", architecture="mistral", sliding_window=32),
    replace(
        _TINY,
        name="smollm2-135m",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    _llama3(
        "llama-3.2-1b",
        factor=32.0,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    _llama3(
        "llama-3.1-8b",
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    _llama3(
        "llama-3.3-70b",
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
    ),
    ModelConfig(
        name="mistral-7b-v0.3",
        architecture="mistral",
        vocab_size=32_768,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    _qwen(
        "qwen2.5-0.5b",
        "qwen2",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
    _qwen(
        "qwen2.5-32b",
        "qwen2",
        vocab_size=152_064,
        hidden_size=5120,
        intermediate_size=27_648,
        num_layers=64,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
    ),
    _qwen(
        "qwen3-0.6b",
        "qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    ),
    _qwen(
        "qwen3-8b",
        "qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
    ),
    _qwen(
        "qwen3-32b",
        "qwen3",
        vocab_size=151_936,
        hidden_size=5120,
        intermediate_size=25_600,
        num_layers=64,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
    ),
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
