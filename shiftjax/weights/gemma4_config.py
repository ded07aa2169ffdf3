"""What `config.json` of Gemma 4 says that no other model type does, and back.

Layers that see everything have heads of another width, fewer KV heads, and may take the projection
of keys for values. Published files say so in `global_head_dim` and `num_global_key_value_heads`;
transformers writes `per_layer_config`, which it prefers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shiftjax.arch.config import LayerKind, ModelConfig
from shiftjax.weights.typed_fields import Fields

GEMMA4 = "gemma4_text", "gemma4_unified_text"  # the latter of 12B: without inputs and experts
_OWN = {"num_key_value_heads", "head_dim"}  # what may differ between layers


def with_heads(fields: Fields, kinds: Sequence[LayerKind]) -> list[LayerKind]:
    """Return the kinds of layers with their own heads."""
    shapes = _listed_shapes(fields, len(kinds))
    if shapes is None:
        shapes = [None if kind.sliding_window else _global_shape(fields) for kind in kinds]
    shares = fields.flag("attention_k_eq_v")
    own = fields.count("num_key_value_heads"), fields.count("head_dim")
    made = []
    for kind, shape in zip(kinds, shapes, strict=True):
        heads = None if shape in (None, own) else shape
        takes_keys = shares and kind.sliding_window is None
        made.append(replace(kind, heads=heads, keys_are_values=takes_keys))
    _check(fields, {kind.heads or own for kind in made})
    shared = fields.count("num_kv_shared_layers", 0, minimum=0)
    first = max(0, len(made) - shared)
    if set(made[first:]) - set(made[:first]):
        fields.problem(
            f"num_kv_shared_layers {shared} leaves {first} layers with keys and values: one of "
            "each kind that later layers have is needed"
        )
    return made


def parse_gemma4(fields: Fields, architecture: str) -> dict[str, Any]:
    """Return what else a file says: inputs of layers, and how many read the cache of others."""
    if architecture not in GEMMA4:
        return {}
    width = fields.count("hidden_size_per_layer_input", 0, minimum=0)
    vocab = fields.count("vocab_size")
    own = fields.count("vocab_size_per_layer_input", vocab)
    if width and own != vocab:
        fields.problem(f"vocab_size_per_layer_input must be {vocab} as vocab_size is, found {own}")
    shared = fields.count("num_kv_shared_layers", 0, minimum=0)
    return {
        "layer_input_width": width,
        "num_shared_kv_layers": shared,
        "has_wide_sharers": shared > 0 and fields.flag("use_double_wide_mlp"),
    }


def _global_shape(fields: Fields) -> tuple[int, int]:
    """Return the KV heads and their width of layers that see everything."""
    usual, name = fields.count("num_key_value_heads"), "num_global_key_value_heads"
    has_own = fields.flag("attention_k_eq_v")  # transformers ignores the field without this one
    kv_heads = fields.count(name, usual) if has_own else usual
    return kv_heads, fields.count("global_head_dim")


def _listed_shapes(fields: Fields, num_layers: int) -> list[tuple[int, int] | None] | None:
    """Return what `per_layer_config` says of each layer, as transformers does; None: it is absent.

    A null is not absent: then no layer has anything of its own.
    """
    name = "per_layer_config"
    shapes: list[tuple[int, int] | None] = [None] * num_layers
    if name not in fields.data:
        return None
    listed = fields.data[name] or {}
    usual = {each: fields.count(each) for each in _OWN}
    for layer, found in listed.items() if isinstance(listed, dict) else [("", None)]:
        if (
            not isinstance(found, dict)
            or found.keys() - _OWN
            or not layer.isdecimal()
            or int(layer) >= num_layers
        ):
            fields.problem(f"{name} must have {sorted(_OWN)} of layers, found {listed!r}")
            return shapes
        inner = Fields(usual | found, f"{fields.file}: {name}")
        inner.problems = fields.problems
        shapes[int(layer)] = inner.count("num_key_value_heads"), inner.count("head_dim")
    return shapes


def _check(fields: Fields, shapes: set[tuple[int, int]]) -> None:
    heads = fields.count("num_attention_heads")
    for kv_heads, width in shapes:
        if heads % kv_heads or width % 2:
            fields.problem(
                f"num_attention_heads {heads} must be a multiple of {kv_heads} KV heads, and "
                f"{width} numbers of a head even"
            )


def gemma4_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields from which the same is read, as published files have them."""
    full = [kind for kind in config.kinds if kind.sliding_window is None]
    if config.architecture not in GEMMA4 or not full:
        return {}
    kv_heads, width = full[0].heads or (config.num_kv_heads, config.head_dim)
    return {
        "num_kv_shared_layers": config.num_shared_kv_layers,
        "use_double_wide_mlp": config.has_wide_sharers,
        "hidden_size_per_layer_input": config.layer_input_width,
        "vocab_size_per_layer_input": config.vocab_size,
        "attention_k_eq_v": full[0].keys_are_values,
        "num_global_key_value_heads": kv_heads,
        "global_head_dim": width,
        "final_logit_softcapping": config.logit_soft_cap,
        "hidden_activation": "gelu_pytorch_tanh",
    }
