"""Hugging Face `config.json` to ModelConfig and back, with every problem named at once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.traits import DECODERS, SWIGLU_LIMIT, SWIGLU_SLOPE, traits_of
from shiftjax.weights.encoder_config import ENCODERS, encoder_to_json, parse_encoder
from shiftjax.weights.expert_config import experts_to_json, parse_experts
from shiftjax.weights.family_config import (
    epsilon_of,
    family_to_json,
    intermediate_of,
    parse_biases,
    parse_family,
)
from shiftjax.weights.gemma4_config import GEMMA4, gemma4_json, parse_gemma4
from shiftjax.weights.hf_defaults import defaults_of
from shiftjax.weights.hf_layers import layers_json, read_layers
from shiftjax.weights.latent_config import LATENT, latent_json, parse_latent, rope_dim_of
from shiftjax.weights.quant_config import FIELD, codes_of, parse_method, with_modelopt
from shiftjax.weights.scoring_config import SCORES, labels_json, num_labels_of
from shiftjax.weights.source import CheckpointError
from shiftjax.weights.typed_fields import Fields, read_json

# The text model of these is a part of the file, of an architecture of its own.
_WITH_IMAGES = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "kimi_k25": ("kimi_k2", "deepseek_v3"),
    "llama4": ("llama4_text",),
    "mistral3": ("mistral", "ministral3"),
}
_GEMMA = ("gemma2", "gemma3_text", *GEMMA4)


def read_config(directory: Path, name: str | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face directory; end-of-text ids also from generation_config.json."""
    path = directory / "config.json"
    data = with_modelopt(read_json(path), directory)
    config = parse_config(data, name or directory.resolve().name, str(path))
    generation = directory / "generation_config.json"
    if not generation.exists():
        return config
    fields = Fields(read_json(generation), str(generation))
    more = fields.token_ids("eos_token_id")
    fields.raise_problems()
    # A default of the class is no token of this model where the other file names one.
    own = config.eos_token_ids if _says_eos(data) or not more else ()
    return replace(config, eos_token_ids=tuple(dict.fromkeys(own + more)))


def class_of(architecture: str) -> str:
    """What transformers calls the models of an architecture that is known."""
    decoder = DECODERS.get(architecture)
    return ENCODERS[architecture] if decoder is None else decoder.model_class


def _says_eos(data: dict[str, Any]) -> bool:
    """Whether a file itself has the ids that end a text."""
    text = data.get("text_config")
    parts = (data, text) if isinstance(text, dict) else (data,)
    return any(part.get("eos_token_id") is not None for part in parts)


def parse_config(data: dict[str, Any], name: str, file: str) -> ModelConfig:
    """Turn the contents of a `config.json` into a ModelConfig.

    Raises CheckpointError with one line per problem; `file` is for these messages.
    """
    architecture = data.get("model_type")
    if architecture in _WITH_IMAGES:
        data = _text_part(data, file, architecture)
        architecture = data.get("model_type", _WITH_IMAGES[architecture][0])
    if architecture not in DECODERS and architecture not in ENCODERS:
        known = ", ".join([*DECODERS, *ENCODERS, *_WITH_IMAGES])
        raise CheckpointError(f"{file}: model_type must be one of {known}, found {architecture!r}")
    fields = Fields(defaults_of(architecture).fill(data), file)
    if architecture in ENCODERS:
        return parse_encoder(fields, name, architecture)
    _refuse_unsupported(fields, architecture)
    method = parse_method(fields)
    bos = fields.token_ids("bos_token_id")
    if len(bos) > 1:
        fields.problem(f"bos_token_id must be one token id, found {list(bos)}")
    shape = _attention_shape(fields, architecture)
    rope_dim = rope_dim_of(fields, architecture, shape["head_dim"])
    layers = read_layers(fields, architecture, rope_dim)
    config = ModelConfig(
        name=name,
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        intermediate_size=fields.count(intermediate_of(architecture)),
        max_position_embeddings=fields.count("max_position_embeddings"),
        **(shape | layers | dict(traits_of(architecture)) | parse_latent(fields, architecture)),
        **parse_biases(fields, architecture),
        **parse_family(fields, architecture, shape["head_dim"]),
        rms_norm_eps=fields.positive(epsilon_of(architecture)),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        experts=parse_experts(fields, architecture),
        **parse_gemma4(fields, architecture),
        num_labels=num_labels_of(fields),
        num_kv_layers=_num_kv_layers(fields, architecture),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
    fields.raise_problems()
    return replace(config, codes=codes_of(method, config))


def _text_part(data: dict[str, Any], file: str, architecture: str) -> dict[str, Any]:
    """Return the text model's part of a file, with what stands outside of it."""
    text = data.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{file}: text_config must be an object, found {text!r}")
    known = _WITH_IMAGES[architecture]
    found = text.get("model_type", known[0])
    if found not in known:
        words = f"model_type must be {' or '.join(known)}, found {found!r}"
        raise CheckpointError(f"{file}: text_config: {words}")
    outside = ("bos_token_id", "eos_token_id", FIELD)
    return {name: data[name] for name in outside if data.get(name)} | text


def _refuse_unsupported(fields: Fields, architecture: str) -> None:
    """Options that change the result and that we do not compute are never dropped in silence."""
    if architecture in _GEMMA:
        name, known = "hidden_activation", ("gelu_pytorch_tanh",)
    else:
        name, known = "hidden_act", ("silu", "swish")
    activation = fields.data.get(name, known[0])
    if activation not in known:
        fields.problem(f"{name} must be {known[0]}, found {activation!r}")
    for name, value in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_SLOPE)):
        if architecture == "gpt_oss" and fields.positive(name, value) != value:
            fields.problem(f"{name} must be {value}, found {fields.data[name]}")
    if fields.data.get("clip_qkv") is not None:
        fields.problem("clip_qkv must be null: queries, keys and values are not clipped here")
    usual = (None, False, "vision") if architecture in GEMMA4 else (None, False)
    if fields.data.get("use_bidirectional_attention") not in usual:  # vision: of images alone
        fields.problem("use_bidirectional_attention must be false: only causal models generate")


