"""Experts in Hugging Face's `config.json`, and back."""

from typing import Any, NamedTuple

from shiftjax.arch.config import Experts, ModelConfig
from shiftjax.weights.fields import Fields


class _Names(NamedTuple):
    """What a model type calls the fields of its experts."""

    num: tuple[str, ...]  # the first is written, all are read
    width: str
    norm_topk: str | None  # None: the weights of a token's experts always sum to one
    has_dense_layers: bool = False
    has_bias: bool = False


_NAMES = {
    "qwen3_moe": _Names(
        ("num_experts", "num_local_experts"), "moe_intermediate_size", "norm_topk_prob", True
    ),
    "mixtral": _Names(("num_local_experts", "num_experts"), "intermediate_size", None),
    "olmoe": _Names(("num_experts",), "intermediate_size", "norm_topk_prob"),
    "gpt_oss": _Names(("num_local_experts",), "intermediate_size", None, has_bias=True),
}


def parse_experts(fields: Fields, architecture: str) -> Experts | None:
    """Return the experts of a model type that has them; None for others."""
    if architecture not in _NAMES:
        return None
    names = _NAMES[architecture]
    num = fields.count(next((name for name in names.num if fields.has(name)), names.num[0]))
    per_token = fields.count("num_experts_per_tok")
    if per_token > num and not fields.problems:
        fields.problem(f"num_experts_per_tok {per_token} is more than {num} experts")
    return Experts(
        num,
        per_token,
        fields.count(names.width),
        norm_topk=names.norm_topk is None or fields.flag(names.norm_topk),
        dense_layers=_dense_layers(fields) if names.has_dense_layers else (),
        has_bias=names.has_bias,
    )


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """The layers without experts: those that are listed, and all but every `sparse step`-th."""
    num_layers, step = fields.count("num_hidden_layers"), fields.count("decoder_sparse_step", 1)
    listed = fields.data.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        fields.problem(f"mlp_only_layers must be a list of layers, found {listed!r}")
        return ()
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)


def experts_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields from which `parse_experts` makes the same."""
    experts = config.experts
    if experts is None or config.architecture not in _NAMES:
        return {}
    names = _NAMES[config.architecture]
    data: dict[str, Any] = {
        names.num[0]: experts.num,
        "num_experts_per_tok": experts.per_token,
        names.width: experts.intermediate_size,
    }
    if names.norm_topk is not None:
        data[names.norm_topk] = experts.norm_topk
    if names.has_dense_layers:
        data |= {"decoder_sparse_step": 1, "mlp_only_layers": list(experts.dense_layers)}
    return data
