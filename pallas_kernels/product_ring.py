"""The memory pipeline of products: a warpgroup that keeps a ring of shared memory full by TMA.

A thread block stays on its multiprocessor and takes items in turn: some output channels of some
rows, over steps of the contraction. The ring holds the steps of one item after the other, so that
the first of an item are fetched while the one before is still multiplied.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_MEMORY_LIMIT = 227 * 1024  # bytes of a thread block
MAX_STAGES = 8
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40  # of a thread: 504 for three warpgroups

# Copies step `k` of an item into a slot of a ring, and arrives at its barrier.
type Copier = Callable[[Any, Any, Any, Any], None]


class Ring(NamedTuple):
    """Barriers of a ring: `full` is said by copies, `free` by who has multiplied."""

    full: Any
    free: Any
    stages: int
    steps: int  # of an item
    has: Callable[[Any], jax.Array] | None = None  # whether an item has any; None: every one


def run_warpgroups(
    compute: Callable[[jax.Array], None], fetch: Callable[[], None], num_compute: int
) -> None:
    """Run `compute` in the first warpgroups, and `fetch` in the last, which needs few registers."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < num_compute)
    def _() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == num_compute)
    def _() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        fetch()


def fill_ring(
    ring: Ring,
    num_items: Callable[[], jax.Array],
    read_item: Callable[[jax.Array], Any],
    jobs: Sequence[Copier],
    after: tuple[Ring, Sequence[Copier | None]] | None = None,
) -> None:
    """Keep the ring full: a warp for each operand.

    Single warps, as every thread that asks for a copy also arrives at its barrier. `after` is
    another ring, and what each of the warps copies there when it has an item's steps in the first.
    """

    def by_warp(warp: jax.Array) -> None:
        for i, job in enumerate(jobs):
            streams = [(ring, job)]
            if after is not None and (later := after[1][i]) is not None:
                streams.append((after[0], later))
            pl.when(warp == i)(functools.partial(_stream, streams, num_items, read_item))

    plgpu.warp_map(by_warp)


def _stream(
    streams: Sequence[tuple[Ring, Copier]],
    num_items: Callable[[], jax.Array],
    read_item: Callable[[jax.Array], Any],
) -> None:
    """Copy one operand of all items, each step as soon as there is room for it."""

    def copy_item(nth: jax.Array, counts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        item = read_item(nth)
        return tuple(
            _copy_item(ring, job, item, count)
            for (ring, job), count in zip(streams, counts, strict=True)
        )

    counts = lax.fori_loop(0, num_items(), copy_item, (jnp.int32(0),) * len(streams))
    for (ring, _), count in zip(streams, counts, strict=True):
        for slot in range(ring.stages):  # until the last users have let go of them
            pl.when(slot < count)(functools.partial(plgpu.barrier_wait, ring.free.at[slot]))


def _copy_item(ring: Ring, job: Copier, item: Any, count: jax.Array) -> jax.Array:
    """Copy the steps of an item; return how many came before the next one's."""
    stages = jnp.int32(ring.stages)

    def copy_step(k: jax.Array, count: jax.Array) -> jax.Array:
        slot = lax.rem(count, stages)
        pl.when(count >= stages)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
        job(item, k, slot, ring.full.at[slot])
        return count + 1

    steps = ring.steps if ring.has is None else jnp.where(ring.has(item), ring.steps, 0)
    return lax.fori_loop(0, steps, copy_step, count)


def share_of_items(items: jax.Array | int, num_blocks: int) -> jax.Array:
    """Return how many of all items this thread block has."""
    blocks = jnp.int32(num_blocks)
    return lax.div(items - lax.axis_index("block") + blocks - 1, blocks)
