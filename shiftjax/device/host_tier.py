"""KV blocks parked in host memory: the other side of preemption by swap.

A block travels as one array, `[2 * layers, elements]`, sharded by heads like the pool, so one
transfer moves all layers. Copies are dispatched, never awaited: the device's own order puts an
offload before the step that reuses the block, and a restore before the step that reads it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shiftjax.device.mesh import named, payload_spec, pool_spec
from shiftjax.device.pool import FlatPools


class HostTier:
    """Blocks in `pinned_host` memory, by host block id; the scheduler hands the ids out."""

    def __init__(self, mesh: Mesh, pools: FlatPools):
        self._blocks: dict[int, jax.Array] = {}
        device = named(mesh, payload_spec())
        self._device, self._host = device, device.with_memory_kind("pinned_host")
        index = jax.ShapeDtypeStruct((), jnp.int32)
        stored = named(mesh, pool_spec())
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=stored), pools
        )
        self._gather = jax.jit(_gather_block, out_shardings=device).lower(like, index).compile()
        payload = self._gather.out_info
        payload = jax.ShapeDtypeStruct(payload.shape, payload.dtype, sharding=device)
        scatter = jax.jit(_scatter_block, donate_argnums=0)
        self._scatter = scatter.lower(like, payload, index).compile()

    def clear(self) -> None:
        """Forget every block: the pool they belong to is gone."""
        self._blocks.clear()

    def offload(self, pools: FlatPools, device_block: int, host_block: int) -> None:
        """Copy a device block to the host."""
        payload = self._gather(pools, np.int32(device_block))
        self._blocks[host_block] = jax.device_put(payload, self._host)

    def restore(self, pools: FlatPools, device_block: int, host_block: int) -> FlatPools:
        """Copy a host block back into the (donated) pools and return them."""
        payload = jax.device_put(self._blocks.pop(host_block), self._device)
        return self._scatter(pools, payload, np.int32(device_block))


def _gather_block(pools: FlatPools, block: jax.Array) -> jax.Array:
    return jnp.stack([pool[block] for layer in pools for pool in layer])


def _scatter_block(pools: FlatPools, payload: jax.Array, block: jax.Array) -> FlatPools:
    write = jax.lax.dynamic_update_index_in_dim
    return [
        (write(k, payload[2 * i], block, 0), write(v, payload[2 * i + 1], block, 0))
        for i, (k, v) in enumerate(pools)
    ]
