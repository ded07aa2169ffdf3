"""What becomes of the sums of a block product: scaled, activated, written as numbers or codes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_added import Sums, added_sums
from pallas_kernels.block_problem import BlockMatrix, Inputs, Item, Problem, Shared, for_matrix
from pallas_kernels.gates import activate
from pallas_kernels.grouped_split import CHANNELS, PART, WARPGROUPS
from pallas_kernels.mosaic import FP8, WGMMA, code_scale, fence, remainder, store


class Worker(NamedTuple):
    """What a warpgroup that computes works with."""

    problem: Problem
    inputs: Inputs
    out: tuple[Any, ...]  # numbers or sums; or codes and scales; then what a cluster adds up
    shared: Shared
    me: jax.Array  # which of the two it is

    @property
    def channels_axis(self) -> int:
        """Which axis of its sums are channels."""
        return 0 if self.problem.few else 1

    def rows_of(self, item: Item) -> Any:
        """Return the rows of the item, or its half of them."""
        first = item.tile * self.problem.rows
        if self.problem.few:
            return pl.ds(first, self.problem.rows)
        return pl.ds(first + self.me * CHANNELS, CHANNELS)

    def channels_from(self, first: Any) -> Any:
        """Return the channels from `first` on, or its half of them."""
        return (
            pl.ds(first + self.me * CHANNELS, CHANNELS) if self.problem.few else pl.ds(first, PART)
        )


def finish(worker: Worker, item: Item, sums: Sums, added: jax.Array) -> None:
    """Scale the sums of an item, activate and write them; in a cluster its first block does.

    `added` steps with matrices of low rank came before.
    """
    problem, more = worker.problem, None
    if problem.added:
        more = added_sums(problem, worker.shared, worker.me, item, added)
    if problem.cluster == 1:
        _finish(worker, item, sums, more)
        return
    _meet(worker, item, sums)

    @pl.when(item.split == 0)
    def _() -> None:
        others = worker.out[-1]
        whole = list(sums)
        for other in range(problem.cluster - 1):
            for part in range(len(sums)):
                here = others.at[other, _place(worker, item), part, worker.me]
                whole[part] = whole[part] + plgpu.load(here, layout=WGMMA, optimized=False)
        _finish(worker, item, tuple(whole), more)


def _meet(worker: Worker, item: Item, sums: Sums) -> None:
    """Write the sums of all but the first block of a cluster, and wait until all have."""

    @pl.when(item.split > 0)
    def _() -> None:
        for part, one in enumerate(sums):
            here = worker.out[-1].at[item.split - 1, _place(worker, item), part, worker.me]
            store(here, one)

    fence(worker.problem.result.interpret)
    plgpu.commit_smem()  # all threads of the warpgroup: one of them arrives
    plgpu.barrier_arrive(worker.shared.cluster)
    plgpu.barrier_wait(worker.shared.cluster)
    fence(worker.problem.result.interpret)


def _place(worker: Worker, item: Item) -> jax.Array:
    return item.tile * worker.problem.columns + item.column


def _finish(worker: Worker, item: Item, sums: Sums, more: Sums | None) -> None:
    def finish_own(i: int, first: Any) -> None:
        _finish_matrix(worker, i, first, item, sums, more)

    for_matrix(worker.problem, item, finish_own)


def _finish_matrix(
    worker: Worker, i: int, first: Any, item: Item, sums: Sums, more: Sums | None
) -> None:
    """Finish those of matrix `i`, or of gate and up, to which there may be more to add."""
    problem, matrices = worker.problem, worker.inputs.matrices
    values = [_scaled(worker, matrices[i + n], item, first, one) for n, one in enumerate(sums)]
    if more is not None:
        values = [one + other for one, other in zip(values, more, strict=True)]
    if problem.splits > 1:
        for n, one in enumerate(values):
            store(place_of_sums(worker, worker.out[0], item, n), one)
    else:
        write(worker, i, item, tuple(values))


def place_of_sums(worker: Worker, sums: Any, item: Item, part: int = 0) -> Any:
    """Return where the item's sums are that are not rows first: of gate, or after it of up."""
    channels = worker.channels_from((part * worker.problem.columns + item.column) * PART)
    return sums.at[item.split, channels, worker.rows_of(item)]


def write(worker: Worker, i: int, item: Item, values: Sums) -> None:
    """Activate the scaled sums of matrix `i`, or of gate and up, and write them."""
    result = worker.problem.result
    one = values[0] if result.gate is None else activate(result.gate, *values)
    if result.groups is not None:
        one = _of_own_group(worker, item, one)
    if worker.problem.is_turned:
        store(place_of_sums(worker, worker.out[0], item), one)
    elif result.quantised:
        _put_codes(worker, item, one)
    else:
        _put_numbers(worker, i, item, one)


def _of_own_group(worker: Worker, item: Item, values: jax.Array) -> jax.Array:
    """Return zeros for channels that are not of a row's group, whatever these hold."""
    groups, axis = worker.problem.result.groups, worker.channels_axis
    assert groups is not None and worker.inputs.group is not None
    rows = worker.inputs.group.at[worker.rows_of(item)]
    own = plgpu.load(rows, layout=WGMMA.reduce(axis), optimized=False)
    channel = plgpu.broadcasted_iota(jnp.int32, values.shape, axis, layout=WGMMA)
    channel = channel + item.column * PART + worker.me * CHANNELS
    group = remainder(lax.div(channel, jnp.full_like(channel, groups.channels)), groups.num)
    is_own = group == lax.broadcast_in_dim(own, values.shape, [1 - axis])
    return jnp.where(is_own, values, jnp.zeros_like(values))


