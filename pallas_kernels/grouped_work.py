"""Which pieces the grouped product of experts is cut into: on the device, for one layer of a step.

How many tokens an expert gets is known to the device alone, after routing. Pairs of (token, choice)
are sorted by expert; a tile is rows of that order, all of one expert:

pair      token * k + choice        0 1 2 3 4 5 6 7 8 9     5 tokens, k = 2
expert    that each goes to         2 0 7 2 2 9 0 7 2 2     7 and 9 are other devices'
row       pairs, own experts first  1 6 0 3 4 8 9 2 5 7     sizes  2 0 5    of experts 0, 1, 2
tiles     of 4 rows at most         0 0 1 1 1 1 2           expert 0 2 2, first 0 2 6, rows 2 4 1

The number of tiles depends on the sizes, but it has a bound that does not.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, Real, UInt8


class Routed(NamedTuple):
    """The pairs of a step, sorted by the expert that they go to."""

    row: Int32[Any, " pairs"]  # pair = token * k + choice; those of this device's experts first
    sizes: Int32[Any, " experts"]  # pairs of each of this device's experts, in their order


class ExpertWeights(NamedTuple):
    """The experts of one device; the contraction is innermost, and scales are of output channels.

    Bfloat16, float32, or float8_e4m3fn codes, of which the weight is code * scale; scales are None
    without codes. Biases, of the type of x, are None where there are none.

    Or four bits, two in a byte: uint8 `[experts, out, in / 2]`, input 2i in the lower bits of byte
    i. Their scales are of groups of inputs, `[experts, groups, out]`: uint8, a power of two less
    127, of e2m1 codes; or float32, and the weight is (code - zero) * scale, with a zero of 8 or
    zeros, 0 to 16, uint8 of the same shape.
    """

    gate: Real[Any, "experts width hidden"]
    up: Real[Any, "experts width hidden"]
    down: Real[Any, "experts hidden width"]
    gate_scale: Real[Any, "experts ..."] | None = None
    up_scale: Real[Any, "experts ..."] | None = None
    down_scale: Real[Any, "experts ..."] | None = None
    gate_bias: Float[Any, "experts width"] | None = None
    up_bias: Float[Any, "experts width"] | None = None
    down_bias: Float[Any, "experts hidden"] | None = None
    gate_zero: UInt8[Any, "experts groups width"] | None = None
    up_zero: UInt8[Any, "experts groups width"] | None = None
    down_zero: UInt8[Any, "experts inner_groups hidden"] | None = None

    @property
    def are_four_bits(self) -> bool:
        """Whether two inputs are a byte."""
        return self.gate.dtype == jnp.uint8


class Tiles(NamedTuple):
    """The tiles of a step, in the order of experts; what is behind the last has no rows."""

    ends: Int32[Array, " experts"]  # one past the last tile of each expert
    expert: Int32[Array, " tiles"]
    first: Int32[Array, " tiles"]  # the first row: an index into `Routed.row`
    rows: Int32[Array, " tiles"]
    begin: Int32[Array, " tiles"]  # the first tile of its expert, and how many that one has
    siblings: Int32[Array, " tiles"]

    @property
    def num_tiles(self) -> Int32[Array, ""]:
        """How many tiles there are; in kernels, too: an array of it alone would be a launch."""
        return count_tiles(self.ends)


class Placed(NamedTuple):
    """Where each pair is in the rows of all tiles laid end to end, and the other way round."""

    pair: Int32[Array, "tiles rows"]  # of a row; of padding: some pair of the same tile, or 0
    place: Int32[Array, " pairs"]  # of a pair; 0 of one that is not this device's


def sort_pairs(expert: Int[Any, "tokens k"], num_experts: int) -> Routed:
    """Sort pairs by this device's experts, `num_experts` standing for one that it has not."""
    flat = jnp.asarray(expert).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.bincount(flat, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    return Routed(order, sizes)


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return the most tiles of `tile` rows that `pairs` can need: as many experts have one row."""
    busy = min(pairs, experts)
    return busy + (pairs - busy) // tile


def count_tiles(ends: Any) -> Int32[Array, ""]:
    """Return `Tiles.num_tiles`, of an array or of a kernel's reference to it."""
    return ends[ends.shape[0] - 1]


def divide_rows(sizes: Int32[Array, " experts"], pairs: int, tile: int) -> Tiles:
    """Cut the rows of each expert into tiles of at most `tile` rows; `pairs` bounds their sum."""
    tiles_of = (sizes + (tile - 1)) // tile
    ends = jnp.cumsum(tiles_of)
    nth = jnp.arange(most_tiles(pairs, sizes.shape[0], tile), dtype=jnp.int32)
    # A comparison with every end: a search by halves is a loop of launches on a GPU.
    expert = (ends[None, :] <= nth[:, None]).sum(axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, sizes.shape[0] - 1)
    begin, live = (ends - tiles_of)[expert], nth < ends[-1]
    within = (nth - begin) * tile  # its expert
    first = jnp.where(live, (jnp.cumsum(sizes) - sizes)[expert] + within, 0)
    rows = jnp.where(live, jnp.minimum(sizes[expert] - within, tile), 0)
    return Tiles(ends, expert, first, rows, begin, tiles_of[expert])


def place_pairs(routed: Routed, tiles: Tiles, tile: int) -> Placed:
    """Return which pair each tile row holds, and which row each pair has, for `tile` rows."""
    nth = jnp.arange(tile, dtype=jnp.int32)
    nth = jnp.minimum(nth[None, :], jnp.maximum(tiles.rows - 1, 0)[:, None])
    pair = routed.row[tiles.first[:, None] + nth]
    sorted_row = jnp.arange(routed.row.shape[0], dtype=jnp.int32)
    before = jnp.cumsum(routed.sizes)
    expert = (before[None, :] <= sorted_row[:, None]).sum(axis=1, dtype=jnp.int32)
    is_own = expert < routed.sizes.shape[0]
    expert = jnp.minimum(expert, routed.sizes.shape[0] - 1)
    # Rows of an expert's tiles follow each other: only before its first is there any padding.
    padded = -(-routed.sizes // tile) * tile
    shift = (jnp.cumsum(padded) - padded) - (before - routed.sizes)
    place = jnp.where(is_own, sorted_row + shift[expert], 0)
    # All are set; an array that is there already need not be filled first, nor copied.
    return Placed(pair, sorted_row.at[routed.row].set(place, unique_indices=True))
