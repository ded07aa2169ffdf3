"""KV blocks in host memory: what left the device's prefix cache, or was swapped out.

Blocks travel as extents, sharded by heads like the pool and head-major (`store_device.py`): one
gather, one transfer of all layers, one scatter, in few static sizes. A group of another layout puts
together what each of its devices needs, on the host, and scatters that. Copies are dispatched, and
never awaited but where more than `blocks_in_flight` would be on their way: the device's own order
puts an offload before the step that reuses its blocks, and a restore before the step that reads
them.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shiftjax.device.mesh import extent_spec, named, pool_spec, replicated_spec
from shiftjax.device.pool import (
    FlatPools,
    PoolOptions,
    abstract_pools,
    in_shape,
    read_blocks,
    write_blocks,
)
from shiftjax.host_tier.extents import EXTENT_SIZES
from shiftjax.host_tier.store_device import Extents, Part, piece, shards_of
from shiftjax.models.attention import layers_of_pools
from shiftjax.parallel.layout import Layout

COPIERS = ThreadPoolExecutor(thread_name_prefix="host-copies")  # NumPy copies without the lock


class HostTier:
    """The copies of one group, or of a stage of it; the scheduler says which, and when one goes."""

    def __init__(self, mesh: Mesh, layout: Layout, pool: PoolOptions, extents: Extents):
        self._extents = extents
        self._in_flight: deque[tuple[jax.Array, int]] = deque()  # with the blocks of each
        self._num_in_flight, self._most = 0, pool.blocks_in_flight
        self._ahead: dict[int, jax.Array] = {}  # on the devices, or on their way, by number
        self._devices = list(mesh.devices.flat)
        self._device = named(mesh, extent_spec())
        self._host = self._device.with_memory_kind("pinned_host")
        stage, model = layout.model.stage, layout.model
        first = stage.first if stage else 0
        self._layers = range(first, first + model.num_layers)
        self._num_kv_heads = model.num_kv_heads
        self._by_device = [tuple(layout.kv_heads_of(j)) for j in range(layout.num_devices)]
        self._heads = sum(self._by_device, ())
        self._gathers, self._scatters = compile_transfers(mesh, layout, pool)

    def try_out(self, pools: FlatPools) -> FlatPools:
        """Run every program once, from and to the null block of the (donated) pools."""
        for size, gather in self._gathers.items():
            blocks = np.zeros(size, np.int32)
            pools, _ = self._scatters[size](pools, gather(pools, blocks), blocks)
        return pools

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget extents, also such as have never come here."""
        for number in numbers:
            self._extents.pop(number, None)

    def offload(self, pools: FlatPools, number: int, blocks: Sequence[int]) -> None:
        """Copy device blocks to the host, as this stage's part of an extent."""
        self._make_room(len(blocks))
        extent = self._gathers[len(blocks)](pools, np.array(blocks, np.int32))
        part = Part(jax.device_put(extent, self._host), self._layers.start, self._heads)
        self._extents.setdefault(number, []).append(part)
        self._follow(part.array, len(blocks))

    def restore(self, pools: FlatPools, number: int, blocks: Sequence[int]) -> FlatPools:
        """Copy an extent to device blocks of the (donated) pools and return them.

        Raises KeyError for an extent that was never offloaded, or not whole; a copy to the host
        that failed makes the step fail that reads it.
        """
        self._make_room(len(blocks))
        extent = self._ahead.pop(number, None)
        if extent is None:
            extent = self._fetch(self._extents[number])
        pools, done = self._scatters[len(blocks)](pools, extent, np.array(blocks, np.int32))
        self._follow(done, len(blocks))
        return pools

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Have these extents, and no others, on the devices or on their way; nothing is awaited.

        One that cannot be had is left to its restore, so that the step fails that reads it.
        """
        self._ahead = {n: array for n, array in self._ahead.items() if n in numbers}
        for number in numbers:
            if number not in self._ahead:
                with suppress(KeyError, RuntimeError):
                    self._ahead[number] = self._fetch(self._extents[number])

    def _fetch(self, parts: Sequence[Part]) -> jax.Array:
        """Start to copy an extent to the devices of this stage: its layers and heads."""
        for part in parts:
            if part.array.sharding == self._host and part.layers == self._layers:
                return jax.device_put(part.array, self._device)
        shards = shards_of(parts)
        made = COPIERS.map(
            lambda heads: piece(shards, self._layers, heads, self._num_kv_heads), self._by_device
        )
        pieces = list(made)
        _, _, *size = pieces[0].shape
        shape = 2 * len(self._layers), len(self._heads), *size
        make: Any = jax.make_array_from_single_device_arrays
        on_devices = jax.device_put(pieces, self._devices)
        return make(shape, self._device, on_devices)

    def settle(self) -> None:
        """Wait for the copies that are on their way. Raises what made one of them fail."""
        arrays = [array for array, _ in self._in_flight if not array.is_deleted()]
        self._in_flight.clear()
        self._num_in_flight = 0
        jax.block_until_ready(arrays)

    def _make_room(self, num_blocks: int) -> None:
        """For so many more blocks on their way: forget copies that are made, and wait for some."""
        while self._in_flight:
            oldest, count = self._in_flight[0]
            if not _is_over(oldest):
                if self._num_in_flight + num_blocks <= self._most:
                    return
                jax.block_until_ready(oldest)
            self._in_flight.popleft()
            self._num_in_flight -= count

    def _follow(self, copy: jax.Array, num_blocks: int) -> None:
        self._in_flight.append((copy, num_blocks))
        self._num_in_flight += num_blocks


def _is_over(array: jax.Array) -> bool:
    return array.is_deleted() or array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


Programs = dict[int, jax.stages.Compiled]  # by blocks of an extent


def compile_transfers(mesh: Mesh, layout: Layout, pool: PoolOptions) -> tuple[Programs, Programs]:
    """The gather and the scatter of each size of extents."""
    everywhere, of_pools, of_extents = replicated_spec(), pool_spec(), extent_spec()
    of_mesh = partial(jax.shard_map, mesh=mesh, check_vma=False)
    gather = of_mesh(
        partial(_gather_blocks, layout, pool.block_size),
        in_specs=(of_pools, everywhere),
        out_specs=of_extents,
    )
    scatter = of_mesh(
        partial(_scatter_blocks, layout.model.num_layers),
        in_specs=(of_pools, of_extents, everywhere),
        out_specs=(of_pools, everywhere),
    )
    pools = abstract_pools(mesh, layout, pool.num_blocks, pool.block_size, pool.dtype)
    gathers, scatters = {}, {}
    for size in EXTENT_SIZES:
        blocks = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=named(mesh, everywhere))
        gathers[size] = jax.jit(gather).lower(pools, blocks).compile()
        extent = gathers[size].out_info
        extent = jax.ShapeDtypeStruct(extent.shape, extent.dtype, sharding=named(mesh, of_extents))
        scatters[size] = jax.jit(scatter, donate_argnums=0).lower(pools, extent, blocks).compile()
    return gathers, scatters


def _gather_blocks(
    layout: Layout, block_size: int, pools: FlatPools, blocks: jax.Array
) -> jax.Array:
    """On one device: blocks of all layers, `[2 * layers, heads, tokens, head_dim]`."""
    shaped = in_shape(pools, layout, block_size)
    kept = read_blocks(shaped, layout.model.num_layers, blocks)
    pairs = [jnp.stack(pair, axis=1) for pair in zip(kept[::2], kept[1::2], strict=True)]
    extent = jnp.concatenate([pair.reshape(-1, *pair.shape[2:]) for pair in pairs]).swapaxes(1, 2)
    num, heads, *_, head_dim = extent.shape
    return extent.reshape(num, heads, -1, head_dim)


def _scatter_blocks(
    num_layers: int, pools: FlatPools, extent: jax.Array, blocks: jax.Array
) -> tuple[FlatPools, jax.Array]:
    """On one device: the pools with an extent in these blocks, and a number that is there then."""
    num, heads, _, head_dim = extent.shape
    extent = extent.reshape(num, heads, len(blocks), -1, head_dim).swapaxes(1, 2)
    rows = extent.reshape(num_layers, 2, len(blocks), -1)
    ends = list(itertools.accumulate(layers_of_pools(num_layers, len(pools))))
    each = [mine[:, i] for mine in jnp.split(rows, ends[:-1]) for i in range(2)]
    return write_blocks(pools, num_layers, blocks, each), blocks[0]
