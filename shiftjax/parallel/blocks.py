"""Which inputs of a product of codes share a scale: a block, which follows from the model. No JAX.

    hidden states     BLOCK; the last one is ragged where the size is no multiple
    inputs of o       BLOCK where heads are as wide or wider; else as many whole heads as make it,
                      if each of up to MOST_DEVICES devices then has whole blocks; else a head
    inputs of down    BLOCK, or the power of two below it that padding allows: the width is padded
                      so that every device has whole blocks (`Layout`)
    experts           as hidden states: devices have them whole

Nothing of it depends on the number of devices, so codes do not either.
"""

import math
from functools import cache

from shiftjax.arch.config import ModelConfig

BLOCK = 128
LEAST_BLOCK = 8  # inputs of down
MOST_DEVICES = 8  # that a model is cut for without another block: those of a machine
MOST_PADDING = 1 / 8  # of a width, by which it may grow so that as many devices have whole blocks


@cache
def heads_of_block(num_heads: int, num_sharing: int, head_dim: int) -> tuple[int, int]:
    """Return the inputs of a block of o, and how many heads it has; 1: one, or a part of it.

    `num_sharing` heads have the same keys and values.
    """
    if head_dim >= BLOCK:
        return math.gcd(head_dim, BLOCK), 1
    heads = BLOCK // head_dim if BLOCK % head_dim == 0 else 1
    # Where heads of the same keys are padded, blocks must not go on in those of the next.
    while heads > 1 and (
        num_heads % (MOST_DEVICES * heads) or (num_sharing > 1 and num_sharing % heads)
    ):
        heads //= 2
    return heads * head_dim, heads


@cache
def block_of_width(width: int) -> int:
    """Return the inputs of a block of down, in an MLP of this width."""
    block = BLOCK
    while block > LEAST_BLOCK:
        whole = MOST_DEVICES * block
        if -(-width // whole) * whole <= width * (1 + MOST_PADDING):
            break
        block //= 2
    return block


@cache
def rows_of_scale(model: ModelConfig) -> int:
    """Return how many neighbouring outputs share a scale where a checkpoint has square blocks.

    BLOCK, or a part of it, so that every head, width and shard is some whole ones.
    """
    sizes = [model.hidden_size, *_head_widths(model)]
    widths = [model.intermediate_size]
    if model.has_wide_sharers:
        widths.append(2 * model.intermediate_size)
    if (experts := model.experts) is not None:
        sizes.append(experts.intermediate_size)
        if experts.shared_intermediate_size:
            widths.append(experts.shared_intermediate_size)
    return math.gcd(BLOCK, *sizes, *map(block_of_width, widths))


def _head_widths(model: ModelConfig) -> list[int]:
    """Return the widths of heads that matrices have."""
    if model.latent is not None:
        return [model.query_dim, model.value_dim]
    return [head_dim for _, head_dim in model.head_shapes]
