"""How devices store matrices of four bits: codes two in a byte, scales of groups of inputs. No JAX.

Input 2i is in the lower bits of byte i, input 2i + 1 in the higher. Scales, and zero points where
a checkpoint has them, are weights of their own, of the same split as the codes:

    column-parallel   codes [*out, in / 2]               scales [*out, groups]
    row-parallel      codes [blocks, out, in / blocks / 2]   scales [blocks, groups of a block, out]
    experts           codes [experts, out, in / 2]       scales [experts, groups, out]

A shard is whole outputs, blocks or experts, so it never cuts a group but where a block would. There
groups are stored in smaller parts, each with the scale of the whole; what is left of few inputs is
refused.
"""

import math
from functools import lru_cache

import numpy as np

from shiftjax.arch.config import Codes
from shiftjax.arch.weights import Weight
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout

LEAST_PART = 16  # inputs; a float32 for fewer would take half as much as their codes
SYMMETRIC_ZERO = 8  # of codes without zero points
ZERO = "_zero"  # after the name of the matrix whose zero points they are


def num_inputs(weight: Weight) -> int:
    """Return the inputs of a matrix of the table."""
    return math.prod(weight.shape[:-1]) if weight.transposed else weight.shape[-1]


def can_be_packed(inputs: int, codes: Codes) -> bool:
    """Whether rows of so many inputs are whole groups, of whole bytes."""
    group = codes.group or inputs
    return inputs % group == 0 and group % 2 == 0


def packed_parts(
    plain: Weight, layout: Layout, codes: Codes, scale_name: str
) -> tuple[Weight, ...]:
    """Return codes, scales, and zero points where there are any, of a stored matrix.

    Raises ConfigError where a shard would cut a group.
    """
    packed = plain._replace(kind="codes")
    if plain.transposed:
        groups = groups_of_blocks(plain, layout, codes)
        blocks, outputs = layout.padded_for, plain.shape[-1]
        half = plain.num_elements // (2 * blocks * outputs)
        axes = "blocks", None, None
        packed = packed._replace(shape=(blocks, outputs, half), axes=axes)
        shape = *groups.shape, outputs
    else:
        *outputs, inputs = plain.shape
        num, axes = inputs // (codes.group or inputs), plain.axes
        packed = packed._replace(shape=(*outputs, inputs // 2))
        is_expert = plain.axes[0] == "experts"
        shape = (outputs[0], num, *outputs[1:]) if is_expert else (*outputs, num)
    scales = plain._replace(
        name=f"{plain.name}{scale_name}", kind="scales", shape=shape, axes=axes, transposed=False
    )
    zeros = scales._replace(name=f"{plain.name}{ZERO}", kind="zeros")
    return (packed, scales, zeros) if codes.has_zeros else (packed, scales)


@lru_cache(maxsize=1024)
def groups_of_blocks(plain: Weight, layout: Layout, codes: Codes) -> np.ndarray:
    """Return which group of the checkpoint each group of each block is: int `[blocks, groups]`.

    Of a stored row-parallel matrix; -1 where all inputs are padding.

    Raises:
        ConfigError: inputs of one stored group are of several groups of the checkpoint.
    """
    axis = plain.axes[0]
    assert axis is not None
    rows = layout.source_rows(axis, layout.stored_in(plain))[:, None]
    per_row = math.prod(plain.shape[1:-1])
    inputs = np.where(rows < 0, -1, rows * per_row + np.arange(per_row)).reshape(-1)
    group = codes.group or int(inputs.max()) + 1
    source = np.where(inputs < 0, -1, inputs // group).reshape(layout.padded_for, -1)
    each = source.shape[1]
    for size in dict.fromkeys((group, each, math.gcd(group, each))):
        if each % size or size % 2 or size < min(each, LEAST_PART):
            continue
        parts = source.reshape(layout.padded_for, each // size, size)
        found = parts.max(axis=-1)
        if ((parts == found[..., None]) | (parts < 0)).all():
            return found
    raise ConfigError(
        [
            f"{plain.name}: {layout.padded_for} devices have {each} inputs each, which cuts groups "
            f"of {group} that share a scale: use other degrees, or --quantization none"
        ]
    )