def _attention_shape(fields: Fields, architecture: str) -> dict[str, Any]:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = 1 if architecture in LATENT else fields.count("num_key_value_heads", heads)
    head_dim = fields.count("head_dim", max(1, hidden // heads))
    if not fields.problems and architecture not in LATENT:
        if heads % kv_heads:
            fields.problem(f"num_attention_heads {heads} is no multiple of {kv_heads} KV heads")
        if not fields.has("head_dim") and hidden % heads:
            fields.problem(f"hidden_size {hidden} is no multiple of {heads} heads")
        if head_dim % 2:
            fields.problem(f"head_dim must be even for rotary embeddings, found {head_dim}")
    return {
        "hidden_size": hidden,
        "num_layers": fields.count("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }


def _num_kv_layers(fields: Fields, architecture: str) -> int | None:
    """SwiftKV's layers with keys and values of their own: the first ones, by default all."""
    if architecture != "llama_swiftkv":
        return None
    num_layers = fields.count("num_hidden_layers")
    num_kv_layers = fields.count("num_key_value_layers", num_layers)
    if num_kv_layers > num_layers:
        fields.problem(f"num_key_value_layers {num_kv_layers} is more than {num_layers} layers")
    if fields.data.get("key_value_group_size") not in (None, 1):
        fields.problem(
            "key_value_group_size must be 1: late layers that share KV are not supported"
        )
    return num_kv_layers


def to_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Contents of a `config.json` from which `parse_config` makes the same ModelConfig.

    It is for plain numbers, as which also codes are written. Written in the layout of
    transformers 4, which version 5 reads too. Raises CheckpointError for a combination that
    Hugging Face's model types cannot say.
    """
    if config.encoder is not None:
        return encoder_to_json(config, dtype)
    name = class_of(config.architecture)
    if config.num_labels:
        name = name.removesuffix("ForCausalLM") + SCORES
    data: dict[str, Any] = {
        "architectures": [name],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        intermediate_of(config.architecture): config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        epsilon_of(config.architecture): config.rms_norm_eps,
        **family_to_json(config),
        **layers_json(config),
        **gemma4_json(config),
        **latent_json(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _ids_json(config),
        "torch_dtype": dtype,
    }
    if config.architecture == "llama_swiftkv":
        data["num_key_value_layers"] = config.num_kv_layers
    data |= experts_to_json(config) | labels_json(config)
    if parse_config(data, config.name, "config.json") != replace(config, codes=None):
        raise CheckpointError(f"{config.name}: no config.json of {config.architecture} can say it")
    return data


def _ids_json(config: ModelConfig) -> int | list[int] | None:
    """Return the ids that end a text; no id is a list where a null means the default."""
    ids = list(config.eos_token_ids)
    if ids or "eos_token_id" in defaults_of(config.architecture).null:
        return ids[0] if len(ids) == 1 else ids
    return None
