"""The settings of low-rank adapters. No JAX."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiftjax.options import option, settings_of, shown

CONFIG = "adapter_config.json"  # of a directory that is an adapter
_KEYS = "name", "path", "base_model_name"  # the last is vLLM's, and changes no token
RANKS = 8, 16, 32, 64, 128, 256, 512  # that factors are padded to
MOST_BY_DEFAULT = 8  # slots, unless asked for


def parse_modules(text: str) -> dict[str, str]:
    """Return paths by name of `name=path,name=path`, or of vLLM's JSON. Raises ValueError."""
    found: dict[str, str] = {}
    for name, path in _pairs(text):
        if not name or not path:
            raise ValueError(f"must be NAME=PATH, with commas, got {shown(text)}")
        if name in found:
            raise ValueError(f"has the name {shown(name)} twice")
        found[name] = path
    return found


def _pairs(text: str) -> list[tuple[str, str]]:
    if not text.lstrip().startswith(("{", "[")):
        parts = (each.strip().partition("=") for each in text.split(","))
        return [(name, path) for name, _, path in parts]
    try:
        given = json.loads(text)
    except ValueError:
        raise ValueError(f"must be NAME=PATH or JSON, got {shown(text)}") from None
    entries = given if isinstance(given, list) else [given]
    pairs = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(f"must have objects with name and path, got {shown(text)}")
        if unknown := [key for key in entry if key not in _KEYS]:
            raise ValueError(f"has {shown(unknown[0])} beside name and path, which is unknown")
        name, path = entry.get("name"), entry.get("path")
        pairs.append((name if isinstance(name, str) else "", path if isinstance(path, str) else ""))
    return pairs


def _modules(text: str) -> str | None:
    try:
        parse_modules(text)
    except ValueError as error:
        return str(error)
    return None


def _rank(rank: int) -> str | None:
    return None if rank in RANKS else f"must be one of {', '.join(map(str, RANKS))}, got {rank}"


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (LoRA), served beside the model by their names."""

    enable_lora: bool = option(False, "serve adapters; what steps need for them is compiled")
    lora_modules: str | None = option(
        None,
        "adapters that are there from the start, as NAME=PATH with commas: PEFT's directories",
        check=_modules,
    )
    max_loras: int | None = option(
        None,
        "adapters that devices hold, and steps have, at once; default: as many as lora_modules "
        f"has, {MOST_BY_DEFAULT} at most",
        low=1,
        high=256,
    )
    max_lora_rank: int = option(16, "largest rank of an adapter; smaller are padded", check=_rank)
    max_cpu_loras: int | None = option(
        None,
        "adapters that host memory holds; others are read again when they are asked for; default: "
        "all that are loaded",
        low=1,
        high=1 << 20,
    )
    lora_experts: bool = option(
        False,
        "adapters may change experts, too: factors of all of them are held, and steps with "
        "adapters multiply experts in XLA's loops",
    )
    lora_folder: str | None = option(
        None, "folder from which clients with the control key may load adapters; default: none"
    )

    @property
    def modules(self) -> dict[str, str]:
        """Paths of the adapters that are there from the start, by name."""
        return parse_modules(self.lora_modules) if self.lora_modules else {}

    @property
    def folder(self) -> Path | None:
        """Where adapters may be loaded from while it serves; None: nowhere."""
        return Path(self.lora_folder).expanduser() if self.lora_folder else None

    @property
    def num_slots(self) -> int:
        """Adapters that devices hold at once; 0: none is served."""
        if not self.enable_lora:
            return 0
        return self.max_loras or min(max(1, len(self.modules)), MOST_BY_DEFAULT)


NO_LORA = LoraOptions()


def lora_problems(options: Mapping[str, Any]) -> list[str]:
    """What is wrong between the settings of adapters, of all settings by name."""
    if not options["enable_lora"]:
        own = settings_of(LoraOptions).items()
        given = [name for name, setting in own if options[name] != setting.default]
        return [f"{name} has no meaning without enable_lora: set it, too" for name in given[:1]]
    most, held = options["max_cpu_loras"], options["max_loras"]
    if held and most and most < held:
        return [f"max_cpu_loras = {most} is less than max_loras = {held}"]
    return []
