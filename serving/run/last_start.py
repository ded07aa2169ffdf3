"""What the phases of a start took the last time, kept beside compiled programs. No JAX."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from serving.server.options import ServerOptions
from shiftjax.config import EngineConfig
from shiftjax.settings import compile_cache_place

FOLDER = "starts"
MOST_BYTES = 4096

OF_DEVICES = ("open", "import JAX", "weights", "compile", "warm up", "first step")
OF_SIMULATED = ("open", "first step")


def plan_of(config: EngineConfig, options: ServerOptions) -> tuple[str, ...]:
    """The phases of a start in their order, but those that only some models have."""
    if options.simulate is not None:
        return OF_SIMULATED
    if config.host.is_one_of_several:
        return (OF_DEVICES[0], "wait for hosts", *OF_DEVICES[1:])
    return OF_DEVICES


def read_last_start(config: EngineConfig) -> Mapping[str, float]:
    """Seconds by phase of the last start with these settings; empty: none is known."""
    try:
        place = _place(config)
        text = "" if place is None else place.read_text("utf-8")[:MOST_BYTES]
        found = json.loads(text or "{}")
        return {str(name): max(0.0, float(seconds)) for name, seconds in found.items()}
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):
        return {}  # somebody else's, or cut: it is only a guess


def keep_last_start(config: EngineConfig, seconds: Mapping[str, float]) -> None:
    """Keep what the phases of this start took, if there is a place for it."""
    with contextlib.suppress(OSError, RuntimeError):  # the start itself makes the cache
        place = _place(config)
        if place is None:
            return
        place.parent.mkdir(mode=0o700, exist_ok=True)
        rounded = {name: round(each, 3) for name, each in seconds.items()}
        place.write_text(json.dumps(rounded), "utf-8")


def _place(config: EngineConfig) -> Path | None:
    folder = compile_cache_place(config)
    if folder is None:
        return None
    settings = json.dumps(config.flat() | config.controls(), sort_keys=True, default=str)
    return (
        folder.expanduser() / FOLDER / f"{hashlib.sha256(settings.encode()).hexdigest()[:16]}.json"
    )
