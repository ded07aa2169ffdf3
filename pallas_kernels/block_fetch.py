"""How codes and scales of a block product come into shared memory: a ring that is kept full."""

import functools
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_added import added_ring, factor_copier, rows_copier
from pallas_kernels.block_problem import (
    Inputs,
    Item,
    Problem,
    Shared,
    count_items,
    for_matrix,
    read_item,
    ring_of,
)
from pallas_kernels.grouped_split import PART
from pallas_kernels.product_ring import Copier, fill_ring


def fetch(problem: Problem, inputs: Inputs, shared: Shared) -> None:
    """Copy rows, their scales, and the weights of each part of the items."""
    jobs = [_rows_copier(problem, inputs, shared)]
    if not problem.is_plain:
        jobs.append(_scales_copier(problem, inputs, shared))
    jobs += [_weights_copier(problem, inputs, shared, part) for part in range(problem.parts)]
    after = None
    if problem.added:
        rows = [rows_copier(problem, inputs, shared)] + [None] * (len(jobs) - 1 - problem.parts)
        own = [factor_copier(problem, inputs, shared, part) for part in range(problem.parts)]
        after = added_ring(problem, shared), rows + own
    fill_ring(
        ring_of(problem, shared),
        functools.partial(count_items, problem, inputs),
        functools.partial(read_item, problem, inputs),
        jobs,
        after,
    )


def _rows_copier(problem: Problem, inputs: Inputs, shared: Shared) -> Copier:
    def copy(item: Item, k: Any, slot: Any, full: Any) -> None:
        rows = pl.ds(item.tile * problem.rows, problem.rows)
        here = inputs.x.values.at[rows, _inputs_of(problem, item, k)]
        plgpu.copy_gmem_to_smem(here, shared.x.at[slot], full)

    return copy


def _scales_copier(problem: Problem, inputs: Inputs, shared: Shared) -> Copier:
    scale = inputs.x.scale
    assert scale is not None, "codes have scales"

    def copy(item: Item, k: Any, slot: Any, full: Any) -> None:
        rows = pl.ds(item.tile * problem.rows, problem.rows)
        here = scale.at[item.split * problem.steps + k, rows]
        plgpu.copy_gmem_to_smem(here, shared.x_scale.at[slot, pl.ds(0, problem.rows)], full)

    return copy


def _weights_copier(problem: Problem, inputs: Inputs, shared: Shared, part: int) -> Copier:
    """Copy the weights of a part; of joined matrices a block of channels is of one of them."""

    def copy(item: Item, k: Any, slot: Any, full: Any) -> None:
        def copy_own(i: int, first: Any) -> None:
            matrix, channels = inputs.matrices[i + part].values, pl.ds(first, PART)
            step = item.split * problem.steps + k
            if problem.is_row_parallel and problem.is_plain:
                here = matrix.at[step, pl.ds(0, problem.block), channels]
            elif problem.is_row_parallel:
                here = matrix.at[step, channels]
            elif item.expert is not None:
                here = matrix.at[item.expert, channels, _inputs_of(problem, item, k)]
            else:
                here = matrix.at[channels, _inputs_of(problem, item, k)]
            plgpu.copy_gmem_to_smem(here, shared.weights[part].at[slot], full)

        for_matrix(problem, item, copy_own)

    return copy


def _inputs_of(problem: Problem, item: Item, k: Any) -> Any:
    """Return which inputs a step has; past the last they are zeros."""
    return pl.ds((item.split * problem.steps + k) * problem.block, problem.block)
