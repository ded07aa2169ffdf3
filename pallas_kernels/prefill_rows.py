"""How rows of results leave a prefill kernel: what the kernel and what combines parts share."""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import store
from pallas_kernels.prefill_terms import Problem, Rows, for_each_head


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
