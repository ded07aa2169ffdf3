"""Rows of a prefill kernel, their sinks and how they leave: what combines parts shares it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import LOG2_E, WGMMA, filled, store
from pallas_kernels.prefill_terms import Problem, Rows, for_each_head
from pallas_kernels.prefill_work import WARPGROUP_ROWS


def row_sinks(problem: Problem, sinks: Any, head: jax.Array, hidden: jax.Array) -> jax.Array:
    """Return the sink of each row, [64], as the softmax has logits: see `prefill_softmax.cap`.

    `sinks` [heads] in device memory; `head` is the KV head. They are read one by one, all under way
    at once: no launch before the kernel spreads them over rows. `hidden` is any number that the
    compiler does not know, not negative: it would keep rows and addresses in registers, and spill.
    """
    zero = jnp.minimum(hidden, 0)
    row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=WGMMA.reduce(1))
    first, missing = (head + zero) * problem.q_per_kv, problem.options.soft_cap or 0.0
    logits = [sinks[first + g].astype(jnp.float32) for g in range(problem.q_per_kv)]
    rows = filled(row.shape, 0.0, WGMMA.reduce(1))
    for g, logit in enumerate(logits):
        values = filled(row.shape, (logit - missing) * LOG2_E, WGMMA.reduce(1))
        rows = jnp.where(row + zero >= g * problem.n, values, rows)
    return rows


def put_rows(
    problem: Problem,
    stage: Any,
    out: Any,
    tokens: Rows,
    head: jax.Array,
    rows: jax.Array,
) -> None:
    """Write the rows of the tokens that are owned, by way of `stage`: all at once, or one by one.

    `rows` [64, columns] are of the query heads of KV head `head`; `stage` is shared memory of that
    shape that nothing reads any more, `out` [tokens, heads, columns] in device memory.
    """
    n, box = problem.n, problem.box
    # Copies of n rows cannot be from tiles of 8; 256 columns are too many for a layout's search.
    if n % 8 or rows.shape[1] > 192:
        store(stage, rows.astype(problem.out_dtype))
    else:
        stage[...] = rows.astype(problem.out_dtype)
    plgpu.commit_smem()

    def copy(token, count):
        def copy_head(g):
            source = stage.at[pl.ds(g * n + token - tokens.start, count)]
            plgpu.copy_smem_to_gmem(
                source, out.at[pl.ds(token, count), head * problem.q_per_kv + g]
            )

        for_each_head(problem, head, copy_head)

    whole = tokens.end - tokens.begin == box
    pl.when(whole)(lambda: copy(tokens.start, box))

    @pl.when(~whole)
    def _():
        lax.fori_loop(tokens.begin, tokens.end, lambda token, _: copy(token, 1), None)
