"""Products of rows with the matrices of their experts, for Hopper, in Pallas Mosaic GPU.

Transposed, weights on the long side of a matrix instruction: 64 output channels by as many rows as
a tile has, 16 or 128, so that one kernel serves decodes, which read every weight once, and chunks:

    gated       G = gate x^T, U = up x^T    a warpgroup: 64 channels of both, and silu(G) * U
    plain       D = down h^T                a warpgroup: twice 64 channels

Biases are added to sums in float32, before the activation and before a pair's gain.

A thread block stays on its multiprocessor and takes items (a tile, a block of channels) in turn.
Three warpgroups: one fetches by TMA, a warp for each operand, into a ring that it keeps full across
items; two compute. Items of an expert follow each other, all its tiles for one block of channels
before the next block: tiles that run at the same time read the same weights, out of the cache.

Rows of padding hold anything and give anything: no row touches another. Channels past the last
are zeros when fetched, and dropped when written, by the copy engine.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.grouped_split import CHANNELS, PART, PARTS, WARPGROUPS, items_of
from pallas_kernels.grouped_work import Gate, Tiles
from pallas_kernels.mosaic import LOG2_E, WGMMA, Accumulator, store, swizzled

COPIES = PARTS + 1  # that fill a stage
SHARED_MEMORY_LIMIT = 227 * 1024  # bytes of a thread block
OVERHEAD_BYTES = 2048  # barriers, and what aligning the buffers costs
MAX_STAGES = 8
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40  # of a thread: 504 for the three warpgroups


# The sums of every part of the contraction, with room for whole blocks of channels: of gate and of
# up, as they are; or of down, which are scaled, and need only be added up.
type Sums = Float[Array, "parts matrices tiles padded tile_rows"]


class GroupedConfig(NamedTuple):
    """How the kernels use the chip; the result is the same."""

    rows: int = 128  # of a tile: one of TILE_ROWS
    num_blocks: int = 132  # thread blocks of the products: one for each multiprocessor
    stages: int | None = None  # of shared memory; None: as many as fit
    parts: tuple[int, int] = 1, 1  # of the contraction: of gate and up, and of down


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

    @property
    def gated(self) -> bool:
        """Whether the parts of an item are gate and up."""
        return self.gate is not None

    @property
    def width(self) -> int:
        """Output channels of an item."""
        return PART if self.gated else PARTS * PART


class Inputs(NamedTuple):
    """The kernel's arrays in global memory."""

    tiles: Tiles
    x: Any  # [tiles * rows, in]
    weights: tuple[Any, ...]  # gate and up, or down: [experts, out, in]
    scales: tuple[Any, ...] | None  # of the output channels [experts, out] float32, with codes
    row_scale: Any  # [tiles, rows] float32: of the rows of x, and what results are to be times
    biases: tuple[Any, ...] | None = None  # [experts, out], of the same matrices
    bias_gain: Any = None  # [tiles, rows] float32: what a bias is to be times; None: 1


class Shared(NamedTuple):
    """Shared memory, and barriers: `full` is said by copies, `free` by who has multiplied."""

    weights: tuple[Any, ...]  # PARTS of [stages, PART, step]
    x: Any  # [stages, rows, step]
    out: Any  # [WARPGROUPS, rows, CHANNELS]
    full: Any
    free: Any


class Item(NamedTuple):
    """A tile, a block of output channels, and a part of the contraction."""

    tile: jax.Array
    column: jax.Array
    part: jax.Array
    expert: jax.Array


# Copies step `k` of an item's part into a slot of a ring, and arrives at its barrier.
type Copier = Callable[[Item, Any, Any, Any], None]


