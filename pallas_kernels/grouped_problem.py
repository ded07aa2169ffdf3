"""What a grouped product is, for its kernel: sizes, arrays, shared memory, items of work."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.four_bits import UNIT, Coded, Groups, coded_of
from pallas_kernels.gates import Gate
from pallas_kernels.grouped_split import (
    CHANNELS,
    FOUR_BITS,
    PART,
    PARTS,
    WARPGROUPS,
    items_of,
    joined_items,
    steps_of_part,
)
from pallas_kernels.grouped_work import Tiles
from pallas_kernels.mosaic import swizzled
from pallas_kernels.product_ring import MAX_STAGES, SHARED_MEMORY_LIMIT, share_of_items

OVERHEAD_BYTES = 2048  # barriers, and what aligning the buffers costs
COLLECTING = 4  # thread blocks of a multiprocessor that collect rows


# The sums of every part of the contraction, with room for whole blocks of channels: of gate and of
# up, as they are; or of down, which are scaled, and need only be added up.
type Sums = Float[Array, "parts matrices tiles padded tile_rows"]


class GroupedConfig(NamedTuple):
    """How the kernels use the chip; the result is the same."""

    rows: int = 128  # of a tile: one of TILE_ROWS
    num_blocks: int = 132  # thread blocks of the products: one for each multiprocessor
    stages: int | None = None  # of shared memory; None: as many as fit
    parts: tuple[int, int] = 1, 1  # of the contraction: of gate and up, and of down
    joins: bool = False  # matrices are parts of one contraction, not experts: blocks of four bits

    @property
    def collecting(self) -> int:
        """Thread blocks that collect rows."""
        return COLLECTING * self.num_blocks


class Problem(NamedTuple):
    """What is fixed when the kernel is compiled."""

    gate: Gate | None  # None: the plain product
    rows: int  # of a tile
    channels: int  # that come out
    columns: int  # blocks of them
    step: int  # of the contraction, in a stage of shared memory
    steps: int  # of a part of it
    parts: int  # that the contraction is cut into
    stages: int
    dtype: DTypeLike  # of what comes out
    num_blocks: int  # thread blocks
    interpret: Any
    coded: Coded | None  # how weights of four bits are read; None: they are operands as they are
    block_steps: int = 0  # of a matrix, where one follows the other in the contraction

    @property
    def gated(self) -> bool:
        """Whether the parts of an item are gate and up."""
        return self.gate is not None

    @property
    def width(self) -> int:
        """Output channels of an item."""
        return PART if self.gated else PARTS * PART

    @property
    def copies(self) -> int:
        """Copies that fill a stage."""
        beside = 0 if self.coded is None else 1 + self.coded.have_zeros
        return PARTS * (1 + beside) + 1


class Inputs(NamedTuple):
    """The kernel's arrays in global memory."""

    tiles: Tiles
    x: Any  # [tiles * rows, in]
    weights: tuple[Any, ...]  # gate and up, or down: [experts, out, in], or four bits' codes
    gain: Any = None  # [tiles, rows] float32: what results are to be times; None: 1
    biases: tuple[Any, ...] | None = None  # [experts, out], of the same matrices
    groups: tuple[Groups, ...] = ()  # of the same matrices, where they are codes of four bits


class Shared(NamedTuple):
    """Shared memory, and barriers: `full` is said by copies, `free` by who has multiplied."""

    weights: tuple[Any, ...]  # PARTS of [stages, PART, step], or half of that of codes
    x: Any  # [stages, rows, step]
    out: Any  # [WARPGROUPS, rows, CHANNELS]
    full: Any
    free: Any
    groups: tuple[Groups, ...] = ()  # PARTS of [stages, groups, PART], with codes of four bits
    operand: Any = None  # [WARPGROUPS, CHANNELS, UNIT]: of the interpreter, which has no registers


class Item(NamedTuple):
    """A tile, a block of output channels, and a part of the contraction."""

    tile: jax.Array
    column: jax.Array
    part: jax.Array
    expert: jax.Array


