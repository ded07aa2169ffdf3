"""Room for adapters in a model, and what they are not had with. No JAX."""

from collections.abc import Iterator
from dataclasses import replace

from shiftjax.arch.config import LoraSlots, ModelConfig
from shiftjax.arch.lora import adapted
from shiftjax.config import EngineConfig
from shiftjax.options import ConfigError


def with_adapters(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the model with the slots that the settings ask for.

    Raises ConfigError for what adapters cannot be had with, each by its name.
    """
    lora = config.lora
    if not lora.num_slots:
        return model
    problems = list(_problems(config, model))
    if problems:
        raise ConfigError([f"enable_lora cannot be had with {problem}" for problem in problems])
    slots = LoraSlots(lora.num_slots, lora.max_lora_rank, lora.lora_experts)
    return replace(model, lora=slots)


def _problems(config: EngineConfig, model: ModelConfig) -> Iterator[str]:
    numerics = config.model.numerics
    if model.encoder is not None or not adapted(model):
        yield f"{model.name}: it has no matrices that adapters may change"
    if config.lora.lora_experts and model.experts is None:
        yield f"lora_experts: {model.name} has no experts"
    if numerics in ("invariant", "integer"):
        yield f"numerics = {numerics}: what adapters add is not proven to have the same bits"
