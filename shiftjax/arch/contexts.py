"""How long a context may be, unless settings say so. No JAX."""

import logging
from functools import cache

from shiftjax.arch.config import ModelConfig

# Every step carries a table of blocks as long as the longest context, for each of its sequences:
# at blocks of 16 tokens 17 MB for 256 sequences of so many tokens, and 671 MB for 10 million.
LONGEST_BY_DEFAULT = 262_144
logger = logging.getLogger(__name__)


def longest_context(model: ModelConfig, wanted: int | None = None) -> int:
    """Return the tokens that prompt and output may have: `wanted`, or those that are usual."""
    return wanted or min(model.max_position_embeddings, most_attended(model) or LONGEST_BY_DEFAULT)


def most_attended(model: ModelConfig) -> int | None:
    """Return how many keys an indexer chooses for a token; None: tokens attend to all."""
    return None if model.latent is None else model.latent.index_topk


@cache  # once in a process: a plan resolves dozens of deployments of one model
def say_served(name: str, longest: int, most: int, attended: int | None) -> None:
    """Warn that contexts of `longest` tokens are served of a model that knows `most` positions."""
    words = "%s is served up to %d tokens of its %d: --max-model-len asks for more"
    if attended:
        words = "%s is served up to %d tokens of its %d: beyond, an indexer would have to choose"
    logger.warning(words, name, longest, most)


def context_problems(model: ModelConfig, wanted: int | None) -> list[str]:
    """Return why contexts cannot be as long as is wanted; none: they can."""
    limit, most = model.max_position_embeddings, most_attended(model)
    if wanted is not None and wanted > limit:
        return [f"max_model_len = {wanted} is beyond {model.name}'s {limit} positions"]
    if wanted is not None and most is not None and wanted > most:
        words = f"{model.name} attends to {most} tokens of a context, which an indexer chooses"
        return [
            f"max_model_len = {wanted}: {words} (DeepSeek Sparse Attention), and there is no "
            f"indexer here: use {most}, up to which all are attended to"
        ]
    return []
