"""Multi-head latent attention in Hugging Face's `config.json`, and back: DeepSeek, Kimi, GLM-5."""

import logging
from typing import Any

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.latent import Latent
from shiftjax.weights.typed_fields import Fields

logger = logging.getLogger(__name__)
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm_moe_dsa")
_WITH_INDEXER = ("glm_moe_dsa",)
_SAYS_ROPE = ("deepseek_v3", "kimi_k2")  # whether neighbours or halves are rotated
_WIDTHS = {
    "rank": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "nope_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
}
# Fields of the original code, of which transformers computes one value alone.
_ROUTERS = {
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
        "mlp_bias": (False,),
    },
}
_OF_V3 = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}  # of all others


def parse_latent(fields: Fields, architecture: str) -> dict[str, Any]:
    """Return the fields of ModelConfig that MLA decides; none for other architectures."""
    if architecture not in LATENT:
        return {}
    for name, known in ({"moe_layer_freq": (1,)} | _ROUTERS.get(architecture, _OF_V3)).items():
        said = fields.data.get(name)
        if said is not None and said not in known:
            words = " or ".join(map(str, known))
            fields.problem(f"{name} must be {words} in {architecture}, found {said!r}")
    widths = {ours: fields.count(name) for ours, name in _WIDTHS.items()}
    if widths["rope_dim"] % 2:
        fields.problem(f"qk_rope_head_dim must be even, found {widths['rope_dim']}")
    rope = fields.data.get("rope_scaling") or fields.data.get("rope_parameters") or {}
    mscale = rope.get("mscale_all_dim") if isinstance(rope, dict) else None
    if mscale is not None and (type(mscale) not in (int, float) or not 0 <= mscale < 100):
        fields.problem(f"mscale_all_dim must be a number from 0 on, found {mscale!r}")
        mscale = None
    latent = Latent(
        **widths,
        query_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else None,
        mscale=float(mscale or 0.0),
        index_topk=fields.count("index_topk") if architecture in _WITH_INDEXER else None,
    )
    found: dict[str, Any] = {
        "latent": latent,
        "head_dim": latent.width,
        "rotary_dim": latent.rope_dim,
    }
    if architecture in _SAYS_ROPE:
        found["rope_interleaved"] = fields.flag("rope_interleave")
    return found


def rope_dim_of(fields: Fields, architecture: str, head_dim: int) -> int:
    """Return the numbers of a head for which `config.json` says rotary frequencies."""
    return fields.count("qk_rope_head_dim") if architecture in LATENT else head_dim


def with_mscale(config: ModelConfig, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return rotary parameters with the gain of scores that they say."""
    if config.latent is None or not scaling or not config.latent.mscale:
        return scaling
    return scaling | {"mscale_all_dim": config.latent.mscale}


def latent_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields from which `parse_latent` makes the same."""
    latent = config.latent
    if latent is None:
        return {}
    data: dict[str, Any] = {name: getattr(latent, ours) for ours, name in _WIDTHS.items()}
    data |= {"num_key_value_heads": config.num_heads, "head_dim": latent.rope_dim}
    data["q_lora_rank"] = latent.query_rank
    if config.architecture in _SAYS_ROPE:
        data["rope_interleave"] = config.rope_interleaved
    if latent.index_topk is not None:
        data["index_topk"] = latent.index_topk
    if config.architecture == "deepseek_v2" and config.experts and config.experts.num_groups > 1:
        data["topk_method"] = "group_limited_greedy"
    return data
