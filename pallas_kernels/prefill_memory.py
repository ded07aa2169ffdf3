"""The memory warpgroup of the prefill kernel: fetches, and prepares what cannot be used as is."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WGMMA
from pallas_kernels.prefill_terms import (
    Inputs,
    Kernel,
    Piece,
    Problem,
    Shared,
    for_each_head,
    read_piece,
    read_share,
    round_of,
)
from pallas_kernels.prefill_work import COMPUTE_WARPGROUPS

TILE = 64  # rows and columns of shared memory that are worked on at a time

Job = Callable[[], None]


def nothing() -> None:
    """Do nothing."""


def fetch_piece(kernel: Kernel, turn: jax.Array, step: jax.Array) -> jax.Array:
    """Fetch what a piece of work needs; `step` counts the rounds of this block and is returned."""
    piece = read_piece(kernel.problem, kernel.inputs, turn)
    length = kernel.inputs.kv.seq_lens[piece.seq]
    fetch = fetch_raw if kernel.problem.is_fp8 else fetch_rounds
    fetch(kernel, piece, length, turn, step)
    return step + piece.last - piece.first


def by_warps(keys: Job = nothing, values: Job = nothing, queries: Job = nothing) -> None:
    """Give each job to a warp of its own: a copy's barrier hears of every thread that asks for it.

    With blocks of 16 tokens a round takes 16 copies, and 128 threads to each could take longer to
    say so than the round takes to be computed.
    """

    def run(warp):
        for i, job in enumerate((keys, values, queries)):
            pl.when(warp == i)(job)

    plgpu.warp_map(run)


def fetch_queries(kernel: Kernel, piece: Piece, turn: jax.Array) -> None:
    """Fetch the queries of both compute warpgroups, a box of n tokens for each head."""
    problem, inputs, _, shared = kernel
    n = problem.n
    for w in range(COMPUTE_WARPGROUPS):
        pl.when(turn > 0)(lambda w=w: plgpu.barrier_wait(shared.q_free.at[w]))
        start = read_share(problem, piece, w).start

        def copy(g, w=w, start=start):
            plgpu.copy_gmem_to_smem(
                inputs.q.at[pl.ds(start, n), piece.head * problem.q_per_kv + g],
                shared.q_in.at[w, pl.ds(g * n, n)],
                shared.q_ready.at[w],
            )

        for_each_head(problem, piece, copy)


def blocks_of(
    problem: Problem, inputs: Inputs, blocks: Any, piece: Piece, j: jax.Array
) -> Sequence[Any]:
    """Return what the copies of round j read, of K or of V.

    Do it before waiting for anything: loading block ids takes longer than all else here.
    """
    first = j * problem.copies_per_round
    per_block = problem.block_size // problem.copy_tokens
    places = [lax.div(first + i, jnp.int32(per_block)) for i in range(problem.copies_per_round)]
    tables = inputs.kv.block_tables
    last_place = tables.shape[1] - 1
    block_ids = [tables[piece.seq, jnp.minimum(place, last_place)] for place in places]
    sources = [blocks.at[block, piece.head] for block in block_ids]
    if per_block == 1:
        return sources
    part = lax.rem(j, jnp.int32(per_block)) * problem.copy_tokens  # less than a block: one copy
    return [source.at[pl.ds(part, problem.copy_tokens)] for source in sources]


def copy_blocks(sources: Sequence[Any], stage: Any, barrier: Any) -> None:
    """Ask for a round."""
    for i, source in enumerate(sources):
        rows = pl.ds(i * source.shape[0], source.shape[0])
        plgpu.copy_gmem_to_smem(source, stage.at[rows], barrier)


def fetch_rounds(
    kernel: Kernel, piece: Piece, length: jax.Array, turn: jax.Array, step: jax.Array
) -> None:
    """Fetch queries, keys and values as they are, but for the values where the context ends."""
    problem, inputs, _, shared = kernel
    stages, offset = jnp.int32(problem.config.stages), step - piece.first
    whole = jnp.minimum(round_of(problem, length), piece.last)  # one round may be left then

    def slot_of(j):
        return lax.rem(j + offset, stages)

    def fetch(blocks, target, ready, free, j):
        slot, sources = slot_of(j), blocks_of(problem, inputs, blocks, piece, j)
        pl.when(j + offset >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        copy_blocks(sources, target.at[slot], ready)

    def fetch_keys(j, _):
        fetch(inputs.kv.k_pool, shared.k, shared.k_ready.at[slot_of(j)], shared.k_free, j)

    def fetch_values(j, _):
        fetch(inputs.kv.v_pool, shared.v, shared.v_ready.at[slot_of(j)], shared.v_free, j)

    def fetch_all_values():
        lax.fori_loop(piece.first, whole, fetch_values, None)

        @pl.when(whole < piece.last)
        def _():
            fetch(inputs.kv.v_pool, shared.v, shared.raw_ready, shared.v_free, whole)

    by_warps(
        lambda: lax.fori_loop(piece.first, piece.last, fetch_keys, None),
        fetch_all_values,
        lambda: fetch_queries(kernel, piece, turn),
    )

    pl.when(whole < piece.last)(
        lambda: clear_the_end(problem, shared, slot_of(whole), length - whole * problem.kv_tile)
    )


def clear_the_end(problem: Problem, shared: Shared, slot: jax.Array, count: jax.Array) -> None:
    """Hand over values, `count` of which are of the context, when they have come."""
    plgpu.barrier_wait(shared.raw_ready)
    convert(problem, shared.v.at[slot], shared.v.at[slot], count)
    for _ in range(problem.copies_per_round):
        plgpu.barrier_arrive(shared.v_ready.at[slot])


def fetch_raw(
    kernel: Kernel, piece: Piece, length: jax.Array, turn: jax.Array, step: jax.Array
) -> None:
    """Fetch queries as they are, and keys and values that have to be converted."""
    problem, inputs, _, shared = kernel

    def request(j: jax.Array, queries: Job = nothing) -> None:
        slot = lax.rem(j + step - piece.first, jnp.int32(2))

        def ask(blocks, target, barrier):
            sources = blocks_of(problem, inputs, blocks, piece, j)
            ready = shared.raw_ready.at[barrier + slot]
            copy_blocks(sources, target.at[slot], ready)

        by_warps(
            lambda: ask(inputs.kv.k_pool, shared.k_raw, 0),
            lambda: ask(inputs.kv.v_pool, shared.v_raw, 2),
            queries,
        )

    def fetch_all_queries():
        fetch_queries(kernel, piece, turn)

    def body(j, _):
        pl.when(j + 1 < piece.last)(lambda: request(j + 1))
        convert_round(problem, shared, length - j * problem.kv_tile, j + step - piece.first)

    some = piece.first < piece.last
    pl.when(some)(lambda: request(piece.first, fetch_all_queries))
    pl.when(~some)(lambda: by_warps(queries=fetch_all_queries))
    lax.fori_loop(piece.first, piece.last, body, None)


def convert_round(problem: Problem, shared: Shared, count: jax.Array, step: jax.Array) -> None:
    """Convert the keys and values of a round, of which the first `count` are of the context."""
    slot, raw_slot = lax.rem(step, jnp.int32(problem.config.stages)), lax.rem(step, jnp.int32(2))
    again = step >= problem.config.stages
    keys = shared.k_raw, shared.k, 0, shared.k_free, shared.k_ready
    values = shared.v_raw, shared.v, 2, shared.v_free, shared.v_ready
    for raw, stages, barrier, free, ready in (keys, values):
        pl.when(again)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        plgpu.barrier_wait(shared.raw_ready.at[barrier + raw_slot])
        convert(problem, raw.at[raw_slot], stages.at[slot], count)
        plgpu.barrier_arrive(ready.at[slot])


def convert(problem: Problem, source: Any, target: Any, count: jax.Array) -> None:
    """Bring `count` rows to the type of the multiplications; the others become zeros.

    In a slot of no token there may be NaN, and 0 * NaN is not 0.
    """
    # Four neighbours of fp8 to a thread: two would be half a word of shared memory.
    layout = plgpu.Layout.WGMMA_UPCAST_2X if problem.is_fp8 else WGMMA

    def convert_all(ends_here: bool) -> None:
        for row in range(0, problem.kv_tile, TILE):
            for column in range(0, problem.head_dim, TILE):
                place = pl.ds(row, TILE), pl.ds(column, TILE)
                values = plgpu.load(source.at[place], layout=layout).astype(problem.dtype)
                if ends_here:
                    rows = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=layout)
                    values = jnp.where(rows + row < count, values, jnp.zeros_like(values))
                target.at[place][...] = values

    pl.when(count >= problem.kv_tile)(lambda: convert_all(False))
    pl.when(count < problem.kv_tile)(lambda: convert_all(True))
    plgpu.commit_smem()


def await_the_end(problem: Problem, shared: Shared, count: jax.Array, steps: jax.Array) -> None:
    """Wait until everything fetched has been read; who has waited for a barrier still does."""

    def await_stages(free: Any) -> None:
        def wait(step, _):
            plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(problem.config.stages))])

        lax.fori_loop(jnp.maximum(steps - problem.config.stages, 0), steps, wait, None)

    def await_queries():
        for warpgroup in range(COMPUTE_WARPGROUPS):
            pl.when(count > 0)(lambda w=warpgroup: plgpu.barrier_wait(shared.q_free.at[w]))

    if problem.is_fp8:
        await_stages(shared.k_free)
        await_stages(shared.v_free)
        by_warps(queries=await_queries)
    else:
        by_warps(
            lambda: await_stages(shared.k_free), lambda: await_stages(shared.v_free), await_queries
        )
