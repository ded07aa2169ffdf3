"""What models are for, and which settings are of no use for it. No JAX."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from shiftjax.config import SETTINGS, EngineConfig
from shiftjax.options import ConfigError, Setting, shown

if TYPE_CHECKING:
    from shiftjax.arch.config import ModelConfig

Task = Literal["generate", "embed"]

_DOES: Mapping[Task, str] = MappingProxyType(
    {"generate": "generates text", "embed": "embeds texts"}
)
_OF_BOTH = frozenset(
    (
        *("model", "revision", "download_dir", "plugins", "task", "tokenizer", "dtype", "seed"),
        *("max_model_len", "cache_dir", "memory_fraction"),
        *("sp", "tp", "dp", "devices", "max_num_seqs", "max_num_batched_tokens"),
    )
)
# Settings of the engine that one task alone has a use for: a new one is of decoders until said so.
ENGINE_TASKS: Mapping[str, Task] = MappingProxyType(
    dict.fromkeys((name for name in SETTINGS if name not in _OF_BOTH), "generate")
)


def task_of(config: EngineConfig, model: "ModelConfig") -> Task:
    """What is asked for; if nothing is, encoders and what scores embed, and all others generate.

    Raises ConfigError for one of them that shall generate.
    """
    wanted = config.model.task
    if model.encoder is None and not model.num_scores:
        return "generate" if wanted == "auto" else wanted
    if wanted == "generate":
        kind = "has a head that scores" if model.num_scores else "is an encoder: it embeds"
        raise ConfigError([f"{model.name} {kind} texts, and generates none"])
    return "embed"


def idle_settings(
    values: Mapping[str, Any],
    settings: Mapping[str, Setting],
    tasks: Mapping[str, Task],
    model: "ModelConfig",
    task: Task,
) -> list[str]:
    """A line for each value that is not its setting's default, though of another task alone."""
    return [
        f"{name} = {shown(value)} has no meaning for {model.name}, which {_DOES[task]}: drop it"
        for name, value in values.items()
        if tasks.get(name, task) != task and value != settings[name].default
    ]
