"""What matrices of low rank add to a block product: (x a) b, where x a is given.

    added      [tokens, matrices * width]   x a for each matrix, one after the other
    factors    [out, width]                 column-parallel; of row-parallel ones [width, out]

Both are numbers of 16 bits. An item multiplies its rows of `added` by its channels of a factor, in
steps of 64 numbers, which have a small ring of their own beside that of the product. Where the
contraction of the product is cut, the first part of it does.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_problem import ADDED_STEP, Inputs, Item, Problem, Shared, for_matrix
from pallas_kernels.grouped_split import CHANNELS, PART
from pallas_kernels.mosaic import Accumulator
from pallas_kernels.product_ring import Copier, Ring

type Sums = tuple[jax.Array, ...]


def added_ring(problem: Problem, shared: Shared) -> Ring:
    """Return the ring of what is added."""
    return Ring(
        shared.added_full, shared.added_free, problem.added_stages, problem.added_steps, _is_first
    )


def added_steps(problem: Problem, item: Item) -> jax.Array:
    """Return the steps of an item: of a cut contraction only the first part has any."""
    return jnp.where(_is_first(item), jnp.int32(problem.added_steps), 0)


def _is_first(item: Item) -> jax.Array:
    return item.split == 0


def rows_copier(problem: Problem, inputs: Inputs, shared: Shared) -> Copier:
    """Copy what rows have for the matrix of the item; of gate and up both."""
    added = inputs.added
    assert added is not None

    def copy(item: Item, k: Any, slot: Any, full: Any) -> None:
        rows = pl.ds(item.tile * problem.rows, problem.rows)
        nth = sum((item.column >= first).astype(jnp.int32) for first in problem.firsts[1:-1])
        for part in range(problem.parts):
            first = (nth + part) * problem.added + k * ADDED_STEP
            here = added.at[rows, pl.ds(first, ADDED_STEP)]
            plgpu.copy_gmem_to_smem(here, shared.added_x[part].at[slot], full)

    return copy


def factor_copier(problem: Problem, inputs: Inputs, shared: Shared, part: int) -> Copier:
    """Copy the factor of a part; what is past its width are zeros."""

    def copy(item: Item, k: Any, slot: Any, full: Any) -> None:
        inner = pl.ds(k * ADDED_STEP, ADDED_STEP)

        def copy_own(i: int, first: Any) -> None:
            factor, channels = inputs.matrices[i + part].factor, pl.ds(first, PART)
            assert factor is not None
            place = (inner, channels) if problem.is_row_parallel else (channels, inner)
            plgpu.copy_gmem_to_smem(factor.at[place], shared.factors[part].at[slot], full)

        for_matrix(problem, item, copy_own)

    return copy


def added_sums(problem: Problem, shared: Shared, me: jax.Array, item: Item, before: Any) -> Sums:
    """Return what is added to each part of an item; `before` steps came before."""
    mine, stages = pl.ds(me * CHANNELS, CHANNELS), jnp.int32(problem.added_stages)

    def run_step(k: jax.Array, _: None, totals: tuple[Any, ...]) -> None:
        slot = lax.rem(before + k, stages)
        plgpu.barrier_wait(shared.added_full.at[slot])
        for part, total in enumerate(totals):
            factor = shared.factors[part]
            if problem.is_row_parallel:
                own = factor.at[slot, pl.ds(0, ADDED_STEP), mine].transpose((1, 0))
            else:
                own = factor.at[slot, mine]
            plgpu.wgmma(total, own, shared.added_x[part].at[slot].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.added_free.at[slot])

    def multiply(*totals: Any) -> Sums:
        step = functools.partial(run_step, totals=totals)
        lax.fori_loop(0, added_steps(problem, item), step, None)
        return tuple(total[...] for total in totals)

    return pl.run_scoped(multiply, *[Accumulator(problem.shape, jnp.float32)] * problem.parts)
