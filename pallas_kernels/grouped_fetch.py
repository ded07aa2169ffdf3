"""How operands of a grouped product come into shared memory: a ring that is kept full."""

import functools
from typing import Any

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
from pallas_kernels.product_ring import Copier, Ring, fill_ring


def fetch(problem: Problem, inputs: Inputs, shared: Shared) -> None:
    """Keep the ring full: a warp for each part of the weights, one for the rows."""
    second = 0 if problem.gated else PART
    jobs = [
        _weights_copier(problem, inputs, shared, 0, 0),
        _weights_copier(problem, inputs, shared, 1, second),
        _rows_copier(problem, inputs.x, shared.x),
    ]
    fill_ring(
        Ring(shared.full, shared.free, problem.stages, problem.steps),
        functools.partial(count_items, problem, inputs.tiles),
        functools.partial(read_item, problem, inputs.tiles),
        jobs,
    )


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
