"""What models are for, and which settings are of no use for it. No JAX."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from shiftjax.arch.config import ModelConfig
from shiftjax.config import SETTINGS
from shiftjax.options import Setting, shown

Task = Literal["generate", "embed"]

_KINDS: Mapping[Task, str] = MappingProxyType({"generate": "a decoder", "embed": "an encoder"})
_OF_BOTH = frozenset(
    (
        *("model", "tokenizer", "dtype", "max_model_len", "seed", "cache_dir", "memory_fraction"),
        *("sp", "tp", "pp", "dp", "devices", "max_num_seqs", "max_num_batched_tokens"),
    )
)
# Settings of the engine that one task alone has a use for: a new one is of decoders until said so.
ENGINE_TASKS: Mapping[str, Task] = MappingProxyType(
    dict.fromkeys((name for name in SETTINGS if name not in _OF_BOTH), "generate")
)


def task_of(model: ModelConfig) -> Task:
    """Encoders embed, and all others generate."""
    return "generate" if model.encoder is None else "embed"


def idle_settings(
    values: Mapping[str, Any],
    settings: Mapping[str, Setting],
    tasks: Mapping[str, Task],
    model: ModelConfig,
) -> list[str]:
    """A line for each value that is not its setting's default, though of another task alone."""
    task = task_of(model)
    return [
        f"{name} = {shown(value)} has no meaning for {model.name}, {_KINDS[task]}: drop it"
        for name, value in values.items()
        if tasks.get(name, task) != task and value != settings[name].default
    ]