def make_problem(
    config: GroupedConfig, gate: Gate | None, inputs: Inputs, dtype: DTypeLike, interpret: Any
) -> Problem:
    """Describe the product of `inputs`; without a gate it is that of down.

    Both sides are whole multiples of 64; `config.parts` divide the steps of the contraction.
    """
    rows, num_blocks, stages, (of_gate, of_down), joins = config
    parts = of_down if gate is None else of_gate
    weight, coded, item_bytes = inputs.weights[0], None, inputs.x.dtype.itemsize
    matrices, channels, contraction = weight.shape
    if inputs.groups:
        coded = coded_of(weight, inputs.groups[0], gate is not None)
        contraction, item_bytes = 2 * contraction, FOUR_BITS
    items = items_of(channels, contraction, item_bytes, gate is not None)
    block_steps = 0
    if joins:
        items = joined_items(channels, matrices, contraction)
        block_steps = items.steps // matrices
    step = items.step
    left = SHARED_MEMORY_LIMIT - OVERHEAD_BYTES - WARPGROUPS * rows * CHANNELS * 2
    own = PARTS * PART * _channel_bytes(coded, step, item_bytes)
    stage = rows * step * inputs.x.dtype.itemsize + own
    stages = stages or min(left // stage, MAX_STAGES)
    cut = items.columns, step, steps_of_part(items.steps, parts), parts
    how = stages, dtype, num_blocks, interpret, coded
    return Problem(gate, rows, channels, *cut, *how, block_steps)


def _channel_bytes(coded: Coded | None, step: int, item_bytes: float | int) -> int:
    """Return what a stage has of a channel."""
    own = int(step * item_bytes)
    if coded is None:
        return own
    return own + coded.rows(step) * (jnp.dtype(coded.scale_dtype).itemsize + coded.have_zeros)


def shared_memory(problem: Problem, inputs: Inputs) -> Shared:
    """Describe the shared memory of a thread block."""
    dtype = inputs.x.dtype
    stages, step, coded = problem.stages, problem.step, problem.coded
    columns = step if coded is None else UNIT
    shared = Shared(
        weights=(),
        x=swizzled((stages, problem.rows, step), dtype, columns),
        out=swizzled((WARPGROUPS, problem.rows, CHANNELS), problem.dtype),
        full=plgpu.Barrier(num_arrivals=problem.copies, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    )
    if coded is None:
        ring = swizzled((stages, PART, step), dtype, step)
        return shared._replace(weights=(ring,) * PARTS)
    half = step // 2 if inputs.weights[0].shape[-1] % (step // 2) == 0 else UNIT // 2
    ring = swizzled((stages, PART, step // 2), jnp.uint8, half)  # of tiles that the weights have
    shape = stages, coded.rows(step), PART
    zeros = plgpu.SMEM(shape, jnp.uint8) if coded.have_zeros else None
    groups = Groups(plgpu.SMEM(shape, coded.scale_dtype), zeros)
    operand = swizzled((WARPGROUPS, CHANNELS, UNIT), dtype) if problem.interpret else None
    return shared._replace(weights=(ring,) * PARTS, groups=(groups,) * PARTS, operand=operand)


def count_items(problem: Problem, tiles: Tiles) -> jax.Array:
    """Return how many items this thread block has."""
    items = tiles.num_tiles * problem.columns * problem.parts
    return share_of_items(items, problem.num_blocks)


def read_item(problem: Problem, tiles: Tiles, nth: jax.Array) -> Item:
    """Read an item of this thread block; past the last, some that is in the table."""
    pieces, last = jnp.int32(problem.columns * problem.parts), tiles.expert.shape[0] - 1
    index = lax.axis_index("block") + nth * problem.num_blocks
    some = jnp.minimum(lax.div(index, pieces), last)  # a tile of the right expert
    begin, siblings = tiles.begin[some], jnp.maximum(tiles.siblings[some], 1)
    within = index - begin * pieces
    piece = lax.div(within, siblings)
    tile = begin + within - piece * siblings
    column = jnp.minimum(lax.div(piece, jnp.int32(problem.parts)), problem.columns - 1)
    part = lax.rem(piece, jnp.int32(problem.parts))
    return Item(jnp.minimum(tile, last), column, part, tiles.expert[some])
