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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.four_bits import UNIT, Stage, load_channels, widened
from pallas_kernels.gates import activate
from pallas_kernels.grouped_fetch import fetch
from pallas_kernels.grouped_problem import (
    Inputs,
    Item,
    Problem,
    Shared,
    count_items,
    read_item,
    shared_memory,
)
from pallas_kernels.grouped_split import CHANNELS, PART, PARTS, WARPGROUPS
from pallas_kernels.mosaic import WGMMA, Accumulator, store
from pallas_kernels.product_ring import run_warpgroups

# Multiplies the stage in a slot of the ring, and adds to the sums of both operands.
type Multiplier = Callable[[jax.Array, tuple[Any, ...]], None]


def multiply_tiles(problem: Problem, inputs: Inputs) -> jax.Array:
    """Launch the kernel; return [rows, channels], or with several parts `Sums`, to be added up.

    Tiles that the step does not have are not written.
    """
    arrays, tree = jax.tree.flatten(inputs)
    return plgpu.kernel(
        functools.partial(_product_kernel, problem, tree),
        out_type=_out_type(problem, inputs),
        scratch_types=[shared_memory(problem, inputs)],
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
    compute = functools.partial(_compute, problem, inputs, out, shared)
    run_warpgroups(compute, lambda: fetch(problem, inputs, shared), WARPGROUPS)


def _compute(problem: Problem, inputs: Inputs, out: Any, shared: Shared, me: jax.Array) -> None:
    """Multiply this block's items, one after the other; read which is next before it is needed."""

    def run_item(nth: jax.Array, item: Item) -> Item:
        upcoming = read_item(problem, inputs.tiles, nth + 1)
        sums = _multiply(problem, shared, me, nth * problem.steps)
        if problem.parts == 1:
            finish(problem, inputs, out, shared.out.at[me], me, item, sums)
        else:
            _put_sums(problem, inputs, out, me, item, sums)
        return upcoming

    first = read_item(problem, inputs.tiles, jnp.int32(0))
    lax.fori_loop(0, count_items(problem, inputs.tiles), run_item, first)
    plgpu.wait_smem_to_gmem(0)


def _multiply(
    problem: Problem, shared: Shared, me: jax.Array, before: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the products [CHANNELS, rows] of both parts; `before` steps came before.

    A stage is given back a step later: the products of two steps are under way.
    """
    stages = jnp.int32(problem.stages)
    multiply = (_numbers_multiplier if problem.coded is None else _codes_multiplier)(
        problem, shared, me
    )

    def run_steps(*sums: Any) -> tuple[jax.Array, ...]:
        def run_step(count: jax.Array, _: None) -> None:
            slot = lax.rem(count, stages)
            plgpu.barrier_wait(shared.full.at[slot])
            multiply(slot, sums)
            plgpu.wgmma_wait(PARTS if problem.coded is None else 0)  # registers are used again

            @pl.when(count > before)
            def _() -> None:
                plgpu.barrier_arrive(shared.free.at[lax.rem(count - 1, stages)])

        end = before + problem.steps
        lax.fori_loop(before, end, run_step, None)
        results = tuple(total[...] for total in sums)
        if problem.coded is not None and problem.coded.unit != 1.0:
            results = tuple(total * problem.coded.unit for total in results)
        plgpu.barrier_arrive(shared.free.at[lax.rem(end - 1, stages)])
        return results

    empty = Accumulator((CHANNELS, problem.rows), jnp.float32)
    return pl.run_scoped(run_steps, *[empty] * PARTS)


def _numbers_multiplier(problem: Problem, shared: Shared, me: jax.Array) -> Multiplier:
    """Of weights that are operands as they are, in shared memory."""
    mine = pl.ds(me * CHANNELS, CHANNELS)

    def multiply(slot: jax.Array, sums: tuple[Any, ...]) -> None:
        for total, weights in zip(sums, shared.weights, strict=True):
            plgpu.wgmma(total, weights.at[slot, mine], shared.x.at[slot].transpose((1, 0)))

    return multiply


def _codes_multiplier(problem: Problem, shared: Shared, me: jax.Array) -> Multiplier:
    """Of codes of four bits, whose operands are registers."""
    mine, coded = pl.ds(me * CHANNELS, CHANNELS), problem.coded
    assert coded is not None

    def multiply(slot: jax.Array, sums: tuple[Any, ...]) -> None:
        for total, codes, groups in zip(sums, shared.weights, shared.groups, strict=True):
            scales, zeros = (None if one is None else one.at[slot, :, mine] for one in groups)
            stage = Stage(codes.at[slot, mine], scales, zeros)
            for unit, operand in enumerate(widened(coded, stage, problem.interpret)):
                x = shared.x.at[slot, :, pl.ds(unit * UNIT, UNIT)].transpose((1, 0))
                if problem.interpret:  # which multiplies what is in memory
                    place = shared.operand.at[me]
                    place[...] = operand
                    plgpu.commit_smem()
                    plgpu.wgmma(total, place, x)
                else:
                    plgpu.wgmma(total, operand, x)

    return multiply


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
        _put(problem, out, stage, item, first, activate(problem.gate, first_values, second_values))
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


def _scaled(
    problem: Problem, inputs: Inputs, item: Item, place: jax.Array, part: int, values: jax.Array
) -> jax.Array:
    """Return values [CHANNELS, rows] times the gain of their rows, and plus a bias times that."""
    part, shape = part if problem.gated else 0, values.shape
    if inputs.gain is not None:
        values = values * _of_rows(inputs.gain, item, shape)
    if inputs.biases is not None:
        bias = _of_channels(problem, inputs.biases[part], item, place, shape)
        bias = bias.astype(jnp.float32)
        if inputs.gain is not None:
            bias = bias * _of_rows(inputs.gain, item, shape)
        values = values + bias * (item.part == 0).astype(jnp.float32)  # of all parts, once
    return values


def _of_channels(
    problem: Problem, numbers: Any, item: Item, place: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Read numbers [experts, out] of the channels from `place`, for values of a shape."""
    place = jnp.minimum(place, numbers.shape[1] - CHANNELS)  # past the last: of the last
    here = numbers.at[item.expert, pl.ds(place, CHANNELS)]
    is_turned = problem.coded is not None and problem.coded.are_turned
    return lax.broadcast_in_dim(load_channels(here, is_turned, problem.interpret), shape, [0])


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
