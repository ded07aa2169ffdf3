"""Hugging Face `config.json` to ModelConfig and back, with every problem named at once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from shiftjax.arch.config import ModelConfig, RopeScaling
from shiftjax.weights.encoder_config import ENCODERS, encoder_to_json, parse_encoder
from shiftjax.weights.expert_config import experts_to_json, parse_experts
from shiftjax.weights.fields import Fields, read_json
from shiftjax.weights.quant_config import codes_of, parse_method, with_modelopt
from shiftjax.weights.source import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "llama_swiftkv": "LlamaSwiftKVForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    **ENCODERS,
}
_LLAMA = ("llama", "llama_swiftkv")
# What transformers assumes where a file says nothing.
_HEAD_DIM = {"qwen3": 128}
_MISTRAL_SLIDING_WINDOW = 4096
_FULL, _SLIDING = "full_attention", "sliding_attention"


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
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))


def parse_config(data: dict[str, Any], name: str, file: str) -> ModelConfig:
    """Turn the contents of a `config.json` into a ModelConfig.

    Raises CheckpointError with one line per problem; `file` is for these messages.
    """
    fields = Fields(data, file)
    architecture = data.get("model_type")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file}: model_type must be one of {known}, found {architecture!r}")
    if architecture in ENCODERS:
        return parse_encoder(fields, name, architecture)
    _refuse_unsupported(fields)
    method = parse_method(fields)
    rope_theta, rope_scaling = _rope(fields)
    bos = fields.token_ids("bos_token_id")
    if len(bos) > 1:
        fields.problem(f"bos_token_id must be one token id, found {list(bos)}")
    attention_bias = architecture not in ("mistral", "mixtral") and fields.flag("attention_bias")
    config = ModelConfig(
        name=name,
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        intermediate_size=fields.count("intermediate_size"),
        max_position_embeddings=fields.count("max_position_embeddings"),
        **_attention_shape(fields, architecture),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias and architecture != "qwen2",
        mlp_bias=architecture in _LLAMA and fields.flag("mlp_bias"),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        experts=parse_experts(fields, architecture),
        sliding_window=_sliding_window(fields, architecture),
        num_kv_layers=_num_kv_layers(fields, architecture),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
    fields.raise_problems()
    return replace(config, codes=codes_of(method, config))


def _refuse_unsupported(fields: Fields) -> None:
    """Options that change the result and that we do not compute are never dropped in silence."""
    activation = fields.data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.problem(f"hidden_act must be silu, found {activation!r}")
    if fields.data.get("partial_rotary_factor") not in (None, 1, 1.0):
        fields.problem("partial_rotary_factor must be 1")


def _attention_shape(fields: Fields, architecture: str) -> dict[str, Any]:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    # A null means one KV head per query head; the default of an absent field differs by model.
    all_heads = architecture in _LLAMA or "num_key_value_heads" in fields.data
    kv_heads = fields.count("num_key_value_heads", heads if all_heads else None)
    head_dim = fields.count("head_dim", _HEAD_DIM.get(architecture, max(1, hidden // heads)))
    if not fields.problems:
        if heads % kv_heads:
            fields.problem(f"num_attention_heads {heads} is no multiple of {kv_heads} KV heads")
        if not fields.has("head_dim") and architecture not in _HEAD_DIM and hidden % heads:
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


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from `rope_parameters` (transformers 5) or the older two fields."""
    parameters = fields.data.get("rope_parameters") or fields.data.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        fields.problem(f"rope_scaling must be an object, found {parameters!r}")
        return 1.0, None
    inner = Fields(parameters, f"{fields.file}: rope_scaling")
    inner.problems = fields.problems
    owner = inner if inner.has("rope_theta") else fields
    theta = owner.positive("rope_theta", 10_000.0)
    if inner.data.get("partial_rotary_factor") not in (None, 1, 1.0):
        inner.problem("partial_rotary_factor must be 1")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", inner.positive("factor"))
    if kind == "llama3":
        return theta, _llama3_scaling(inner)
    inner.problem(f"rope_type must be default, linear or llama3, found {kind!r}")
    return theta, None


def _llama3_scaling(fields: Fields) -> RopeScaling:
    low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
    if high <= low and not fields.problems:
        fields.problem(f"high_freq_factor {high} must be above low_freq_factor {low}")
    original = fields.count("original_max_position_embeddings")
    return RopeScaling("llama3", fields.positive("factor"), low, high, original)


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    """The window of all layers; a model in which only some layers have one is refused."""
    if architecture in _LLAMA:
        return None
    if architecture == "mixtral":
        return fields.count("sliding_window") if fields.has("sliding_window") else None
    if architecture == "mistral" and "sliding_window" not in fields.data:
        return _MISTRAL_SLIDING_WINDOW
    if architecture != "mistral" and not fields.flag("use_sliding_window"):
        return None
    if not fields.has("sliding_window"):
        return None
    num_layers = fields.count("num_hidden_layers")
    num_sliding = _num_sliding_layers(fields, architecture, num_layers)
    if num_sliding not in (0, num_layers):
        fields.problem(f"a sliding window in {num_sliding} of {num_layers} layers is not supported")
    window = fields.count("sliding_window")
    return window if num_sliding else None


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


def _num_sliding_layers(fields: Fields, architecture: str, num_layers: int) -> int:
    kinds = fields.data.get("layer_types")
    if kinds is None:
        if architecture == "mistral":
            return num_layers
        return max(0, num_layers - fields.count("max_window_layers", 28, minimum=0))
    if not isinstance(kinds, list) or set(map(str, kinds)) - {_FULL, _SLIDING}:
        fields.problem(f"layer_types must be a list of {_FULL} and {_SLIDING}, found {kinds!r}")
        return 0
    return kinds.count(_SLIDING)


def to_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Contents of a `config.json` from which `parse_config` makes the same ModelConfig.

    It is for plain numbers, as which also codes are written. Written in the layout of
    transformers 4, which version 5 reads too. Raises CheckpointError for a combination that
    Hugging Face's model types cannot say.
    """
    if config.encoder is not None:
        return encoder_to_json(config, dtype)
    data: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_json(config.rope_scaling),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _ids_json(config.eos_token_ids),
        "torch_dtype": dtype,
    }
    if config.architecture in (*_LLAMA, "qwen3", "qwen3_moe"):
        data["attention_bias"] = config.attention_bias
    if config.architecture in _LLAMA:
        data["mlp_bias"] = config.mlp_bias
    else:
        data["sliding_window"] = config.sliding_window
    if config.architecture == "llama_swiftkv":
        data["num_key_value_layers"] = config.num_kv_layers
    if config.architecture in ("qwen2", "qwen3", "qwen3_moe"):
        data |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    data |= experts_to_json(config)
    if parse_config(data, config.name, "config.json") != replace(config, codes=None):
        raise CheckpointError(f"{config.name}: no config.json of {config.architecture} can say it")
    return data


def _rope_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    data: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        data |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return data


def _ids_json(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else ids[0] if ids else None
