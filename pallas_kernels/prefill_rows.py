"""Rows of a prefill kernel, their sinks and how they leave: what combines parts shares it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.head_codes import CodedHeads, coded
from pallas_kernels.mosaic import LOG2_E, WGMMA, filled, store
from pallas_kernels.prefill_terms import PartHeads, Problem, Rows, for_each_head
from pallas_kernels.prefill_work import WARPGROUP_ROWS


class Leaving(NamedTuple):
    """Where rows leave to, and by what shared memory, that nothing reads any more."""

    out: Any  # [tokens, heads, columns] in device memory, or `CodedHeads`, or `PartHeads`
    stage: Any  # `prefill_terms.staged_shape` of what leaves
    units: Any = None  # [64] scales of codes, or lse
    fixed: Any = None  # [1] in device memory, the scale of all; None: they have their own


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


def put_heads(
    problem: Problem,
    leaving: Leaving,
    tokens: Rows,
    head: jax.Array,
    rows: jax.Array,
    lse: jax.Array,
) -> None:
    """Write the rows of the tokens that are owned, as numbers, with their lse, or as codes.

    `rows` [64, columns] float32 are of the query heads of KV head `head`; `lse` [64].
    """
    if not isinstance(leaving.out, CodedHeads):
        put_part(problem, leaving, tokens, head, rows, lse)
        return
    codes, scale = coded(rows, problem.out_dtype, leaving.fixed, axis=1)
    store(leaving.stage, codes)
    store_scales(leaving.units, scale)
    plgpu.commit_smem()
    put_codes(problem, leaving, tokens, head)


def put_part(
    problem: Problem,
    leaving: Leaving,
    tokens: Rows,
    head: jax.Array,
    rows: jax.Array,
    lse: jax.Array,
    first: Any = True,
) -> None:
    """Write the rows of the tokens that are owned as numbers; with their lse, if that is given.

    `rows` may be some of the columns; who has the `first` of them writes the lse.
    """
    out = leaving.out
    if isinstance(out, PartHeads):
        store(leaving.units, lse)
        leaving = leaving._replace(out=out.values)
    put_rows(problem, leaving, tokens, head, rows.astype(problem.out_dtype))
    if isinstance(out, PartHeads):
        pl.when(first)(lambda: _put_units(problem, leaving.units, out.lse, tokens, head))


def store_scales(units: Any, scale: jax.Array) -> None:
    """Store the scales of rows, [64] or one number, to shared memory."""
    store(units, scale if scale.shape else filled(units.shape, scale, WGMMA.reduce(1)))


def put_codes(problem: Problem, leaving: Leaving, tokens: Rows, head: jax.Array) -> None:
    """Write the codes that are in `stage`, and their scales out of `units`."""
    _copy(problem, leaving.stage, leaving.out.values, tokens, head)
    _put_units(problem, leaving.units, leaving.out.scale, tokens, head)


def _put_units(problem: Problem, units: Any, target: Any, tokens: Rows, head: jax.Array) -> None:
    """Write a number of each row, [64] in shared memory, to `target` [heads, tokens]."""
    first = head * problem.q_per_kv

    def put_token(token: jax.Array, _: None) -> None:
        for g in range(problem.q_per_kv):  # all under way at once
            target[first + g, token] = units[g * problem.n + token - tokens.start]

    lax.fori_loop(tokens.begin, tokens.end, put_token, None)


def put_rows(
    problem: Problem, leaving: Leaving, tokens: Rows, head: jax.Array, rows: jax.Array
) -> None:
    """Write rows of numbers, by way of `stage`."""
    # Copies of n rows cannot be from tiles of 8; 256 columns are too many for a layout's search.
    if len(leaving.stage.shape) > 2:
        store(leaving.stage.at[:, 0], rows)
    elif problem.n % 8 or rows.shape[1] > 192:
        store(leaving.stage, rows)
    else:
        leaving.stage[...] = rows
    plgpu.commit_smem()
    _copy(problem, leaving.stage, leaving.out, tokens, head)


def _copy(problem: Problem, stage: Any, out: Any, tokens: Rows, head: jax.Array) -> None:
    """Copy the rows of the tokens that are owned to device memory: all at once, or one by one."""
    n, box = problem.n, problem.box
    has_room = len(stage.shape) > 2  # beside each row: all are not one piece of memory

    def copy(token, count):
        def copy_head(g):
            row = g * n + token - tokens.start
            source = stage.at[row, pl.ds(0, 1)] if has_room else stage.at[pl.ds(row, count)]
            plgpu.copy_smem_to_gmem(
                source, out.at[pl.ds(token, count), head * problem.q_per_kv + g]
            )

        for_each_head(problem, head, copy_head)

    def copy_each():
        lax.fori_loop(tokens.begin, tokens.end, lambda token, _: copy(token, 1), None)

    if has_room:
        copy_each()
        return
    whole = tokens.end - tokens.begin == box
    pl.when(whole)(lambda: copy(tokens.start, box))
    pl.when(~whole)(copy_each)
