"""What single model types say in `config.json`, and back: biases, scales, caps."""

from typing import Any, NamedTuple

from shiftjax.arch.config import ModelConfig
from shiftjax.weights.gemma4_config import GEMMA4
from shiftjax.weights.typed_fields import Fields


class _Biases(NamedTuple):
    """The fields that say whether matrices have a bias; None: none has."""

    attention: str | None = "attention_bias"  # of q, k and v
    output: str | None = "attention_bias"
    mlp: str | None = None


_LIKE_LLAMA = _Biases(mlp="mlp_bias")
_NONE = _Biases(None, None)
_BIASES = {
    **dict.fromkeys(("llama", "llama_swiftkv", "granite", "smollm3"), _LIKE_LLAMA),
    **dict.fromkeys(("mistral", "ministral3", "mixtral", "phi3"), _NONE),
    **dict.fromkeys(("exaone4", "minimax_m2"), _NONE),
    **dict.fromkeys(("glm", "glm4", "glm4_moe"), _Biases(output=None)),
    "qwen2": _NONE,  # q, k and v always have one
    "qwen2_moe": _Biases("qkv_bias", None),
    "seed_oss": _Biases("attention_bias", "attention_out_bias", "mlp_bias"),
    "ernie4_5": _Biases("use_bias", "use_bias", "use_bias"),
}
_GEMMA = ("gemma2", "gemma3_text")
_COHERE = ("cohere", "cohere2")
_CAPS = {
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
}
_MULTIPLIERS = {  # of Granite
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}


def bias_fields(architecture: str) -> tuple[str | None, str | None, str | None]:
    """Return the fields that say whether q, k and v, o, and MLPs have a bias."""
    return _BIASES.get(architecture, _Biases())


def intermediate_of(architecture: str) -> str:
    """Return the field that has the width of MLPs."""
    return "intermediate_size_mlp" if architecture == "llama4_text" else "intermediate_size"


def epsilon_of(architecture: str) -> str:
    """Return the field that has what is added to a norm's mean of squares."""
    return "layer_norm_eps" if architecture in _COHERE else "rms_norm_eps"


def parse_biases(fields: Fields, architecture: str) -> dict[str, bool]:
    """Return which matrices have a bias."""
    names = _BIASES.get(architecture, _Biases())
    attention, output, mlp = (name is not None and fields.flag(name) for name in names)
    return {
        "attention_bias": attention or architecture == "qwen2",
        "output_bias": output,
        "mlp_bias": mlp,
    }


def parse_family(fields: Fields, architecture: str, head_dim: int) -> dict[str, Any]:
    """Return the scales, caps and norms of a model type that says something of them."""
    if architecture == "glm4_moe":
        return {"qk_norm": fields.flag("use_qk_norm")}
    if architecture == "llama4_text":
        return {"qk_unit_norm": fields.flag("use_qk_norm")}
    if architecture in _COHERE:
        has_norms = architecture == "cohere" and fields.flag("use_qk_norm")
        scale = fields.positive("logit_scale")
        return {"logit_scale": scale, "qk_norm": has_norms, "qk_norm_by_head": has_norms}
    if architecture == "granite":
        scales = {ours: fields.positive(name) for ours, name in _MULTIPLIERS.items()}
        scales["logit_scale"] = 1 / fields.positive("logits_scaling")
        return scales | _query_scale(fields.positive("attention_multiplier"), head_dim)
    if architecture not in (*_GEMMA, *GEMMA4):
        return {}
    caps = {ours: fields.positive(name) for ours, name in _CAPS.items() if fields.has(name)}
    if architecture != "gemma2":  # transformers keeps the field, and computes without it
        caps.pop("attention_soft_cap", None)
    return (
        caps
        if architecture in GEMMA4
        else caps | _query_scale(fields.positive("query_pre_attn_scalar") ** -0.5, head_dim)
    )


def _query_scale(scale: float, head_dim: int) -> dict[str, float]:
    """Return a scale of attention's scores, where it is not the usual one."""
    return {} if scale == head_dim**-0.5 else {"query_scale": scale}


def family_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields from which `parse_biases` and `parse_family` make the same."""
    names = _BIASES.get(config.architecture, _Biases())
    biases = config.attention_bias, config.output_bias, config.mlp_bias
    data: dict[str, Any] = {
        name: has_bias for name, has_bias in zip(names, biases, strict=True) if name is not None
    }
    if config.architecture in ("glm4_moe", "cohere"):
        data["use_qk_norm"] = config.qk_norm
    if config.architecture == "llama4_text":
        data["use_qk_norm"] = config.qk_unit_norm
    if config.architecture in _COHERE:
        data["logit_scale"] = config.logit_scale
    if config.architecture == "granite":
        data |= {name: getattr(config, ours) for ours, name in _MULTIPLIERS.items()}
        data["attention_multiplier"] = config.attention_scale
        data["logits_scaling"] = _whole_power(config.logit_scale, -1)
    if config.architecture in _GEMMA:
        data |= {name: getattr(config, ours) for ours, name in _CAPS.items()}
        data["hidden_activation"] = "gelu_pytorch_tanh"
        data["query_pre_attn_scalar"] = _whole_power(config.attention_scale, -2)
    return data


def _whole_power(value: float, exponent: int) -> int | float:
    """Return `value` to this power, whole where a whole number gives the value back."""
    power = value**exponent
    return round(power) if power >= 1 and round(power) ** (1 / exponent) == value else power
