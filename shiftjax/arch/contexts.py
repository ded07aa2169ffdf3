"""How long a context may be, unless settings say so. No JAX."""

from shiftjax.arch.config import ModelConfig

# Every step carries a table of blocks as long as the longest context, for each of its sequences:
# at blocks of 16 tokens 17 MB for 256 sequences of so many tokens, and 671 MB for 10 million.
LONGEST_BY_DEFAULT = 262_144


def longest_context(model: ModelConfig, wanted: int | None = None) -> int:
    """Return the tokens that prompt and output may have: `wanted`, or those that are usual."""
    return wanted or min(model.max_position_embeddings, LONGEST_BY_DEFAULT)
