"""How operands of a grouped product come into shared memory: a ring that is kept full."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_problem import (
    Inputs,
    Item,
    Problem,
    Shared,
    count_items,
    read_item,
)
from pallas_kernels.grouped_split import PART
from pallas_kernels.grouped_work import Tiles

# Copies step `k` of an item's part into a slot of a ring, and arrives at its barrier.
type Copier = Callable[[Item, Any, Any, Any], None]


def fetch(problem: Problem, inputs: Inputs, shared: Shared) -> None:
    """Keep the ring full: a warp for each part of the weights, one for the rows.

    Single warps, as every thread that asks for a copy also arrives at its barrier.
    """
    second = 0 if problem.gated else PART
    jobs = [
        _weights_copier(problem, inputs, shared, 0, 0),
        _weights_copier(problem, inputs, shared, 1, second),
        _rows_copier(problem, inputs.x, shared.x),
    ]

    def by_warp(warp: jax.Array) -> None:
        for i, job in enumerate(jobs):
            pl.when(warp == i)(functools.partial(_stream, problem, inputs.tiles, shared, job))

    plgpu.warp_map(by_warp)


def _weights_copier(
    problem: Problem, inputs: Inputs, shared: Shared, operand: int, offset: int
) -> Copier:
    """Copy an operand, which is a matrix of its own, or the one that there is from a channel on."""
    which = min(operand, len(inputs.weights) - 1)
    weights, ring, coded = inputs.weights[which], shared.weights[operand], problem.coded

    def copy(item: Item, k: Any, slot: Any, full: Any) -> None:
        channels = pl.ds(item.column * problem.width + offset, PART)
        matrix, nth = _matrix_of(problem, item, k)
        numbers = _numbers_at(problem, nth, 1 if coded is None else 2)
        plgpu.copy_gmem_to_smem(weights.at[matrix, channels, numbers], ring.at[slot], full)
        if coded is not None:
            first = lax.div(nth * problem.step, jnp.int32(coded.group))
            groups = pl.ds(first, coded.rows(problem.step))
            for numbers, own in zip(inputs.groups[which], shared.groups[operand], strict=True):
                if numbers is not None and own is not None:
                    here = numbers.at[matrix, groups, channels]
                    plgpu.copy_gmem_to_smem(here, own.at[slot], full)

    return copy


def _rows_copier(problem: Problem, x: Any, ring: Any) -> Copier:
    def copy(item: Item, k: Any, slot: Any, full: Any) -> None:
        rows = pl.ds(item.tile * problem.rows, problem.rows)
        numbers = _numbers_at(problem, _step_of(problem, item, k))
        plgpu.copy_gmem_to_smem(x.at[rows, numbers], ring.at[slot], full)

    return copy


def _step_of(problem: Problem, item: Item, k: Any) -> Any:
    """Return which of the whole contraction step `k` of the item's part is."""
    return item.part * problem.steps + k


def _matrix_of(problem: Problem, item: Item, k: Any) -> tuple[Any, Any]:
    """Return the matrix that step `k` of the item's part is of, and which it is of that one's."""
    nth = _step_of(problem, item, k)
    if not problem.block_steps:
        return item.expert, nth
    block = lax.div(nth, jnp.int32(problem.block_steps))
    return block, nth - block * problem.block_steps


def _numbers_at(problem: Problem, nth: Any, in_a_byte: int = 1) -> Any:
    """Return where a step of the contraction is."""
    step = problem.step // in_a_byte
    return pl.ds(nth * step, step)


def _stream(problem: Problem, tiles: Tiles, shared: Shared, job: Copier) -> None:
    """Copy one operand of all items, each step as soon as there is room for it."""
    stages = jnp.int32(problem.stages)

    def copy_item(nth: jax.Array, count: jax.Array) -> jax.Array:
        item = read_item(problem, tiles, nth)

        def copy_step(k: jax.Array, count: jax.Array) -> jax.Array:
            slot = lax.rem(count, stages)
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
            job(item, k, slot, shared.full.at[slot])
            return count + 1

        return lax.fori_loop(0, problem.steps, copy_step, count)

    count = lax.fori_loop(0, count_items(problem, tiles), copy_item, jnp.int32(0))
    for slot in range(problem.stages):  # until the last users have let go of them
        pl.when(slot < count)(functools.partial(plgpu.barrier_wait, shared.free.at[slot]))
