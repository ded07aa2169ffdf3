"""GGUF metadata to ModelConfig."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shiftjax.arch.config import ModelConfig, RopeScaling
from shiftjax.arch.rotary import llama3_kept
from shiftjax.gguf_header import GgufHeader
from shiftjax.weights.gguf_families import FAMILIES, as_written
from shiftjax.weights.source import CheckpointError
from shiftjax.weights.typed_fields import Fields

ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # llama.cpp calls Mistral llama too
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_config(path: Path, header: GgufHeader, name: str | None = None) -> ModelConfig:
    """ModelConfig from the metadata and from which tensors the file holds.

    Raises CheckpointError with one line per problem. Llama 3's frequency factors are a tensor;
    `rope_scaling` adds them.
    """
    metadata, tensors = header.metadata, header.tensors
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(dict.fromkeys((*_ARCHITECTURES, *FAMILIES)))
        raise CheckpointError(
            f"{path}: general.architecture must be one of {known}, found {architecture!r}"
        )
    fields = fields_of(path, header)
    shape = _attention_shape(fields)
    window = fields.count("attention.sliding_window", 0, minimum=0) or None
    bos = fields.token_ids("bos_token_id")
    config = ModelConfig(
        name=name or model_name(path, header),
        architecture="mistral" if architecture == "llama" and window else architecture,
        vocab_size=_vocab_size(fields, header),
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=fields.count("block_count"),
        max_position_embeddings=fields.count("context_length"),
        **shape,
        rms_norm_eps=as_written(fields.positive("attention.layer_norm_rms_epsilon")),
        rope_theta=as_written(fields.positive("rope.freq_base", 10_000.0)),
        rope_scaling=_linear_scaling(fields),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=window,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(
            dict.fromkeys(token for name in _END_IDS for token in fields.token_ids(name))
        ),
    )
    fields.raise_problems()
    return config


def model_name(path: Path, header: GgufHeader) -> str:
    """Return what a file calls its model; the file's own name where it does not."""
    return str(header.metadata.get("general.name") or path.stem)


def fields_of(path: Path, header: GgufHeader) -> Fields:
    """The model's and the tokenizer's keys without their prefixes."""
    metadata = header.metadata
    architecture = metadata["general.architecture"]
    data = {
        key.removeprefix(prefix): value
        for prefix in (f"{architecture}.", "tokenizer.ggml.")
        for key, value in metadata.items()
        if key.startswith(prefix)
    }
    return Fields(data, f"{path}: {architecture}")


def _attention_shape(fields: Fields) -> dict[str, Any]:
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    kv_heads = fields.count("attention.head_count_kv", heads)
    head_dim = fields.count("attention.key_length", max(1, hidden // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.count(name, head_dim) != head_dim:
            fields.problem(f"{name} must equal head_dim {head_dim}, found {fields.data[name]}")
    if heads % kv_heads:
        fields.problem(f"attention.head_count {heads} is no multiple of {kv_heads} KV heads")
    if head_dim % 2:
        fields.problem(f"head_dim must be even for rotary embeddings, found {head_dim}")
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }


def _vocab_size(fields: Fields, header: GgufHeader) -> int:
    """Rows of the embedding; the tokenizer must not know more tokens than there are rows."""
    embedding = header.tensors.get("token_embd.weight")
    tokens = fields.data.get("tokens")
    if embedding is None:
        fields.problem("tensor token_embd.weight: expected the embedding, found nothing")
        return 1
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        fields.problem(
            f"tensor token_embd.weight: expected a row for each of {len(tokens)} tokens, "
            f"found {embedding.shape[0]}"
        )
    return embedding.shape[0]


def _linear_scaling(fields: Fields) -> RopeScaling | None:
    kind = fields.data.get("rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", as_written(fields.positive("rope.scaling.factor")))
    if kind != "none":
        fields.problem(f"rope.scaling.type must be none or linear, found {kind!r}")
    if "rope.scale_linear" in fields.data:
        fields.problem("rope.scale_linear is an old key; convert the model again")
    return None


def rope_scaling(path: Path, config: ModelConfig, factors: np.ndarray) -> ModelConfig:
    """Recognise Llama 3's scaling from the divisors of the frequencies that llama.cpp stores.

    Every published Llama 3 blends between wavelengths 8192 / 4 and 8192 / 1, and Llama 4 Scout
    nothing; the largest divisor is the factor. Divisors that follow from neither are refused.
    """
    theta, width = config.ropes[0][0], config.rotary_dim or config.head_dim
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    known = (RopeScaling("llama3", float(np.max(factors)), 1.0, high) for high in (4.0, 1.0))
    scaling = next((each for each in known if _follow(factors, each, frequencies)), None)
    if scaling is None:
        raise CheckpointError(
            f"{path}: tensor {ROPE_FACTORS}: expected the frequency factors of Llama 3, found "
            f"{len(factors)} values between {np.min(factors):g} and {np.max(factors):g}"
        )
    if not config.layer_kinds:
        return replace(config, rope_scaling=scaling)
    kinds = config.layer_kinds
    scaled = (replace(kind, rope_scaling=scaling) if kind.has_rope else kind for kind in kinds)
    return replace(config, layer_kinds=tuple(scaled))


def _follow(factors: np.ndarray, scaling: RopeScaling, frequencies: np.ndarray) -> bool:
    """Whether divisors are those of a scaling."""
    divisors = _llama3_divisors(scaling, frequencies)
    return factors.shape == divisors.shape and np.allclose(factors, divisors, rtol=1e-4)


def _llama3_divisors(scaling: RopeScaling, frequencies: np.ndarray) -> np.ndarray:
    """Original frequency over scaled frequency (Llama 3.1 model card, `apply_scaling`)."""
    kept = np.array([llama3_kept(each, scaling) for each in frequencies])
    return 1.0 / ((1.0 - kept) / scaling.factor + kept)
