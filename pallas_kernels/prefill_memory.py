"""The memory warpgroup of the prefill kernel: fetches, and prepares what cannot be used as is."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import columns_of
from pallas_kernels.prefill_terms import (
    Inputs,
    Kernel,
    Piece,
    Problem,
    Shared,
    for_each_head,
    oldest,
    read_piece,
    read_share,
    round_of,
)
from pallas_kernels.prefill_work import COMPUTE_WARPGROUPS

TILE = 64  # rows of shared memory that are worked on at a time

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
    """Fetch the queries of both compute warpgroups, a box of tokens for each head."""
    problem, inputs, _, shared = kernel
    n, box = problem.n, problem.box
    for w in range(COMPUTE_WARPGROUPS):
        pl.when(turn > 0)(lambda w=w: plgpu.barrier_wait(shared.q_free.at[w]))
        start = read_share(problem, inputs, piece, w).rows.start

        def copy(g, w=w, start=start):
            plgpu.copy_gmem_to_smem(
                inputs.q.at[pl.ds(start, box), piece.head * problem.q_per_kv + g],
                shared.q_in.at[w, pl.ds(g * n, box)],
                shared.q_ready.at[w],
            )

        for_each_head(problem, piece.seq, copy)


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
    """Start the TMA copies of one round into `stage`; `barrier` counts their bytes."""
    for i, source in enumerate(sources):
        rows = pl.ds(i * source.shape[0], source.shape[0])
        plgpu.copy_gmem_to_smem(source, stage.at[rows], barrier)


def fetch_rounds(
    kernel: Kernel, piece: Piece, length: jax.Array, turn: jax.Array, step: jax.Array
) -> None:
    """Fetch queries, keys and values as they are, but for the values where what is seen ends."""
    problem, inputs, _, shared = kernel
    stages, offset = jnp.int32(problem.stages), step - piece.first
    low, start = oldest(problem, piece.position), piece.first

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

    def fetch_part(j):
        fetch(inputs.kv.v_pool, shared.v, shared.raw_ready, shared.v_free, j)

    def hand_over(j):
        begin = j * problem.kv_tile
        clear_unseen(problem, shared, slot_of(j), low - begin, length - begin)

    def fetch_all_queries():
        fetch_queries(kernel, piece, turn)

    if problem.options.window is not None:  # the first round may begin before the window
        is_part = (piece.first * problem.kv_tile < low) & (piece.first < piece.last)
        start = piece.first + is_part.astype(jnp.int32)
        by_warps(
            lambda: pl.when(is_part)(lambda: fetch_keys(piece.first, None)),
            lambda: pl.when(is_part)(lambda: fetch_part(piece.first)),
            fetch_all_queries,
        )
        pl.when(is_part)(lambda: hand_over(piece.first))
        fetch_all_queries = nothing

    whole = jnp.clip(round_of(problem, length), start, piece.last)  # one round may be left then

    def fetch_all_values():
        lax.fori_loop(start, whole, fetch_values, None)
        pl.when(whole < piece.last)(lambda: fetch_part(whole))

    by_warps(
        lambda: lax.fori_loop(start, piece.last, fetch_keys, None),
        fetch_all_values,
        fetch_all_queries,
    )
    pl.when(whole < piece.last)(lambda: hand_over(whole))


def clear_unseen(
    problem: Problem, shared: Shared, slot: jax.Array, low: jax.Array, high: jax.Array
) -> None:
    """Hand over values when they have come; those that no token sees, outside low..high, as 0."""
    plgpu.barrier_wait(shared.raw_ready)
    convert(problem, shared.v.at[slot], shared.v.at[slot], low, high)
    for _ in range(problem.copies_per_round):
        plgpu.barrier_arrive(shared.v_ready.at[slot])


def fetch_raw(
    kernel: Kernel, piece: Piece, length: jax.Array, turn: jax.Array, step: jax.Array
) -> None:
    """Fetch queries as they are, and keys and values that have to be converted."""
    problem, inputs, _, shared = kernel
    low = oldest(problem, piece.position)

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
        begin = j * problem.kv_tile
        convert_round(problem, shared, low - begin, length - begin, j + step - piece.first)

    some = piece.first < piece.last
    pl.when(some)(lambda: request(piece.first, fetch_all_queries))
    pl.when(~some)(lambda: by_warps(queries=fetch_all_queries))
    lax.fori_loop(piece.first, piece.last, body, None)


def convert_round(
    problem: Problem, shared: Shared, low: jax.Array, high: jax.Array, step: jax.Array
) -> None:
    """Convert the keys and values of a round, of which some token may see low..high."""
    slot, raw_slot = lax.rem(step, jnp.int32(problem.stages)), lax.rem(step, jnp.int32(2))
    again = step >= problem.stages
    keys = shared.k_raw, shared.k, 0, shared.k_free, shared.k_ready
    values = shared.v_raw, shared.v, 2, shared.v_free, shared.v_ready
    for raw, stages, barrier, free, ready in (keys, values):
        pl.when(again)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
        plgpu.barrier_wait(shared.raw_ready.at[barrier + raw_slot])
        convert(problem, raw.at[raw_slot], stages.at[slot], low, high)
        plgpu.barrier_arrive(ready.at[slot])


def convert(problem: Problem, source: Any, target: Any, low: jax.Array, high: jax.Array) -> None:
    """Bring the rows low..high to the type of the multiplications; the others become zeros.

    In a slot of no token there may be NaN, and in a block that left the window; 0 * NaN is not 0.
    """
    size = TILE, columns_of(problem.head_dim)
    if problem.is_fp8:  # four neighbours to a thread: two would be half a word of shared memory
        layout = plgpu.Layout.WGMMA_UPCAST_2X
    else:
        layout = plgpu.Layout.SMEM_GMEM_COPY(size, problem.dtype, swizzle=2 * size[1])

    def convert_all(is_part: bool) -> None:
        for row in range(0, problem.kv_tile, size[0]):
            for column in range(0, problem.head_dim, size[1]):
                place = pl.ds(row, size[0]), pl.ds(column, size[1])
                values = plgpu.load(source.at[place], layout=layout).astype(problem.dtype)
                if is_part:
                    rows = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=layout)
                    seen = (rows + row >= low) & (rows + row < high)
                    values = jnp.where(seen, values, jnp.zeros_like(values))
                target.at[place][...] = values

    is_part = (low > 0) | (high < problem.kv_tile)
    pl.when(~is_part)(lambda: convert_all(False))
    pl.when(is_part)(lambda: convert_all(True))
    plgpu.commit_smem()


def await_the_end(problem: Problem, shared: Shared, count: jax.Array, steps: jax.Array) -> None:
    """Wait until everything fetched has been read; who has waited for a barrier still does."""

    def await_stages(free: Any) -> None:
        def wait(step, _):
            plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(problem.stages))])

        lax.fori_loop(jnp.maximum(steps - problem.stages, 0), steps, wait, None)

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
