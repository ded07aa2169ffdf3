"""What a product of e4m3 codes with scales of blocks is, for its kernel: sizes, arrays, items.

    x         codes [tokens, in], scale [in / block, tokens]     of a token and a block of inputs
    weights   codes [out, in]                 column-parallel; the last block may be ragged
              codes [in / block, out, block]  row-parallel
              codes [experts, out, in]        of tiles of rows that have an expert each

A block is 32, 64, 96 or 128 inputs. Weights have a scale for each output channel, or one for each
128 channels and block of inputs, or both. An item is a tile of rows and 128 output channels, of
each of two matrices where these are gate and up.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Float, Float8e4m3fn

from pallas_kernels.gates import Gate
from pallas_kernels.grouped_split import CHANNELS, PART, WARPGROUPS, Items, parts_of
from pallas_kernels.grouped_work import Tiles, count_tiles
from pallas_kernels.mosaic import FP8, swizzled
from pallas_kernels.product_ring import MAX_STAGES, SHARED_MEMORY_LIMIT, Ring, share_of_items

OVERHEAD_BYTES = 3072  # barriers, and what aligning the buffers costs
FEW_ROWS = 16, 32, 64  # of a tile, weights on the long side of an instruction
MANY_ROWS = 128  # of a tile, rows on the long side
GROUP = 16  # tiles of many rows that run beside each other, for one block of channels
SEGMENT = 32  # inputs that an instruction takes; every block is a multiple
BLOCKS = 128, 64, 32  # of column-parallel matrices
LEAST_COPIED = 32  # float32 numbers: the copy engine writes to multiples of 128 bytes


class BlockCodes(NamedTuple):
    """Rows in codes: values are codes times the scale of their row and block of inputs."""

    values: Float8e4m3fn[Any, "tokens in"]
    scale: Float[Any, "blocks tokens"]


class BlockMatrix(NamedTuple):
    """A matrix in codes; a scale that is None is 1."""

    values: Float8e4m3fn[Any, "*before out in"]
    scale: Float[Any, "*experts out"] | None = None
    blocks: Float[Any, "*experts out_blocks blocks"] | None = None  # as codes: row-parallel, turned
    bias: Float[Any, "*experts out"] | None = None


class BlockConfig(NamedTuple):
    """How the kernel uses the chip."""

    rows: int = MANY_ROWS  # of a tile
    splits: int = 1  # of the contraction
    num_blocks: int = 132  # thread blocks: one for each multiprocessor
    stages: int | None = None  # of shared memory; None: as many as fit


class Result(NamedTuple):
    """What comes out; see `block_product`."""

    dtype: DTypeLike = jnp.bfloat16
    gate: Gate | None = None  # of two matrices, gate and up
    quantised: bool = False
    interpret: Any = False


class Problem(NamedTuple):
    """What is fixed when the kernel is compiled."""

    result: Result
    outs: tuple[int, ...]  # channels of each matrix; of gate and up once
    few: bool
    rows: int  # of a tile
    tokens: int
    inputs: int  # what both numbers of them are a multiple of
    block: int
    steps: int  # of an item
    splits: int
    stages: int
    num_blocks: int
    is_row_parallel: bool

    @property
    def parts(self) -> int:
        """Matrices of an item."""
        return 1 if self.result.gate is None else 2

    @property
    def firsts(self) -> tuple[int, ...]:
        """The block of channels with which each matrix begins, and the end."""
        sizes = [-(-out // PART) for out in self.outs]
        return tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))

    @property
    def columns(self) -> int:
        """Blocks of channels, of all matrices."""
        return self.firsts[-1]

    @property
    def channels(self) -> int:
        """Output channels of all matrices."""
        return sum(self.outs)

    @property
    def tiles(self) -> int:
        """Of all rows, where none is an expert's."""
        return -(-self.tokens // self.rows)

    @property
    def is_turned(self) -> bool:
        """Whether channels come before rows: sums, and float32, which registers cannot turn."""
        wide = jnp.dtype(self.result.dtype).itemsize > 2 and not self.result.quantised
        return self.splits > 1 or (self.few and wide)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sums that a warpgroup has of a matrix: channels and rows, or the reverse."""
        return (CHANNELS, self.rows) if self.few else (CHANNELS, PART)


class Inputs(NamedTuple):
    """The kernel's arrays in global memory."""

    x: BlockCodes
    matrices: tuple[BlockMatrix, ...]
    tiles: Tiles | None = None  # of rows that have an expert each
    gain: Any = None  # [tiles, rows] float32: what results are to be times


class Shared(NamedTuple):
    """Shared memory and barriers."""

    weights: tuple[Any, ...]  # of each part [stages, PART, block]
    x: Any  # [stages, rows, block]
    x_scale: Any  # [stages, rows], or more
    out: Any  # what the copy engine writes, of each warpgroup
    most: Any  # [WARPGROUPS, rows], of codes of few rows: the largest of a row
    scale: Any  # [rows], of codes: what the copy engine writes
    full: Any
    free: Any
    both: Any  # of codes: both warpgroups are there


class Item(NamedTuple):
    """A tile, a block of channels of all matrices, and a part of the contraction."""

    tile: jax.Array
    column: jax.Array
    split: jax.Array
    expert: jax.Array | None


def block_config(
    x: BlockCodes, matrices: tuple[BlockMatrix, ...], result: Result, cores: int = 132
) -> BlockConfig:
    """Return settings that suit a product.

    Few items have their contraction cut if sums may come out; large tiles are of rows that are
    enough for all multiprocessors.
    """
    outs = [
        matrix.values.shape[-2] for matrix in matrices[: 1 if result.gate is not None else None]
    ]
    columns, (steps, tokens) = sum(-(-out // PART) for out in outs), x.scale.shape
    is_many = tokens > FEW_ROWS[-1] and -(-tokens // MANY_ROWS) * columns > cores // 2
    if is_many and can_be_many(matrices, result):
        return BlockConfig(MANY_ROWS, 1, cores)
    rows = next((n for n in FEW_ROWS if tokens <= n), FEW_ROWS[-1])
    if result.gate is not None or result.quantised:
        return BlockConfig(rows, 1, cores)
    whole = -(-tokens // rows) * columns
    return BlockConfig(rows, parts_of(Items(columns, PART, steps), float(whole), cores), cores)


def can_be_many(matrices: tuple[BlockMatrix, ...], result: Result) -> bool:
    """Whether the registers are enough for tiles of many rows."""
    return result.gate is None or matrices[0].blocks is None


def block_of(x: BlockCodes, matrix: BlockMatrix, has_tiles: bool = False) -> int | None:
    """Return how many inputs have a scale in common; None: no block that there is.

    With tiles, of rows that have an expert each, matrices are those of experts.
    """
    values, steps = matrix.values, x.scale.shape[0]
    if len(values.shape) == 3 and not has_tiles:
        return values.shape[-1]
    return next((n for n in BLOCKS if -(-values.shape[-1] // n) == steps), None)


def make_problem(inputs: Inputs, config: BlockConfig, result: Result) -> Problem:
    """Describe a product for which `wrong_block` has nothing to say."""
    (x, x_scale), matrices = inputs.x, inputs.matrices
    block = block_of(inputs.x, matrices[0], inputs.tiles is not None)
    assert block is not None
    outs = tuple(matrix.values.shape[-2] for matrix in matrices)
    rows, splits, num_blocks, stages = config
    is_row = inputs.tiles is None and len(matrices[0].values.shape) == 3
    problem = Problem(
        result,
        outs[:1] if result.gate is not None else outs,
        rows < MANY_ROWS,
        rows,
        x.shape[0],
        math.gcd(x.shape[1], matrices[0].values.shape[-1]),
        block,
        x_scale.shape[0] // splits,
        splits,
        0,
        num_blocks,
        is_row,
    )
    staged = (rows + problem.parts * PART) * block + max(rows, LEAST_COPIED) * 4
    written = 0 if problem.is_turned else rows * PART * jnp.dtype(_written(problem)).itemsize
    left = SHARED_MEMORY_LIMIT - OVERHEAD_BYTES - written
    return problem._replace(stages=stages or min(left // staged, MAX_STAGES))


def _written(problem: Problem) -> DTypeLike:
    return FP8 if problem.result.quantised else problem.result.dtype


def shared_memory(problem: Problem) -> Shared:
    """Describe the shared memory of a thread block."""
    rows, stages, block, code = problem.rows, problem.stages, problem.block, FP8
    columns = next(n for n in BLOCKS if block % n == 0 and problem.inputs % n == 0)
    quantised, dtype = problem.result.quantised, _written(problem)
    shape = (WARPGROUPS, rows, CHANNELS) if problem.few else (WARPGROUPS, CHANNELS, PART)
    out = plgpu.SMEM(shape, dtype)
    if jnp.dtype(dtype).itemsize == 2:
        out = swizzled(shape, dtype)
    elif quantised and problem.outs[0] % PART:  # of which tiles must be a part
        out = swizzled(shape, dtype, CHANNELS)
    scales = jnp.float32
    return Shared(
        weights=(swizzled((stages, PART, block), code, columns),) * problem.parts,
        x=swizzled((stages, rows, block), code, columns),
        x_scale=plgpu.SMEM((stages, max(rows, LEAST_COPIED)), scales),
        out=None if problem.is_turned else out,
        most=plgpu.SMEM((WARPGROUPS, rows), scales) if quantised and problem.few else None,
        scale=plgpu.SMEM((rows,), scales) if quantised else None,
        full=plgpu.Barrier(num_arrivals=problem.parts + 2, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        both=plgpu.Barrier(num_arrivals=WARPGROUPS) if quantised and problem.few else None,
    )


def ring_of(problem: Problem, shared: Shared) -> Ring:
    """Return the ring of a thread block."""
    return Ring(shared.full, shared.free, problem.stages, problem.steps)


def count_items(problem: Problem, inputs: Inputs) -> jax.Array:
    """Return how many items this thread block has."""
    tiles = problem.tiles if inputs.tiles is None else count_tiles(inputs.tiles.ends)
    return share_of_items(tiles * problem.columns * problem.splits, problem.num_blocks)


def read_item(problem: Problem, inputs: Inputs, nth: jax.Array) -> Item:
    """Return an item of this thread block.

    Those of a block of channels run beside each other, and read its weights out of the cache: all
    tiles of an expert, or GROUP tiles of many rows.
    """
    index = lax.axis_index("block") + nth * problem.num_blocks
    pieces = problem.columns * problem.splits
    if inputs.tiles is not None:
        some = lax.div(index, jnp.int32(pieces))  # a tile of the right expert
        begin, size = inputs.tiles.begin[some], inputs.tiles.siblings[some]
        expert = inputs.tiles.expert[some]
    else:
        begin = lax.div(index, jnp.int32(GROUP * pieces)) * GROUP
        size, expert = jnp.minimum(problem.tiles - begin, GROUP), None
    within = index - begin * pieces
    piece = lax.div(within, size)
    column, split = lax.div(piece, jnp.int32(problem.splits)), jnp.int32(0)
    if problem.splits > 1:
        split = lax.rem(piece, jnp.int32(problem.splits))
    return Item(begin + within - piece * size, column, split, expert)
