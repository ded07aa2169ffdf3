"""What a Hugging Face `config.json` means by fields that it leaves out.

The facts are those of transformers' configuration classes: `hf_defaults.json` has them with the
version, and `tests/oracle/make_hf_defaults.py` writes it.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

FILE = "hf_defaults.json"
ROPE = "rope_parameters"
# Model types that transformers does not know, and the one whose class theirs extends.
_EXTENDS = {"llama_swiftkv": "llama", "kimi_k2": "deepseek_v3"}


class Defaults(NamedTuple):
    """What the configuration class of a model type declares."""

    absent: Mapping[str, Any]  # by field; null: derived from other fields, or nothing
    null: frozenset[str]  # of these a null means the default, too
    aliases: Mapping[str, str]  # another name of a field -> the field
    theta: float | None  # of rotary parameters that lack it; None: as `rope` says

    @property
    def rope(self) -> Mapping[str, Any]:
        """Rotary parameters of a file that says nothing of them."""
        return self.absent.get(ROPE) or {}

    def fill(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return a file's fields by their names, with the defaults of those that are absent.

        Rotary parameters are left as they are, because older files have them in several fields.
        """
        named = {self.aliases.get(name, name): data[name] for name in data} | {
            name: value for name, value in data.items() if name not in self.aliases
        }
        absent = {name: value for name, value in self.absent.items() if name != ROPE}
        given = {n: v for n, v in named.items() if not (v is None and n in self.null and n != ROPE)}
        return absent | given


def defaults_of(architecture: str) -> Defaults:
    """Return the defaults of a model type; Llama's for one that transformers does not know."""
    known = _read()
    return known.get(_EXTENDS.get(architecture, architecture), known["llama"])


@cache
def _read() -> dict[str, Defaults]:
    text = resources.files("shiftjax.weights").joinpath(FILE).read_text(encoding="utf-8")
    return {
        name: Defaults(row["absent"], frozenset(row["null"]), row["aliases"], row["theta"])
        for name, row in json.loads(text)["model_types"].items()
    }
