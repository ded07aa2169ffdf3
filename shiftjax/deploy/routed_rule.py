"""Which models can tell the experts that their tokens chose. No JAX."""

from shiftjax.arch.config import ModelConfig
from shiftjax.config import EngineConfig
from shiftjax.costs.routing import num_counted


def routed_problems(config: EngineConfig, model: ModelConfig) -> list[str]:
    """Say why the setting `routed_experts` cannot be had with a model; nothing: it can, or is off.

    Late layers compute output tokens alone, so their experts are not known of all tokens.
    """
    if not config.model.routed_experts:
        return []
    wanted = f"routed_experts cannot be had with {model.name}"
    if model.experts is None:
        return [f"{wanted}, which has no experts: drop it"]
    if num_counted(model) < sum(parts.has_experts for parts in model.parts):
        return [f"{wanted}, whose last layers compute output tokens alone: drop it"]
    return []