# ---------------------------------------------------------------- scales


def _scaled(
    worker: Worker, matrix: BlockMatrix, item: Item, first: jax.Array, values: jax.Array
) -> jax.Array:
    """Return values times scales of their channels, plus a bias, times the gain of their rows."""
    axis = worker.channels_axis

    def spread(numbers: Any, own: int) -> jax.Array:
        read = plgpu.load(numbers, layout=WGMMA.reduce(1 - own), optimized=False)
        return lax.broadcast_in_dim(read.astype(jnp.float32), values.shape, [own])

    def of_channels(numbers: Any) -> jax.Array:
        here = worker.channels_from(first)
        return spread(
            numbers.at[here] if item.expert is None else numbers.at[item.expert, here], axis
        )

    if matrix.scale is not None:
        values = values * of_channels(matrix.scale)
    if matrix.bias is not None:  # of all parts of the contraction, once
        is_first = (item.split == 0).astype(jnp.float32)
        values = values + of_channels(matrix.bias) * is_first
    if worker.inputs.gain is not None:
        here = pl.ds(0, worker.problem.rows)
        if not worker.problem.few:
            here = pl.ds(worker.me * CHANNELS, CHANNELS)
        values = values * spread(worker.inputs.gain.at[item.tile, here], 1 - axis)
    return values


# ---------------------------------------------------------------- what is written


def _put_numbers(worker: Worker, i: int, item: Item, values: jax.Array) -> None:
    """Write values to their rows, and to the channels of matrix `i`."""
    problem, out = worker.problem, worker.out[0]
    first = (item.column - problem.firsts[i]) * PART
    place, rows = sum(problem.outs[:i]) + first, worker.rows_of(item)
    stage = worker.shared.out.at[worker.me]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was there before
    _fill(worker, stage, values.astype(problem.result.dtype))
    plgpu.commit_smem()
    target = out.at[rows, worker.channels_from(place)]
    if problem.few and problem.channels <= CHANNELS:
        # The copy engine takes the other half for the first, as there is no other place in a row.
        pl.when(worker.me == 0)(lambda: plgpu.copy_smem_to_gmem(stage, target))
    else:
        plgpu.copy_smem_to_gmem(stage, target)


def _fill(worker: Worker, stage: Any, values: jax.Array) -> None:
    """Store values to shared memory, rows first."""
    if worker.problem.few:
        stage.transpose((1, 0))[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    elif jnp.dtype(values.dtype).itemsize == 2:
        stage[...] = values
    else:
        store(stage, values)


def _put_codes(worker: Worker, item: Item, values: jax.Array) -> None:
    """Write codes of every row's 128 channels, in units of a part of their largest."""
    shared, (codes_out, scales_out) = worker.shared, worker.out[:2]
    axis = worker.channels_axis
    scale = code_scale(_largest(worker, values))
    codes = (values / lax.broadcast_in_dim(scale, values.shape, [1 - axis])).astype(FP8)
    stage, rows = shared.out.at[worker.me], worker.rows_of(item)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if worker.problem.few:  # numbers of 16 bits can be turned, and float16 holds every code
        turned = plgpu.layout_cast(codes.astype(jnp.float16), plgpu.Layout.WGMMA_TRANSPOSED)
        store(stage.transpose((1, 0)), turned.astype(FP8))
        own = pl.ds(0, worker.problem.rows)
    else:
        store(stage, codes)
        own = pl.ds(worker.me * CHANNELS, CHANNELS)
    has_scales = True if not worker.problem.few else worker.me == 0

    @pl.when(has_scales)
    def _() -> None:
        store(shared.scale.at[own], scale)

    plgpu.commit_smem()
    channels = worker.channels_from(item.column * PART)
    plgpu.copy_smem_to_gmem(stage, codes_out.at[rows, channels])

    @pl.when(has_scales)
    def _() -> None:
        plgpu.copy_smem_to_gmem(shared.scale.at[own], scales_out.at[item.column, rows])


def _largest(worker: Worker, values: jax.Array) -> jax.Array:
    """Return the largest size of every row's channels; of few rows each warpgroup has half.

    These take turns: what adds up over the warps of a warpgroup goes through memory that Mosaic
    has once for all of them.
    """

    def own() -> jax.Array:
        return jnp.max(jnp.abs(values), axis=worker.channels_axis)

    if not worker.problem.few:
        return own()
    most, both = worker.shared.most, worker.shared.both

    def meet() -> None:
        plgpu.barrier_arrive(both)
        plgpu.barrier_wait(both)

    meet()  # both have read what the item before had
    for turn in range(WARPGROUPS):
        pl.when(worker.me == turn)(lambda: store(most.at[worker.me], own()))
        meet()
    found = [
        plgpu.load(most.at[turn], layout=WGMMA.reduce(0), optimized=False)
        for turn in range(WARPGROUPS)
    ]
    return functools.reduce(jnp.maximum, found)
