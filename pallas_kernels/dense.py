"""Products with one matrix of four bits, for Hopper: the grouped product with a single expert.

    column-parallel   codes [1, out, in / 2]
    row-parallel      codes [blocks, out, in / 2]     blocks follow each other in the contraction

Sums stay in registers over all blocks, so that no product of a block is written. XLA puts tokens
into the order of codes (`four_bits.in_order`), and adds the parts of a contraction that was cut.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Real, UInt8

from pallas_kernels.four_bits import Groups, in_order, wrong_groups
from pallas_kernels.grouped_problem import GroupedConfig, Inputs, make_problem
from pallas_kernels.grouped_product import multiply_tiles
from pallas_kernels.grouped_split import (
    CHANNELS,
    Items,
    joined_items,
    parts_of,
    tile_rows,
)
from pallas_kernels.grouped_work import Tiles


class DenseWeights(NamedTuple):
    """A matrix of four bits, in blocks of inputs; scales are of groups of them (`four_bits`)."""

    codes: UInt8[Any, "blocks out half"]
    scale: Real[Any, "blocks groups out"]
    zero: UInt8[Any, "blocks groups out"] | None = None

    @property
    def items(self) -> Items:
        """How the product of a tile is cut."""
        blocks, channels, half = self.codes.shape
        return joined_items(channels, blocks, 2 * half)


def dense_config(tokens: int, weights: DenseWeights, cores: int = 132) -> GroupedConfig:
    """Return settings for a step of so many tokens: few items have their contraction cut."""
    rows, items = tile_rows(float(tokens)), weights.items
    parts = parts_of(items, float(-(-tokens // rows) * items.columns), cores)
    return GroupedConfig(rows, cores, parts=(1, parts), joins=True)


def dense_product(
    x: Float[Array, "tokens in"],
    weights: DenseWeights,
    config: GroupedConfig | None = None,
    interpret: Any = False,
) -> Float[Array, "tokens out"]:
    """Return the product in the type of `x`; sums are float32.

    Raises ValueError for what the kernel cannot do.
    """
    if wrong := wrong_dense(x, weights):
        raise ValueError("dense_product: " + "; ".join(wrong))
    config = config or dense_config(x.shape[0], weights)
    tokens, rows = x.shape[0], config.rows
    num_tiles = -(-tokens // rows)
    x = jnp.pad(in_order(x), ((0, num_tiles * rows - tokens), (0, 0)))
    groups = Groups(weights.scale, weights.zero)
    tiles = _tiles(num_tiles, rows)
    inputs = Inputs(tiles, x, (weights.codes,), groups=(groups,))
    problem = make_problem(config, None, inputs, x.dtype, interpret)
    out = multiply_tiles(problem, inputs)
    if problem.parts > 1:
        sums = functools.reduce(jnp.add, (part[0, :, : problem.channels] for part in out))
        out = sums.swapaxes(1, 2).reshape(-1, problem.channels).astype(x.dtype)
    return out[:tokens]


def _tiles(num: int, rows: int) -> Tiles:
    """Return tiles of all rows, of one expert."""
    zeros = jnp.zeros(num, jnp.int32)
    first = jnp.arange(num, dtype=jnp.int32) * rows
    ends = jnp.full(1, num, jnp.int32)
    return Tiles(ends, zeros, first, zeros + rows, zeros, zeros + num)


def wrong_dense(x: Float[Array, "tokens in"], weights: DenseWeights) -> list[str]:
    """Say what the kernel cannot do."""
    wrong = [] if x.dtype == jnp.bfloat16 else [f"x of {x.dtype}: codes take bfloat16 only"]
    blocks, channels, half = weights.codes.shape
    if channels % CHANNELS or 2 * half % CHANNELS:
        words = f"{channels} outputs and {2 * half} inputs of a block must be multiples of"
        wrong.append(f"{words} {CHANNELS}")
    if x.shape[1] != 2 * half * blocks:
        wrong.append(f"x of {x.shape[1]} inputs, where codes have {2 * half * blocks}")
    return wrong + wrong_groups(weights.codes, Groups(weights.scale, weights.zero))
