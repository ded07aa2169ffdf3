"""Experts in Hugging Face's `config.json`, and back."""

from typing import Any, Literal, NamedTuple

from shiftjax.arch.config import Experts, ModelConfig
from shiftjax.weights.typed_fields import Fields


class _Names(NamedTuple):
    """What a model type calls the fields of its experts."""

    num: tuple[str, ...]  # the first is written, all are read
    width: str
    norm_topk: str | None = None  # None: the weights of a token's experts always sum to one
    dense: Literal["none", "listed", "first", "others"] = (
        "none"  # how layers without experts are told
    )
    has_bias: bool = False
    shared: str | None = None  # the width of the expert that all tokens use
    num_shared: str | None = None  # or how many of the others' width it has
    has_shared_gate: bool = False
    has_sigmoids: bool = False  # with a correction, groups and a scale
    has_groups: bool = False  # and a scale, of softmax
    scales_input: bool = False  # by a sigmoid
    per_token: str = "num_experts_per_tok"
    flag: str | None = None  # says whether there are experts, beside an MLP; None: there are


_NUM, _WIDTH, _NORM = ("num_experts",), "moe_intermediate_size", "norm_topk_prob"
_NAMES = {
    "qwen2_moe": _Names(
        *(_NUM, _WIDTH, _NORM, "listed"),
        shared="shared_expert_intermediate_size",
        has_shared_gate=True,
    ),
    "qwen3_moe": _Names((*_NUM, "num_local_experts"), _WIDTH, _NORM, "listed"),
    "mixtral": _Names(("num_local_experts", *_NUM), "intermediate_size"),
    "minimax_m2": _Names(("num_local_experts",), "intermediate_size", has_sigmoids=True),
    "gemma4_text": _Names(_NUM, _WIDTH, per_token="top_k_experts", flag="enable_moe_block"),
    "llama4_text": _Names(
        *(("num_local_experts",), "intermediate_size", None, "others"),
        shared="intermediate_size",
        scales_input=True,
    ),
    "olmoe": _Names(_NUM, "intermediate_size", _NORM),
    "gpt_oss": _Names(("num_local_experts",), "intermediate_size", has_bias=True),
    **dict.fromkeys(
        ("glm4_moe", "deepseek_v3", "kimi_k2", "glm_moe_dsa"),
        _Names(
            *(("n_routed_experts",), _WIDTH, _NORM, "first"),
            num_shared="n_shared_experts",
            has_sigmoids=True,
        ),
    ),
    "deepseek_v2": _Names(
        *(("n_routed_experts",), _WIDTH, _NORM, "first"),
        num_shared="n_shared_experts",
        has_groups=True,
    ),
}


def parse_experts(fields: Fields, architecture: str) -> Experts | None:
    """Return the experts of a model type that has them; None for others."""
    if architecture not in _NAMES:
        return None
    names = _NAMES[architecture]
    if names.flag and not fields.flag(names.flag):
        return None
    num = fields.count(next((name for name in names.num if fields.has(name)), names.num[0]))
    per_token, width = fields.count(names.per_token), fields.count(names.width)
    if per_token > num and not fields.problems:
        fields.problem(f"{names.per_token} {per_token} is more than {num} experts")
    if names.scales_input and per_token != 1:
        fields.problem(f"num_experts_per_tok must be 1, found {per_token}")
    shared = fields.count(names.shared, minimum=0) if names.shared else 0
    if names.num_shared:
        shared = width * fields.count(names.num_shared, minimum=0)
    return Experts(
        num,
        per_token,
        width,
        shared,
        has_shared_gate=names.has_shared_gate and shared > 0,
        norm_topk=_norms_topk(fields, names),
        dense_layers=_dense_layers(fields, names),
        has_bias=names.has_bias,
        beside_mlp=names.flag is not None,
        **_sigmoids(fields, num, per_token) if names.has_sigmoids else {},
        **_best_groups(fields, num, per_token) if names.has_groups else {},
        **{"scores": "sigmoid", "scales_input": True} if names.scales_input else {},
    )


def _norms_topk(fields: Fields, names: _Names) -> bool:
    """Whether the weights of a token's experts sum to one."""
    return fields.flag(names.norm_topk) if names.norm_topk else not names.scales_input


def expert_fields(architecture: str, num: int | None, width: int | None) -> dict[str, Any]:
    """Return the fields that say how many experts there are, and how wide: those that are known."""
    if architecture not in _NAMES:
        return {}
    names = _NAMES[architecture]
    given = {names.num[0]: num, names.width: width}
    return {name: value for name, value in given.items() if value is not None}


