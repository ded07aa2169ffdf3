"""Write `shiftjax/weights/hf_defaults.json`: what transformers assumes of fields that are absent.

It runs in an environment with transformers, which the project itself never needs:

    python tests/oracle/make_hf_defaults.py

For each model type:

    absent    the defaults that its configuration class declares, and what it makes of a null where
              that is a constant; what it derives from other fields is null
    null      fields of which a null means the default, too
    aliases   other names of fields
    theta     that of rotary parameters that lack it, where all layers have the same

`rope_parameters` are those of a configuration that says nothing of rotary embeddings.
"""
# pyright: reportMissingImports=false

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "shiftjax" / "weights" / "hf_defaults.json"
# Of training, of padding, of what is returned: they change no token.
NO_MATTER = re.compile(
    r"use_cache|pad_token_id|pretraining_tp|output_\w+|initializer_\w+|\w*dropout\w*|\w+_pdrop"
    r"|router_\w+|layerdrop|moe_layer_start\w*_coef"
)
ENCODERS = ("bert", "roberta", "xlm-roberta")
# Other sizes, which show what is derived from them.
OTHER = {"hidden_size": 15, "num_attention_heads": 3, "num_hidden_layers": 3}


def model_types() -> list[str]:
    """Return those that the project reads and transformers knows."""
    spec = importlib.util.spec_from_file_location("traits", ROOT / "shiftjax/arch/traits.py")
    assert spec and spec.loader
    traits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(traits)
    return [name for name in (*traits.DECODERS, *ENCODERS) if name in CONFIG_MAPPING]


def defaults_of(model_type: str) -> dict[str, Any]:
    """Return what the file says of a model type."""
    make = CONFIG_MAPPING[model_type]
    base = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    declared = {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(make)
        if field.name not in base - {"tie_word_embeddings"} and not NO_MATTER.fullmatch(field.name)
    }
    plain = make()
    plain.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ
    sizes = {name: times * getattr(plain, name) for name, times in OTHER.items()}
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    other = make(**{name: size for name, size in sizes.items() if name in declared})
    other.allow_global_per_layer_attribute_access = True
    found = {name: getattr(plain, name) for name in declared}
    null = [
        name
        for name, value in declared.items()
        if value is None and found[name] is not None and found[name] == getattr(other, name)
    ]
    aliases = {}
    for name, meant in make.attribute_map.items():
        if meant in declared:
            aliases[name] = meant
        elif name in declared:
            aliases[meant] = name
    absent = {name: found[name] if name in null else value for name, value in declared.items()}
    if model_type in ("gemma4_text", "gemma4_unified_text"):  # no field of the class, but read
        absent["global_head_dim"] = plain.per_layer_config["full_attention"].head_dim
    theta = getattr(make, "default_theta", None)
    theta = theta if isinstance(theta, float | int) else None
    return {"absent": absent, "null": null, "aliases": aliases, "theta": theta}


def main() -> None:
    """Write the file, a line for each model type."""
    rows = (f"{json.dumps(name)}: {json.dumps(defaults_of(name))}" for name in model_types())
    text = ",\n".join(rows)
    version = json.dumps(transformers.__version__)
    FILE.write_text(f'{{"transformers": {version}, "model_types": {{\n{text}\n}}}}\n')


if __name__ == "__main__":
    main()
