"""Write `tests/data/removals.json`: what transformers makes of a `config.json` without a field.

It runs in an environment with transformers, which the project itself never needs:

    python tests/oracle/make_removals.py

The configurations are those of `tests/data/parity` and of CHANGED, each in the layout of
transformers 5 and, where it has no kinds of rotary embeddings, in that of version 4. For each:

    config    the file
    whole     the fields of the configuration that transformers makes of it
    without   for each field, or `rope_parameters.field`, what of `whole` changes where the file
              lacks it; a text: transformers refuses the file
    null      the same of fields that are null, where transformers reads that
"""
# pyright: reportMissingImports=false

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from make_hf_defaults import NO_MATTER
from transformers import AutoConfig, PreTrainedConfig

DATA = Path(__file__).parent.parent / "data"
NOT_REMOVED = ("model_type", "architectures", "dtype", "transformers_version", "torch_dtype")
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
# By a name of ours: a configuration of `tests/data/parity`, and what is other in it; ...: absent.
CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_windows": ("qwen2", WINDOWS | {"layer_types": ..., "num_hidden_layers": 30}),
    "qwen3_windows": ("qwen3", WINDOWS | {"layer_types": ..., "num_hidden_layers": 30}),
    "qwen2_moe_windows": ("qwen2_moe", WINDOWS | {"layer_types": ..., "num_hidden_layers": 30}),
    "qwen3_moe_windows": ("qwen3_moe", WINDOWS),
    "gemma3_pattern": ("gemma3_text", {"layer_types": ..., "sliding_window_pattern": 2}),
    "llama4_steps": (
        "llama4_text",
        {
            "moe_layers": ...,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [],
            "layer_types": ...,
        }
        | {"no_rope_layer_interval": 2, "use_qk_norm": False, "attn_temperature_tuning": False},
    ),
    "mixtral_windows": ("mixtral", {"sliding_window": 8, "num_experts_per_tok": 1}),
    "glm4_moe_groups": ("glm4_moe", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    "gemma4_published": (
        "gemma4_text",
        {"per_layer_config": ..., "global_head_dim": 16, "num_global_key_value_heads": 2},
    ),
    "gemma4_two_widths": (  # the number of KV heads does not count here
        "gemma4_text",
        {"per_layer_config": ..., "global_head_dim": 16, "num_global_key_value_heads": 2}
        | {"attention_k_eq_v": False, "layer_types": ["sliding_attention"] * 4},
    ),
    "qwen2_moe_steps": ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
}


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and contents of the files, in both layouts."""
    for path in sorted(DATA.glob("parity/*/config.json")):
        yield from in_layouts(path.parent.name, json.loads(path.read_text()))
    for name in ("bert", "xlm-roberta"):
        data = json.loads((DATA / "encoders" / name / "config.json").read_text())
        yield name, data
    yield "roberta", data | {"model_type": "roberta"}
    for name, (base, changes) in CHANGED.items():
        data = json.loads((DATA / "parity" / base / "config.json").read_text()) | changes
        yield from in_layouts(name, {key: data[key] for key in data if data[key] is not ...})


def in_layouts(name: str, data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a file as it is, and as transformers 4 wrote it."""
    data = {key: value for key, value in data.items() if key != "quantization_config"}
    yield name, data
    older = dict(data)
    rope = dict(older.pop("rope_parameters", None) or {})
    if "rope_theta" not in rope:
        return
    for outside in ("rope_theta", "partial_rotary_factor"):
        if outside in rope:
            older[outside] = rope.pop(outside)
    older["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    yield f"{name} as 4", older


def fields_of(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that matter of what transformers makes of a file."""
    made = AutoConfig.for_model(**data)
    declared = {field.name for field in dataclasses.fields(made)}
    declared -= {field.name for field in dataclasses.fields(PreTrainedConfig)}
    more = "tie_word_embeddings", "per_layer_config"  # what Gemma 4's layers have of their own
    names = {*declared, *data, *made.attribute_map.values(), *more}
    known = set(filter(matters, names))
    return {"model_type": made.model_type} | {
        name: value
        for name, value in json.loads(json.dumps(made.to_dict(), default=str)).items()
        if name in known
    }


def matters(name: str) -> bool:
    """Whether a field changes tokens, and may be left out."""
    return name not in NOT_REMOVED and not NO_MATTER.fullmatch(name) and name[0] != "_"


def removals(data: dict[str, Any], inside: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every field that can be left out, and the file without it."""
    for name in filter(matters, data):
        yield inside + name, {key: value for key, value in data.items() if key != name}
        if isinstance(data[name], dict):
            for inner, rest in removals(data[name], f"{inside}{name}."):
                yield inner, data | {name: rest}


def changes(whole: dict[str, Any], data: dict[str, Any]) -> dict[str, Any] | str:
    """Return what of `whole` changes in another file; a text: transformers refuses it."""
    try:
        found = fields_of(data)
    except Exception as error:  # of many classes: it is all the same a refusal
        return type(error).__name__
    gone = {key: None for key in whole if key not in found}
    return {key: value for key, value in found.items() if whole.get(key, ...) != value} | gone


def described(data: dict[str, Any]) -> dict[str, Any]:
    """Return what the file has of a configuration."""
    whole = fields_of(data)
    without = {name: changes(whole, rest) for name, rest in removals(data)}
    nulls = {name: changes(whole, data | {name: None}) for name in filter(matters, data)}
    null = {name: found for name, found in nulls.items() if not isinstance(found, str)}
    return {"config": data, "whole": whole, "without": without, "null": null}


def main() -> None:
    """Write the file, a line for each configuration."""
    logging.disable(logging.ERROR)
    found = {name: described(data) for name, data in configs()}
    rows = (
        f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}"
        for name, row in found.items()
    )
    text = ",\n".join(rows)
    (DATA / "removals.json").write_text(f"{{\n{text}\n}}\n")
    print(len(found), "configurations,", sum(len(row["without"]) for row in found.values()))


if __name__ == "__main__":
    main()