def _sigmoids(fields: Fields, num: int, per_token: int) -> dict[str, Any]:
    """How experts are chosen by sigmoids, of a number more for each."""
    return {"scores": "sigmoid", "has_correction": True} | _groups(fields, num, per_token, 2)


def _best_groups(fields: Fields, num: int, per_token: int) -> dict[str, Any]:
    """How DeepSeek-V2 chooses them by softmax: only `topk_method` says whether groups count."""
    if fields.data.get("topk_method") == "group_limited_greedy":
        return _groups(fields, num, per_token, 1)
    return {"scale": fields.positive("routed_scaling_factor", 1.0)}


def _groups(fields: Fields, num: int, per_token: int, least: int) -> dict[str, Any]:
    """Out of which groups experts are chosen, of `least` experts each; the scale of weights."""
    groups, kept = fields.count("n_group", 1), fields.count("topk_group", 1)
    if num % groups or (groups > 1 and num < least * groups):
        parts = f"equal parts of {least} or more"
        fields.problem(f"n_group must cut {num} experts in {parts}, not {groups}")
    elif kept > groups or kept * num // groups < per_token:
        fields.problem(f"topk_group must leave {per_token} experts, and be {groups} at most")
    return {
        "num_groups": groups,
        "groups_per_token": kept,
        "scale": fields.positive("routed_scaling_factor", 1.0),
    }


def _dense_layers(fields: Fields, names: _Names) -> tuple[int, ...]:
    """The layers without experts: the first ones; or those listed, and all but `step`-th ones."""
    num_layers = fields.count("num_hidden_layers")
    if names.dense == "first" and fields.has("mlp_layer_types"):
        return _not_sparse(fields, num_layers)
    if names.dense == "first":
        return tuple(range(min(num_layers, fields.count("first_k_dense_replace", 1, minimum=0))))
    if names.dense == "none":
        return ()
    if names.dense == "others":
        return _others(fields, num_layers)
    step, listed = fields.count("decoder_sparse_step", 1), fields.data.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        fields.problem(f"mlp_only_layers must be a list of layers, found {listed!r}")
        return ()
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)


def _not_sparse(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers that `mlp_layer_types` calls dense: the first ones."""
    name = "mlp_layer_types"
    kinds = fields.data[name]
    if not isinstance(kinds, list) or set(map(str, kinds)) - {"dense", "sparse"}:
        fields.problem(f"{name} must be a list of dense and sparse, found {kinds!r}")
        return ()
    if len(kinds) != num_layers and not fields.problems:
        fields.problem(f"{name} must have {num_layers} entries, found {len(kinds)}")
    dense = tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    if dense != tuple(range(len(dense))) and not fields.problems:
        fields.problem(f"{name} must begin with its dense layers, found {kinds!r}")
    return dense


def _others(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers that `moe_layers` does not list, or a step leaves out."""
    step, listed = fields.count("interleave_moe_layer_step"), fields.data.get("moe_layers")
    if listed is None:
        return tuple(i for i in range(num_layers) if (i + 1) % step)
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        fields.problem(f"moe_layers must be a list of layers, found {listed!r}")
        return ()
    return tuple(i for i in range(num_layers) if i not in listed)


def experts_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields from which `parse_experts` makes the same."""
    experts, names = config.experts, _NAMES.get(config.architecture)
    if names is None:
        return {}
    if experts is None:
        return {names.flag: False} if names.flag else {}
    data: dict[str, Any] = {
        names.num[0]: experts.num,
        names.per_token: experts.per_token,
        names.width: experts.intermediate_size,
    }
    if names.flag:
        data[names.flag] = True
    if names.norm_topk is not None:
        data[names.norm_topk] = experts.norm_topk
    if names.dense == "listed":
        data |= {"decoder_sparse_step": 1, "mlp_only_layers": list(experts.dense_layers)}
    if names.dense == "others":
        layers = range(config.num_layers)
        data["moe_layers"] = [i for i in layers if i not in experts.dense_layers]
    if names.dense == "first":
        data["first_k_dense_replace"] = len(experts.dense_layers)
    if names.shared is not None:
        data[names.shared] = experts.shared_intermediate_size
    if names.num_shared is not None:
        data[names.num_shared] = experts.shared_intermediate_size // experts.intermediate_size
    if names.has_sigmoids or names.has_groups:
        data |= {"n_group": experts.num_groups, "topk_group": experts.groups_per_token}
        data["routed_scaling_factor"] = experts.scale
    return data
