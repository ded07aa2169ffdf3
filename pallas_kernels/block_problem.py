"""What a product is for its kernel: sizes, arrays, items. Of e4m3 codes with scales of blocks:

    x         codes [tokens, in], scale [in / block, tokens]     of a token and a block of inputs
    weights   codes [out, in]                 column-parallel; the last block may be ragged
              codes [in / block, out, block]  row-parallel
              codes [experts, out, in]        of tiles of rows that have an expert each

A block is 32, 64, 96 or 128 inputs. Weights have a scale for each output channel, or one for each
128 channels and block of inputs, or both. Of plain numbers, 16 bits each and without scales:

    x         [tokens, in]
    weights   [out, in]                column-parallel
              [in / block, block, out] row-parallel: [in, out], seen as blocks

A block is 64 or 128 inputs of these. An item is a tile of rows and 128 output channels, of each of
two matrices where these are gate and up. Few items are cut along their contraction: a cluster of
thread blocks has an item, and each of them a part of it.

To a product of few rows matrices of low rank may add (`block_added.py`). Results may be of groups
of channels, of which each row keeps one, and has zeros for the others.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Num

from pallas_kernels.gates import Gate
from pallas_kernels.grouped_split import (
    CHANNELS,
    LEAST_STEPS,
    PART,
    PLAIN_BLOCKS,
    WARPGROUPS,
    reading_share,
)
from pallas_kernels.grouped_work import Tiles, count_tiles
from pallas_kernels.mosaic import COLUMNS, FP8, swizzled
from pallas_kernels.product_ring import MAX_STAGES, SHARED_MEMORY_LIMIT, Ring, share_of_items

OVERHEAD_BYTES = 3072  # barriers, and what aligning the buffers costs
FEW_ROWS = 16, 32, 64  # of a tile, weights on the long side of an instruction
MANY_ROWS = 128  # of a tile, rows on the long side
GROUP = 16  # tiles of many rows that run beside each other, for one block of channels
SEGMENT = 32  # inputs that an instruction takes; every block is a multiple
BLOCKS = 128, 64, 32  # of column-parallel matrices
CLUSTERS = 8, 4, 2  # thread blocks that have an item together: 8 are what every GPU can
CLUSTER = "cluster"  # their axis
LEAST_COPIED = 32  # float32 numbers: the copy engine writes to multiples of 128 bytes
ADDED_STEP = 64  # of the contraction with matrices of low rank: what a swizzle spans


class BlockCodes(NamedTuple):
    """Rows in codes: values are codes times the scale of their row and block of inputs."""

    values: Num[Any, "tokens in"]
    scale: Float[Any, "blocks tokens"] | None = None  # None: values are plain numbers


class BlockMatrix(NamedTuple):
    """A matrix in codes, or of plain numbers; a scale that is None is 1."""

    values: Num[Any, "*before out in"]  # plain row-parallel ones end with [block, out]
    scale: Float[Any, "*experts out"] | None = None
    blocks: Float[Any, "*experts out_blocks blocks"] | None = None  # as codes: row-parallel, turned
    bias: Float[Any, "*experts out"] | None = None
    factor: Num[Any, "out width"] | None = None  # of low rank; of row-parallel ones [width, out]

    @property
    def is_plain(self) -> bool:
        """Whether it has numbers, not codes."""
        return jnp.dtype(self.values.dtype).itemsize > 1

    @property
    def outputs(self) -> int:
        """Output channels."""
        shape = self.values.shape
        return shape[-1] if self.is_plain and len(shape) == 3 else shape[-2]

    @property
    def inputs(self) -> int:
        """How long its contraction is, where it is no matrix of experts."""
        return math.prod(self.values.shape) // self.outputs


class BlockConfig(NamedTuple):
    """How the kernel uses the chip."""

    rows: int = MANY_ROWS  # of a tile
    splits: int = 1  # of the contraction, whose sums come out
    num_blocks: int = 132  # thread blocks, or clusters: one block for each multiprocessor
    stages: int | None = None  # of shared memory; None: as many as fit
    cluster: int = 1  # thread blocks, among which the contraction is cut

    def in_parts(self) -> "BlockConfig":
        """Return settings with the same parts, whose sums come out."""
        cluster, blocks = self.cluster, self.num_blocks
        return self._replace(splits=self.splits * cluster, num_blocks=blocks * cluster, cluster=1)


class Groups(NamedTuple):
    """Groups of neighbouring channels, of which a row keeps its own; they come again and again."""

    num: int
    channels: int  # of each


class Result(NamedTuple):
    """What comes out; see `block_product`."""

    dtype: DTypeLike = jnp.bfloat16
    gate: Gate | None = None  # of two matrices, gate and up
    quantised: bool = False
    interpret: Any = False
    groups: Groups | None = None


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
    cluster: int = 1
    operands: DTypeLike = FP8
    added: int = 0  # width of the matrices of low rank; 0: there are none
    factors: DTypeLike = jnp.bfloat16  # what they and their inputs are

    @property
    def added_steps(self) -> int:
        """Steps of an item's contraction with a matrix of low rank."""
        return -(-self.added // ADDED_STEP)

    @property
    def added_stages(self) -> int:
        """Of shared memory, for these steps: two if there is room."""
        return min(self.added_steps, 2 if self.result.gate is None else 1)

    @property
    def added_bytes(self) -> int:
        """Of shared memory, for these stages."""
        numbers = self.added_stages * self.parts * (self.rows + PART) * ADDED_STEP
        return numbers * jnp.dtype(self.factors).itemsize

    @property
    def is_plain(self) -> bool:
        """Whether operands are numbers, not codes."""
        return jnp.dtype(self.operands).itemsize > 1

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Of what a cluster adds up: sums of its blocks but the first, of items and warpgroups."""
        return self.cluster - 1, self.tiles * self.columns, self.parts, WARPGROUPS, *self.shape

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
    added: Num[Any, "tokens matrices_width"] | None = None  # what matrices of low rank multiply
    group: Int[Any, " all_rows"] | None = None  # of each row of all tiles


class Shared(NamedTuple):
    """Shared memory and barriers."""

    weights: tuple[Any, ...]  # of each part [stages, PART, block], or plain [stages, block, PART]
    x: Any  # [stages, rows, block]
    x_scale: Any  # [stages, rows], or more; None: plain numbers
    out: Any  # what the copy engine writes, of each warpgroup
    most: Any  # [WARPGROUPS, rows], of codes of few rows: the largest of a row
    scale: Any  # [rows], of codes: what the copy engine writes
    full: Any
    free: Any
    both: Any  # of codes: both warpgroups are there
    cluster: Any  # all blocks of a cluster are there; None: there are none
    # Of matrices of low rank, for each part: [stages, PART, step] or turned, [stages, rows, step].
    factors: tuple[Any, ...]
    added_x: tuple[Any, ...]
    added_full: Any
    added_free: Any


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

    Few items have their contraction cut among the thread blocks of a cluster; large tiles are of
    rows that are enough for all multiprocessors.
    """
    outs = [matrix.outputs for matrix in matrices[: 1 if result.gate is not None else None]]
    columns, tokens = sum(-(-out // PART) for out in outs), x.values.shape[0]
    is_many = tokens > FEW_ROWS[-1] and -(-tokens // MANY_ROWS) * columns > cores // 2
    if is_many and can_be_many(matrices, result):
        return BlockConfig(MANY_ROWS, 1, cores)
    rows = next((n for n in FEW_ROWS if tokens <= n), FEW_ROWS[-1])
    cluster = cluster_of(-(-tokens // rows) * columns, steps_of(x, matrices[0]) or 1, cores)
    return BlockConfig(rows, 1, cores // cluster, cluster=cluster)


def fixed_config(
    x: BlockCodes, matrices: tuple[BlockMatrix, ...], result: Result, cores: int = 132
) -> BlockConfig:
    """Return settings that are the same for all numbers of rows and channels, as is a row's order.

    A contraction is not cut: what a device has of a matrix says how many items there are.
    """
    return BlockConfig(FEW_ROWS[-1], 1, cores)


def cluster_of(items: int, steps: int, cores: int) -> int:
    """Return among how many thread blocks the contraction of few items is cut.

    Half of the memory's rate is fast enough: what a cluster adds up takes time, too.
    """
    if reading_share(float(items), cores) > 0.5:
        return 1
    most = min(cores // items, steps // LEAST_STEPS)
    return next((n for n in CLUSTERS if n <= most and steps % n == 0), 1)


def can_be_many(matrices: tuple[BlockMatrix, ...], result: Result) -> bool:
    """Whether the registers are enough for tiles of many rows; plain numbers have only few."""
    return not matrices[0].is_plain and (result.gate is None or matrices[0].blocks is None)


def block_of(x: BlockCodes, matrix: BlockMatrix, has_tiles: bool = False) -> int | None:
    """Return how many inputs share a scale, or are a step; None: no block that there is.

    With tiles, of rows that have an expert each, matrices are those of experts.
    """
    values = matrix.values
    if matrix.is_plain and len(values.shape) == 3:
        return values.shape[1]
    if x.scale is None:
        return next((n for n in PLAIN_BLOCKS if values.shape[-1] % n == 0), None)
    if len(values.shape) == 3 and not has_tiles:
        return values.shape[-1]
    return next((n for n in BLOCKS if -(-values.shape[-1] // n) == x.scale.shape[0]), None)


def steps_of(x: BlockCodes, matrix: BlockMatrix, has_tiles: bool = False) -> int | None:
    """Return the blocks of a contraction; None: no block that there is."""
    if x.scale is not None:
        return x.scale.shape[0]
    block = block_of(x, matrix, has_tiles)
    return None if block is None else -(-x.values.shape[1] // block)


def make_problem(inputs: Inputs, config: BlockConfig, result: Result) -> Problem:
    """Describe a product for which `wrong_block` has nothing to say."""
    x, matrices = inputs.x.values, inputs.matrices
    has_tiles = inputs.tiles is not None
    block = block_of(inputs.x, matrices[0], has_tiles)
    steps = steps_of(inputs.x, matrices[0], has_tiles)
    assert block is not None and steps is not None
    outs = tuple(matrix.outputs for matrix in matrices)
    rows, splits, num_blocks, stages, cluster = config
    is_row = not has_tiles and len(matrices[0].values.shape) == 3
    problem = Problem(
        result,
        outs[:1] if result.gate is not None else outs,
        rows < MANY_ROWS,
        rows,
        x.shape[0],
        block if matrices[0].is_plain else math.gcd(x.shape[1], matrices[0].values.shape[-1]),
        block,
        steps // (splits * cluster),
        splits,
        0,
        num_blocks,
        is_row,
        cluster,
        x.dtype,
    )
    if inputs.added is not None:
        width = inputs.added.shape[1] // len(matrices)
        problem = problem._replace(added=width, factors=inputs.added.dtype)
    staged = (rows + problem.parts * PART) * block * jnp.dtype(x.dtype).itemsize
    staged += 0 if problem.is_plain else max(rows, LEAST_COPIED) * 4
    written = 0 if problem.is_turned else rows * PART * jnp.dtype(_written(problem)).itemsize
    left = SHARED_MEMORY_LIMIT - OVERHEAD_BYTES - written - problem.added_bytes
    return problem._replace(stages=stages or min(left // staged, MAX_STAGES))


def _written(problem: Problem) -> DTypeLike:
    return FP8 if problem.result.quantised else problem.result.dtype


def shared_memory(problem: Problem) -> Shared:
    """Describe the shared memory of a thread block."""
    rows, stages, block, code = problem.rows, problem.stages, problem.block, problem.operands
    columns = next(n for n in BLOCKS if block % n == 0 and problem.inputs % n == 0)
    columns = COLUMNS if problem.is_plain else columns
    own = (block, PART) if problem.is_plain and problem.is_row_parallel else (PART, block)
    quantised, dtype = problem.result.quantised, _written(problem)
    shape = (WARPGROUPS, rows, CHANNELS) if problem.few else (WARPGROUPS, CHANNELS, PART)
    out = plgpu.SMEM(shape, dtype)
    if jnp.dtype(dtype).itemsize == 2:
        out = swizzled(shape, dtype)
    elif quantised and problem.outs[0] % PART:  # of which tiles must be a part
        out = swizzled(shape, dtype, CHANNELS)
    scales = jnp.float32
    return Shared(
        weights=(swizzled((stages, *own), code, columns),) * problem.parts,
        x=swizzled((stages, rows, block), code, columns),
        x_scale=None if problem.is_plain else plgpu.SMEM((stages, max(rows, LEAST_COPIED)), scales),
        out=None if problem.is_turned else out,
        most=plgpu.SMEM((WARPGROUPS, rows), scales) if quantised and problem.few else None,
        scale=plgpu.SMEM((rows,), scales) if quantised else None,
        full=plgpu.Barrier(
            num_arrivals=problem.parts + (1 if problem.is_plain else 2), num_barriers=stages
        ),
        free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        both=plgpu.Barrier(num_arrivals=WARPGROUPS) if quantised and problem.few else None,
        cluster=plgpu.ClusterBarrier(collective_axes=(CLUSTER,), num_arrivals=WARPGROUPS)
        if problem.cluster > 1
        else None,
        **_shared_of_added(problem),
    )


def _shared_of_added(problem: Problem) -> dict[str, Any]:
    """Describe what matrices of low rank have of it."""
    if not problem.added:
        return {"factors": (), "added_x": (), "added_full": None, "added_free": None}
    stages, parts, dtype = problem.added_stages, problem.parts, problem.factors
    own = (ADDED_STEP, PART) if problem.is_row_parallel else (PART, ADDED_STEP)
    rows = swizzled((stages, problem.rows, ADDED_STEP), dtype, COLUMNS)
    return {
        "factors": (swizzled((stages, *own), dtype, COLUMNS),) * parts,
        "added_x": (rows,) * parts,
        "added_full": plgpu.Barrier(num_arrivals=2 * parts, num_barriers=stages),
        "added_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    }


def ring_of(problem: Problem, shared: Shared) -> Ring:
    """Return the ring of a thread block."""
    return Ring(shared.full, shared.free, problem.stages, problem.steps)


def count_items(problem: Problem, inputs: Inputs) -> jax.Array:
    """Return how many items this thread block has, or its cluster."""
    tiles = problem.tiles if inputs.tiles is None else count_tiles(inputs.tiles.ends)
    return share_of_items(tiles * problem.columns * problem.splits, problem.num_blocks)


def for_matrix(problem: Problem, item: Item, run: Callable[[int, Any], None]) -> None:
    """Call `run` for the matrix that an item is of: its number, and its own channels' first.

    Of gate and up gate's: both have the same channels.
    """
    for i, first in enumerate(problem.firsts[:-1]):
        own = functools.partial(run, i, (item.column - first) * PART)
        if len(problem.outs) == 1:
            own()
        else:
            pl.when((item.column >= first) & (item.column < problem.firsts[i + 1]))(own)


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
    elif problem.cluster > 1:
        split = lax.axis_index(CLUSTER)
    return Item(begin + within - piece * size, column, split, expert)
