"""KV blocks in host memory: what left the device's prefix cache, or was swapped out.

Blocks travel as extents, sharded like the pool and row-major (`store_device.py`): one gather, one
transfer of all layers, one scatter, in few static sizes. A group of another layout puts
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shiftjax.arch.cache import LayerCache, layers_of_pools
from shiftjax.core.tier import UnitRestore
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
from shiftjax.host_tier.store_device import (
    Alike,
    Extents,
    Part,
    Row,
    Rows,
    piece,
    shards_of,
    units_piece,
)
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import Positions

COPIERS = ThreadPoolExecutor(thread_name_prefix="host-copies")  # NumPy copies without the lock
Extent = list[jax.Array]  # an array for each set of entries that look alike


class _Set(NamedTuple):
    """Entries that look alike, of a stage: an array of each extent."""

    alike: Alike
    layers: range  # of those of the model that have them
    held: list[Rows]  # of each device
    num_rows: int  # of the model

    @property
    def of_all(self) -> Rows:
        """The rows of all devices, one after the other."""
        first, *_ = self.held
        return first._replace(rows=sum((each.rows for each in self.held), ()))


def _sets_of(layout: Layout, block_size: int) -> list[_Set]:
    """Return the sets of entries, in the order of an extent's arrays."""
    sets = []
    positions = layout.positions(block_size) or Positions(1, block_size)
    for cache in layout.model.caches:
        own = layout.shapes[cache.heads]
        layers = range(cache.first, cache.first + len(cache.places))
        for alike in cache.spec.alike:
            entry = cache.spec.entries[alike[0]]
            held = []
            for device in range(layout.num_devices):
                run = positions.run(device % positions.ways)
                rows = tuple(Row(each, run) for each in own.cached_rows(entry, device))
                held.append(Rows(rows, positions))
            sets.append(_Set(Alike(cache.heads, alike), layers, held, entry.rows))
    return sets


