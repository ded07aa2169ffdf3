"""Into what the products of experts are cut: tiles, items, and parts of the contraction. No JAX.

An item is a tile of rows and a block of output channels, and takes one multiprocessor. Few tiles
are few items: those of one sequence with an expert of Qwen3-30B-A3B are 6 of gate and up and 8 of
down, for 132 multiprocessors, and a megabyte each. There the contraction is cut into equal parts
(split-K), added up in their order, so that the bits are the same in every run. How many is known
when a step is compiled, from the rows that experts have on average.
"""

import math
from typing import NamedTuple

TILE_ROWS = 16, 32, 64, 128
WARPGROUPS = 2  # that compute
CHANNELS = 64  # of a matrix instruction
PART = WARPGROUPS * CHANNELS  # channels of one operand of an item
PARTS = 2  # gate and up, or two neighbours of down
STEP_BYTES = 128  # of the contraction, in a stage of shared memory: what a swizzle spans
CODE, FOUR_BITS = 1, 0.5  # bytes of a number
BLOCK = 128  # inputs of codes that share a scale
PLAIN_BLOCKS = 128, 64  # numbers of 16 bits in a step of dense matrices, of two swizzles or one
FOUR_BIT_STEPS = 128, 64  # numbers: a stage has room for as many of the rows
MOST_PADDED = 1 / 16  # of a contraction in such steps, which end in zeros: those of 2,880 are 23
# A multiprocessor is taken to read at most so many times its share of the memory's rate.
STREAM = 2.0
MOST_PARTS = 8  # of a contraction: they are added up one after the other
LEAST_STEPS = 2  # of a part


class Items(NamedTuple):
    """How a product of one tile is cut into work items."""

    columns: int  # blocks of output channels
    step: int  # of the contraction, numbers
    steps: int
    end_in_zeros: bool = False  # past the contraction: parts of it need not divide the steps

    def can_be_cut(self, parts: int) -> bool:
        """Whether so many parts are of whole steps, or nearly."""
        whole = parts * steps_of_part(self.steps, parts)
        return whole <= self.steps * (1 + MOST_PADDED * self.end_in_zeros)


def items_of(channels: int, contraction: int, item_bytes: float | int, gated: bool) -> Items:
    """Describe a product with a matrix [channels, contraction], or with two of them, gate and up.

    The kernels have sides that are multiples of 64. So steps are whole, but for those of four bits,
    and of codes, whose steps are blocks of inputs.
    """
    if item_bytes == CODE:
        return Items(-(-channels // PART), BLOCK, -(-contraction // BLOCK))
    columns = -(-channels // (PART if gated else PARTS * PART))
    if item_bytes < 1:
        most = contraction * (1 + MOST_PADDED)
        step = next((n for n in FOUR_BIT_STEPS if -(-contraction // n) * n <= most), 64)
    else:
        sizes = int(STEP_BYTES // item_bytes), 64
        step = next((n for n in sizes if contraction % n == 0), 64)
    return Items(columns, step, -(-contraction // step), item_bytes < 1)


def joined_items(channels: int, blocks: int, inputs: int) -> Items:
    """Describe a product whose contraction is that of blocks of four bits, one after the other.

    A step is of one block: their inputs are a multiple of 64.
    """
    columns = -(-channels // (PARTS * PART))
    step = next((n for n in FOUR_BIT_STEPS if inputs % n == 0), FOUR_BIT_STEPS[-1])
    return Items(columns, step, blocks * (inputs // step))


def steps_of_part(steps: int, parts: int) -> int:
    """Return the steps of a part of a contraction; a last one of four bits may be past its end."""
    return -(-steps // parts)


def products_of(width: int, hidden: int, item_bytes: float | int) -> tuple[Items, Items]:
    """Describe both products of experts: gate and up, and down."""
    gated, down = (width, hidden, item_bytes, True), (hidden, width, item_bytes, False)
    return items_of(*gated), items_of(*down)


def tile_rows(mean_pairs: float) -> int:
    """Return the rows of a tile, for experts of so many pairs on average.

    Small tiles waste less on experts of few rows; large ones read a weight for more rows at once.
    """
    return next((n for n in TILE_ROWS if mean_pairs <= n), TILE_ROWS[-1])


def count_parts(
    products: tuple[Items, Items], mean_pairs: float, experts: int, cores: int
) -> tuple[int, int]:
    """Return how many parts the contractions of gate and up, and of down, are cut into.

    `mean_pairs` of each of a device's `experts` are those of a whole bucket of tokens. Steps have
    fewer, so tiles are counted for half as many, of pairs that choose at random.
    """
    tiles = max(1.0, experts * -math.expm1(-mean_pairs / 2))
    if tile_rows(mean_pairs) > TILE_ROWS[0]:  # sums of many rows take memory
        return 1, 1
    gated, down = (parts_of(items, tiles * items.columns, cores) for items in products)
    return gated, down


def parts_of(items: Items, whole: float, cores: int) -> int:
    """Return the parts of a product that has so many items if it is not cut.

    Half of the memory's rate is fast enough: the sums of parts take time, too.
    """
    if reading_share(whole, cores) > 0.5:
        return 1
    most = min(MOST_PARTS, int(cores / whole), items.steps // LEAST_STEPS)
    return max((n for n in range(1, most + 1) if items.can_be_cut(n)), default=1)


def reading_share(items: float, cores: int) -> float:
    """Return the share of the memory's rate that so many items at a time can read at."""
    return min(1.0, STREAM * items / cores)