def make_problem(
    config: GroupedConfig, gate: Gate | None, weight: jax.Array, dtype: DTypeLike, interpret: Any
) -> Problem:
    """Describe a product with `weight` [experts, out, in]; without a gate it is that of down.

    Both sides are whole multiples of 64; `config.parts` divide the steps of the contraction.
    """
    rows, num_blocks, stages, (of_gate, of_down) = config
    parts = of_down if gate is None else of_gate
    _, channels, contraction = weight.shape
    size = weight.dtype.itemsize
    columns, step, steps = items_of(channels, contraction, size, gate is not None)
    left = SHARED_MEMORY_LIMIT - OVERHEAD_BYTES - WARPGROUPS * rows * CHANNELS * 2
    most = min(left // ((PARTS * PART + rows) * step * size), MAX_STAGES)
    cut = columns, step, steps // parts, parts
    return Problem(gate, rows, channels, *cut, stages or most, dtype, num_blocks, interpret)


def multiply_tiles(problem: Problem, inputs: Inputs) -> jax.Array:
    """Launch the kernel; return [rows, channels], or with several parts `Sums`, to be added up.

    Tiles that the step does not have are not written.
    """
    arrays, tree = jax.tree.flatten(inputs)
    stages, step = problem.stages, problem.step
    dtype = inputs.x.dtype
    shared = Shared(
        weights=tuple(swizzled((stages, PART, step), dtype, step) for _ in range(PARTS)),
        x=swizzled((stages, problem.rows, step), dtype, step),
        out=swizzled((WARPGROUPS, problem.rows, CHANNELS), problem.dtype),
        full=plgpu.Barrier(num_arrivals=COPIES, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    )
    return plgpu.kernel(
        functools.partial(_product_kernel, problem, tree),
        out_type=_out_type(problem, inputs),
        scratch_types=[shared],
        grid=(problem.num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="grouped_gated" if problem.gated else "grouped_product",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=problem.interpret,
    )(*arrays)


def _out_type(problem: Problem, inputs: Inputs) -> jax.ShapeDtypeStruct:
    places = inputs.x.shape[0]
    if problem.parts == 1:
        return jax.ShapeDtypeStruct((places, problem.channels), problem.dtype)
    shape = places // problem.rows, problem.columns * problem.width, problem.rows
    return jax.ShapeDtypeStruct((problem.parts, 1 + problem.gated, *shape), jnp.float32)


def _product_kernel(problem: Problem, tree: Any, *refs: Any) -> None:
    *arrays, out, shared = refs
    inputs = jax.tree.unflatten(tree, arrays)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        _compute(problem, inputs, out, shared, warpgroup)

    @pl.when(warpgroup == WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        _fetch(problem, inputs, shared)


def _count_items(problem: Problem, tiles: Tiles) -> jax.Array:
    """Return how many items this thread block has."""
    blocks = jnp.int32(problem.num_blocks)
    items = tiles.num_tiles * problem.columns * problem.parts
    return lax.div(items - lax.axis_index("block") + blocks - 1, blocks)


def _read_item(problem: Problem, tiles: Tiles, nth: jax.Array) -> Item:
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


def _fetch(problem: Problem, inputs: Inputs, shared: Shared) -> None:
    """Keep the ring full: a warp for each part of the weights, one for the rows.

    Single warps, as every thread that asks for a copy also arrives at its barrier.
    """
    first, second = 0, 0 if problem.gated else PART
    gate, up = inputs.weights[0], inputs.weights[-1]
    jobs = [
        _weights_copier(problem, gate, first, shared.weights[0]),
        _weights_copier(problem, up, second, shared.weights[1]),
        _rows_copier(problem, inputs.x, shared.x),
    ]

    def by_warp(warp: jax.Array) -> None:
        for i, job in enumerate(jobs):
            pl.when(warp == i)(functools.partial(_stream, problem, inputs.tiles, shared, job))

    plgpu.warp_map(by_warp)


def _weights_copier(problem: Problem, weights: Any, offset: int, ring: Any) -> Copier:
    def copy(item: Item, k: Any, slot: Any, full: Any) -> None:
        channels = pl.ds(item.column * problem.width + offset, PART)
        source = weights.at[item.expert, channels, _numbers_of(problem, item, k)]
        plgpu.copy_gmem_to_smem(source, ring.at[slot], full)

    return copy


def _rows_copier(problem: Problem, x: Any, ring: Any) -> Copier:
    def copy(item: Item, k: Any, slot: Any, full: Any) -> None:
        rows = pl.ds(item.tile * problem.rows, problem.rows)
        plgpu.copy_gmem_to_smem(x.at[rows, _numbers_of(problem, item, k)], ring.at[slot], full)

    return copy


def _numbers_of(problem: Problem, item: Item, k: Any) -> Any:
    """Return where step `k` of the item's part of the contraction is."""
    return pl.ds((item.part * problem.steps + k) * problem.step, problem.step)


def _stream(problem: Problem, tiles: Tiles, shared: Shared, job: Copier) -> None:
    """Copy one operand of all items, each step as soon as there is room for it."""
    stages = jnp.int32(problem.stages)

    def copy_item(nth: jax.Array, count: jax.Array) -> jax.Array:
        item = _read_item(problem, tiles, nth)

        def copy_step(k: jax.Array, count: jax.Array) -> jax.Array:
            slot = lax.rem(count, stages)
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
            job(item, k, slot, shared.full.at[slot])
            return count + 1

        return lax.fori_loop(0, problem.steps, copy_step, count)

    count = lax.fori_loop(0, _count_items(problem, tiles), copy_item, jnp.int32(0))
    for slot in range(problem.stages):  # until the last users have let go of them
        pl.when(slot < count)(functools.partial(plgpu.barrier_wait, shared.free.at[slot]))


def _compute(problem: Problem, inputs: Inputs, out: Any, shared: Shared, me: jax.Array) -> None:
    """Multiply this block's items, one after the other; read which is next before it is needed."""

    def run_item(nth: jax.Array, item: Item) -> Item:
        upcoming = _read_item(problem, inputs.tiles, nth + 1)
        sums = _multiply(problem, shared, me, nth * problem.steps)
        if problem.parts == 1:
            finish(problem, inputs, out, shared.out.at[me], me, item, sums)
        else:
            _put_sums(problem, inputs, out, me, item, sums)
        return upcoming

    first = _read_item(problem, inputs.tiles, jnp.int32(0))
    lax.fori_loop(0, _count_items(problem, inputs.tiles), run_item, first)
    plgpu.wait_smem_to_gmem(0)


def _multiply(
    problem: Problem, shared: Shared, me: jax.Array, before: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the products [CHANNELS, rows] of both parts; `before` steps came before.

    A stage is given back a step later: the products of two steps are under way.
    """
    mine, stages = pl.ds(me * CHANNELS, CHANNELS), jnp.int32(problem.stages)

    def run_steps(*sums: Any) -> tuple[jax.Array, ...]:
        def run_step(count: jax.Array, _: None) -> None:
            slot = lax.rem(count, stages)
            plgpu.barrier_wait(shared.full.at[slot])
            for total, weights in zip(sums, shared.weights, strict=True):
                plgpu.wgmma(total, weights.at[slot, mine], shared.x.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(PARTS)

            @pl.when(count > before)
            def _() -> None:
                plgpu.barrier_arrive(shared.free.at[lax.rem(count - 1, stages)])

        end = before + problem.steps
        lax.fori_loop(before, end, run_step, None)
        results = tuple(total[...] for total in sums)
        plgpu.barrier_arrive(shared.free.at[lax.rem(end - 1, stages)])
        return results

    empty = Accumulator((CHANNELS, problem.rows), jnp.float32)
    return pl.run_scoped(run_steps, *[empty] * PARTS)


def _put_sums(
    problem: Problem,
    inputs: Inputs,
    out: Any,
    me: jax.Array,
    item: Item,
    sums: tuple[jax.Array, ...],
) -> None:
    """Write the sums of a part of the contraction; those of down are scaled: that is linear."""
    if not problem.gated:
        sums = _all_scaled(problem, inputs, me, item, sums)
    for operand, values in enumerate(sums):
        store(place_of_sums(problem, out, me, item, operand), values)


def place_of_sums(problem: Problem, sums: Any, me: jax.Array, item: Item, operand: int) -> Any:
    """Return where [CHANNELS, rows] of the item's sums are, of one operand and warpgroup."""
    matrix, channels = operand * problem.gated, _channels_of(problem, me, item)[operand]
    return sums.at[item.part, matrix, item.tile, pl.ds(channels, CHANNELS)]


def finish(
    problem: Problem,
    inputs: Inputs,
    out: Any,
    stage: Any,
    me: jax.Array,
    item: Item,
    sums: tuple[jax.Array, ...],
) -> None:
    """Scale, activate, and write `sums` through `stage`, rows first again."""
    first, second = _channels_of(problem, me, item)
    first_values, second_values = _all_scaled(problem, inputs, me, item, sums)
    if problem.gate is not None:
        _put(problem, out, stage, item, first, _activate(problem.gate, first_values, second_values))
    else:
        _put(problem, out, stage, item, first, first_values)
        _put(problem, out, stage, item, second, second_values)


def _channels_of(problem: Problem, me: jax.Array, item: Item) -> tuple[jax.Array, jax.Array]:
    """Return the first output channel of each operand, of a warpgroup."""
    first = item.column * problem.width + me * CHANNELS
    return first, first if problem.gated else first + PART


def _all_scaled(
    problem: Problem, inputs: Inputs, me: jax.Array, item: Item, sums: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Return the sums of both operands times their scales, and plus a bias."""
    pairs = zip(_channels_of(problem, me, item), sums, strict=True)
    return tuple(
        _scaled(problem, inputs, item, place, operand, values)
        for operand, (place, values) in enumerate(pairs)
    )


def _activate(gate: Gate, g: jax.Array, u: jax.Array) -> jax.Array:
    """Return the gated activation of gate and up, with the slope and limits of `Gate`."""
    if gate.limit is not None:
        g = jnp.minimum(g, gate.limit)
        u = jnp.minimum(jnp.maximum(u, -gate.limit), gate.limit) + 1.0
    return g / (1.0 + jnp.exp2(g * (-LOG2_E * gate.slope))) * u


def _scaled(
    problem: Problem, inputs: Inputs, item: Item, place: jax.Array, part: int, values: jax.Array
) -> jax.Array:
    """Return values [CHANNELS, rows] times scales of their channels and rows, and plus a bias."""
    part, shape = part if problem.gated else 0, values.shape
    if inputs.scales is not None:
        values = values * _of_channels(inputs.scales[part], item, place, shape)
    if inputs.row_scale is not None:
        values = values * _of_rows(inputs.row_scale, item, shape)
    if inputs.biases is not None:
        bias = _of_channels(inputs.biases[part], item, place, shape).astype(jnp.float32)
        if inputs.bias_gain is not None:
            bias = bias * _of_rows(inputs.bias_gain, item, shape)
        values = values + bias * (item.part == 0).astype(jnp.float32)  # of all parts, once
    return values


def _of_channels(numbers: Any, item: Item, place: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Read numbers [experts, out] of the channels from `place`, for values of a shape."""
    place = jnp.minimum(place, numbers.shape[1] - CHANNELS)  # past the last: of the last
    here = numbers.at[item.expert, pl.ds(place, CHANNELS)]
    read = plgpu.load(here, layout=WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(read, shape, [0])


def _of_rows(numbers: Any, item: Item, shape: tuple[int, ...]) -> jax.Array:
    """Read numbers [tiles, rows] of the item's rows, for values of a shape."""
    read = plgpu.load(numbers.at[item.tile], layout=WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(read, shape, [1])


def _put(
    problem: Problem, out: Any, stage: Any, item: Item, place: jax.Array, values: jax.Array
) -> None:
    """Write values [CHANNELS, rows], turned, to the tile's rows and the channels from `place`."""
    flipped = plgpu.layout_cast(values.astype(problem.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was there before
    stage.transpose((1, 0))[...] = flipped
    plgpu.commit_smem()
    rows = pl.ds(item.tile * problem.rows, problem.rows)
    plgpu.copy_smem_to_gmem(stage, out.at[rows, pl.ds(place, CHANNELS)])