class HostTier:
    """The copies of one group, or of a stage of it; the scheduler says which, and when one goes."""

    def __init__(self, mesh: Mesh, layout: Layout, pool: PoolOptions, extents: Extents):
        self._extents = extents
        self._in_flight: deque[tuple[Extent, int]] = deque()  # with the blocks of each
        self._num_in_flight, self._most = 0, pool.blocks_in_flight
        self._ahead: dict[int, Extent] = {}  # on the devices, or on their way, by number
        self._devices = list(mesh.devices.flat)
        self._device = named(mesh, extent_spec())
        self._host = self._device.with_memory_kind("pinned_host")
        self._sets = _sets_of(layout, pool.block_size)
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
        on_host = [jax.device_put(array, self._host) for array in extent]
        for own, array in zip(self._sets, on_host, strict=True):
            part = Part(array, own.alike, own.layers, own.of_all)
            self._extents.setdefault(number, []).append(part)
        self._follow(on_host, len(blocks))

    def restore(self, pools: FlatPools, number: int, blocks: Sequence[int]) -> FlatPools:
        """Copy an extent to device blocks of the (donated) pools and return them.

        Raises KeyError for an extent that was never offloaded, or not whole; a copy to the host
        that failed makes the step fail that reads it.
        """
        self._make_room(len(blocks))
        extent = self._ahead.pop(number, None)
        if extent is None:
            extent = self._fetch(number)
        pools, done = self._scatters[len(blocks)](pools, extent, np.array(blocks, np.int32))
        self._follow([done], len(blocks))
        return pools

    def restore_units(self, pools: FlatPools, restore: UnitRestore) -> FlatPools:
        """Copy units of extents to device blocks of the (donated) pools and return them.

        The host puts together what each device needs. Raises as `restore`.
        """
        units, blocks, size = restore
        self._make_room(len(blocks))
        numbers = dict.fromkeys(number for number, _ in units)
        extent: Extent = []
        for own in self._sets:
            shards = {number: shards_of(self._parts_of(number, own)) for number in numbers}
            make = partial(units_piece, units, shards, size, own.layers)
            rest = itertools.repeat(own.num_rows), itertools.repeat(len(blocks))
            extent.append(self._on_devices(own, list(COPIERS.map(make, own.held, *rest))))
        pools, done = self._scatters[len(blocks)](pools, extent, np.array(blocks, np.int32))
        self._follow([done], len(blocks))
        return pools

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Have these extents, and no others, on the devices or on their way; nothing is awaited.

        One that cannot be had is left to its restore, so that the step fails that reads it.
        """
        self._ahead = {n: array for n, array in self._ahead.items() if n in numbers}
        for number in numbers:
            if number not in self._ahead:
                with suppress(KeyError, RuntimeError):
                    self._ahead[number] = self._fetch(number)

    def _parts_of(self, number: int, own: _Set) -> list[Part]:
        """What the stages of its writer have of an extent, of some entries. Raises KeyError."""
        return [part for part in self._extents[number] if part.entries == own.alike]

    def _fetch(self, number: int) -> Extent:
        """Start to copy an extent to the devices of this stage: its layers and rows."""
        return [self._fetch_alike(own, self._parts_of(number, own)) for own in self._sets]

    def _fetch_alike(self, own: _Set, parts: Sequence[Part]) -> jax.Array:
        for part in parts:
            is_own = part.held == own.of_all and part.layers == own.layers
            if is_own and part.array.sharding == self._host:
                return jax.device_put(part.array, self._device)
        shards = shards_of(parts)
        made = COPIERS.map(lambda rows: piece(shards, own.layers, rows, own.num_rows), own.held)
        return self._on_devices(own, list(made))

    def _on_devices(self, own: _Set, pieces: list[np.ndarray]) -> jax.Array:
        """Start to copy what each device needs of a set of entries."""
        num, _, *size = pieces[0].shape
        shape = num, len(own.of_all.rows), *size
        make: Any = jax.make_array_from_single_device_arrays
        on_devices = jax.device_put(pieces, self._devices)
        return make(shape, self._device, on_devices)

    def settle(self) -> None:
        """Wait for the copies that are on their way. Raises what made one of them fail."""
        arrays = [x for some, _ in self._in_flight for x in some if not x.is_deleted()]
        self._in_flight.clear()
        self._num_in_flight = 0
        jax.block_until_ready(arrays)

    def _make_room(self, num_blocks: int) -> None:
        """For so many more blocks on their way: forget copies that are made, and wait for some."""
        while self._in_flight:
            oldest, count = self._in_flight[0]
            if not all(map(_is_over, oldest)):
                if self._num_in_flight + num_blocks <= self._most:
                    return
                jax.block_until_ready(oldest)
            self._in_flight.popleft()
            self._num_in_flight -= count

    def _follow(self, copy: Extent, num_blocks: int) -> None:
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
        partial(_scatter_blocks, layout),
        in_specs=(of_pools, of_extents, everywhere),
        out_specs=(of_pools, everywhere),
    )
    pools = abstract_pools(mesh, layout, pool.num_blocks, pool.block_size, pool.dtype)
    gathers, scatters = {}, {}
    for size in EXTENT_SIZES:
        blocks = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=named(mesh, everywhere))
        gathers[size] = jax.jit(gather).lower(pools, blocks).compile()
        place, made = named(mesh, of_extents), gathers[size].out_info
        extent = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in made]
        scatters[size] = jax.jit(scatter, donate_argnums=0).lower(pools, extent, blocks).compile()
    return gathers, scatters


def _gather_blocks(layout: Layout, block_size: int, pools: FlatPools, blocks: jax.Array) -> Extent:
    """On one device: blocks of all layers, each `[layers * entries, rows, tokens, width]`."""
    caches = layout.caches
    given = iter(read_blocks(in_shape(pools, layout, block_size), caches, blocks))
    kept: dict[LayerCache, list[list[jax.Array]]] = {}  # by entry, of each pool
    for cache, _ in layers_of_pools(caches, len(pools)):
        kept.setdefault(cache, []).append([next(given) for _ in cache.spec.entries])

    def array(by_pool: list[list[jax.Array]], alike: tuple[int, ...]) -> jax.Array:
        some = [jnp.stack([pool[i] for i in alike], axis=1) for pool in by_pool]
        extent = jnp.concatenate([x.reshape(-1, *x.shape[2:]) for x in some]).swapaxes(1, 2)
        num, rows, *_, width = extent.shape
        return extent.reshape(num, rows, -1, width)

    return [array(kept[cache], alike) for cache in caches for alike in cache.spec.alike]


def _scatter_blocks(
    layout: Layout, pools: FlatPools, extent: Extent, blocks: jax.Array
) -> tuple[FlatPools, jax.Array]:
    """On one device: the pools with an extent in these blocks, and a number that is there then."""
    arrays, held = iter(extent), layers_of_pools(layout.caches, len(pools))
    each: list[jax.Array] = []
    for cache in layout.caches:
        by_entry: dict[int, list[jax.Array]] = {}
        ends = list(itertools.accumulate(len(places) for own, places in held if own == cache))
        for alike in cache.spec.alike:
            array = next(arrays)
            num, rows, _, width = array.shape
            by_block = array.reshape(num, rows, len(blocks), -1, width).swapaxes(1, 2)
            shape = len(cache.places), len(alike), len(blocks), -1
            by_pool = jnp.split(by_block.reshape(shape), ends[:-1])
            by_entry |= {place: [x[:, i] for x in by_pool] for i, place in enumerate(alike)}
        each += [by_entry[place][i] for i in range(len(ends)) for place in sorted(by_entry)]
    return write_blocks(pools, layout.caches, blocks, each), blocks[0]
