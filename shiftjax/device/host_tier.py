"""KV blocks in host memory: what left the device's prefix cache, or was swapped out.

Blocks travel as chunks, `[2 * layers, blocks, elements]`, sharded by heads like the pool: one
gather, one transfer of all layers, one scatter, in few static sizes. Copies are dispatched, never
awaited but for `MOST_IN_FLIGHT`: the device's own order puts an offload before the step that reuses
its blocks, and a restore before the step that reads them.
"""

from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shiftjax.control.host_chunks import CHUNK_SIZES, MOST_IN_FLIGHT
from shiftjax.device.mesh import chunk_spec, named, pool_spec, replicated_spec
from shiftjax.device.pool import FlatPools

Chunks = dict[int, jax.Array]  # in `pinned_host` memory, by number; of all groups


class HostTier:
    """The copies of one group; the scheduler says which, and when a chunk goes."""

    def __init__(self, mesh: Mesh, pools: FlatPools, chunks: Chunks):
        self._chunks = chunks
        self._in_flight: deque[jax.Array] = deque()
        self._device = named(mesh, chunk_spec())
        self._host = self._device.with_memory_kind("pinned_host")
        stored = named(mesh, pool_spec())
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=stored), pools
        )
        self._gathers, self._scatters = {}, {}
        for size in CHUNK_SIZES:
            blocks = jax.ShapeDtypeStruct(
                (size,), jnp.int32, sharding=named(mesh, replicated_spec())
            )
            gather = jax.jit(_gather_blocks, out_shardings=self._device)
            self._gathers[size] = gather.lower(like, blocks).compile()
            chunk = self._gathers[size].out_info
            chunk = jax.ShapeDtypeStruct(chunk.shape, chunk.dtype, sharding=self._device)
            scatter = jax.jit(_scatter_blocks, donate_argnums=0)
            self._scatters[size] = scatter.lower(like, chunk, blocks).compile()

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget chunks, also such as have never come here."""
        for number in numbers:
            self._chunks.pop(number, None)

    def offload(self, pools: FlatPools, number: int, blocks: Sequence[int]) -> None:
        """Copy device blocks to the host, as a chunk."""
        self._make_room()
        chunk = self._gathers[len(blocks)](pools, np.array(blocks, np.int32))
        self._chunks[number] = jax.device_put(chunk, self._host)
        self._in_flight.append(self._chunks[number])

    def restore(self, pools: FlatPools, number: int, blocks: Sequence[int]) -> FlatPools:
        """Copy a chunk to device blocks of the (donated) pools and return them.

        Raises KeyError for a chunk that was never offloaded; a copy to the host that failed makes
        the step fail that reads it.
        """
        self._make_room()
        chunk = jax.device_put(self._chunks[number], self._device)
        pools, done = self._scatters[len(blocks)](pools, chunk, np.array(blocks, np.int32))
        self._in_flight.append(done)
        return pools

    def _make_room(self) -> None:
        while self._in_flight and _is_over(self._in_flight[0]):
            self._in_flight.popleft()
        if len(self._in_flight) >= MOST_IN_FLIGHT:
            jax.block_until_ready(self._in_flight.popleft())


def _is_over(array: jax.Array) -> bool:
    return array.is_deleted() or array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


def _gather_blocks(pools: FlatPools, blocks: jax.Array) -> jax.Array:
    return jnp.stack([pool[blocks] for layer in pools for pool in layer])


def _scatter_blocks(
    pools: FlatPools, chunk: jax.Array, blocks: jax.Array
) -> tuple[FlatPools, jax.Array]:
    """The pools with a chunk in these blocks, and a number that is there when they are."""

    def write(pool: jax.Array, rows: jax.Array) -> jax.Array:
        return pool.at[blocks].set(rows, mode="promise_in_bounds", wrap_negative_indices=False)

    pools = [(write(k, chunk[2 * i]), write(v, chunk[2 * i + 1])) for i, (k, v) in enumerate(pools)]
    return pools, blocks[0]
