"""The device memory of the KV cache: each entry of `Layout.caches`, of all layers, in few arrays.

An array holds as many layers as 32 bits can count the elements of, one after the other: each is
donated to every step and returned by it, which costs the host some microseconds (docs/gpu.md).
Where a model has several cache groups, a layer of each shares a place there: a block is of one.
On a device an array is `[places * blocks, elements of a block]`; a step reads it in the shape of
its own layout, `[places * blocks, rows, block_size, width]`, for nothing: both are the same bytes.
So groups of any width find their blocks in one memory (`DevicePools`), if their blocks have as many
bytes (`Layout.block_tokens`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from shiftjax.arch.cache import Entry, LayerCache, layers_of_pools
from shiftjax.device.joined import MOST_ELEMENTS
from shiftjax.device.mesh import named, pool_spec
from shiftjax.host_tier.extents import EXTENT_SIZES, MOST_IN_FLIGHT
from shiftjax.models.attention import BYTE
from shiftjax.models.gpu_software import records_slices
from shiftjax.models.products import CODE
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout


@dataclass(frozen=True)
class PoolOptions:
    """The KV pool of a group."""

    num_blocks: int  # the null block 0 included
    block_size: int  # tokens
    blocks_per_seq: int  # of the longest sequence
    dtype: np.dtype
    blocks_in_flight: int = MOST_IN_FLIGHT * EXTENT_SIZES[0]  # between the tiers, at most


Pools = list[tuple[Array, ...]]  # of some layers each: an array for every entry of the cache
FlatPools = Pools  # as they are stored


def make_pools(
    mesh: Mesh, layout: Layout, num_blocks: int, block_size: int, dtype: DTypeLike
) -> FlatPools:
    """Allocate zeroed pools; block 0 is the null block that padding reads and writes."""
    return pools_maker(mesh, layout, num_blocks, block_size, dtype)()


def pools_maker(
    mesh: Mesh, layout: Layout, num_blocks: int, block_size: int, dtype: DTypeLike
) -> Callable[[], FlatPools]:
    """Return what makes such pools: a program, compiled at its first call."""
    abstract = abstract_pools(mesh, layout, num_blocks, block_size, dtype)
    return jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract),
        out_shardings=named(mesh, pool_spec()),
    )


def abstract_pools(
    mesh: Mesh, layout: Layout, num_blocks: int, block_size: int, dtype: DTypeLike
) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """Describe the pools: what compiling a step needs to know of them."""
    caches, platform = layout.caches, mesh.devices.flat[0].platform
    own_tokens = block_size // layout.position_ways
    sharding = named(mesh, pool_spec())

    def describe(count: int, entry: Entry) -> jax.ShapeDtypeStruct:
        own = entry.dtype(np.dtype(dtype))
        if platform == "cpu" and own == CODE:
            own = BYTE  # or each step would widen all of it (`models/attention.py`)
        shape = count * num_blocks, layout.num_devices * entry.numbers * own_tokens
        return jax.ShapeDtypeStruct(shape, own, sharding=sharding)

    widest = max(entry.numbers for cache in caches for entry in cache.spec.entries)
    most = num_blocks * own_tokens * widest
    num = sum(num_pools(len(cache.places), most, platform) for cache in caches)
    return [
        tuple(describe(len(places), entry) for entry in cache.spec.entries)
        for cache, places in layers_of_pools(caches, num)
    ]


def num_pools(num_layers: int, elements: int, platform: str) -> int:
    """Return how many arrays hold an entry of all layers, with so many elements of each."""
    if platform == "gpu" and not records_slices():
        return num_layers
    return -(-num_layers // max(1, MOST_ELEMENTS // elements))


Caches = Sequence[LayerCache]  # of a model or of a layout


def read_blocks(pools: Pools, caches: Caches, blocks: Int[Array, "..."]) -> list[Array]:
    """Return blocks of all layers, on one device: `[layers, *blocks, ...]` of each array of a pool.

    Of a pool as it is stored, or in the shape of a layout.
    """
    return [
        array.at[numbers].get(mode="promise_in_bounds", wrap_negative_indices=False)
        for pool, numbers in zip(pools, _in_pools(pools, caches, blocks), strict=True)
        for array in pool
    ]


def write_blocks(
    pools: Pools, caches: Caches, blocks: Int[Array, " blocks"], contents: Sequence[Array]
) -> Pools:
    """Return the pools with these contents in blocks, in place; they are as `read_blocks` has them.

    A scatter of whole rows: XLA would transpose all of a pool for one along its second dimension.
    """

    def put(array: Array, numbers: Int[Array, "layers blocks"], new: Array) -> Array:
        rows = array.at[numbers.reshape(-1)]
        new = new.reshape(-1, *new.shape[2:])
        return rows.set(new, mode="promise_in_bounds", wrap_negative_indices=False)

    numbers, given = _in_pools(pools, caches, blocks), iter(contents)
    return [
        tuple(put(array, each, next(given)) for array in pool)
        for pool, each in zip(pools, numbers, strict=True)
    ]


def _in_pools(
    pools: Pools, caches: Caches, blocks: Int[Array, "..."]
) -> list[Int[Array, "layers ..."]]:
    """Return the numbers that blocks have in each pool, where layers lie one after the other."""
    found = []
    for (_, places), pool in zip(layers_of_pools(caches, len(pools)), pools, strict=True):
        count = len(places)
        first = np.arange(count, dtype=np.int32) * (pool[0].shape[0] // count)
        found.append(first.reshape(-1, *[1] * blocks.ndim) + blocks[None])
    return found


def in_shape(pools: FlatPools, layout: Layout, block_size: int) -> Pools:
    """Return, on one device, its pools as a step of this layout reads and writes them.

    Where devices split positions, blocks have those of `block_size` tokens that are a device's own.
    """
    own_tokens = block_size // layout.position_ways

    def shape(array: Array, entry: Entry) -> Array:
        return array.reshape(entry.pool_shape(len(array), own_tokens))

    held = layers_of_pools(layout.caches, len(pools))
    return [
        tuple(map(shape, pool, cache.spec.entries))
        for pool, (cache, _) in zip(pools, held, strict=True)
    ]


def as_stored(pools: Pools) -> FlatPools:
    """Undo `in_shape`."""
    return [tuple(array.reshape(len(array), -1) for array in pool) for pool in pools]


class DevicePools:
    """The pools of all devices, whichever group has them now.

    A group takes the arrays of its mesh; they are put together from what its devices have, and
    taken apart only when a group of another width takes one of the devices. A group that gives its
    arrays to a step owns what the step returns.
    """

    def __init__(self):
        self._held: dict[tuple[Device, ...], FlatPools] = {}
        self._loose: dict[Device, FlatPools] = {}
        self._makers: dict[tuple[Mesh, PoolOptions], Callable[[], FlatPools]] = {}

    def has(self, mesh: Mesh) -> bool:
        """Whether the devices of a mesh have pools."""
        held = {device for devices in self._held for device in devices}
        return held.union(self._loose).issuperset(mesh.devices.flat)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        pools = [*self._held.values(), *self._loose.values()]
        arrays = [array for each in jax.tree.leaves(pools) for array in each.addressable_shards]
        return sum(shard.data.nbytes for shard in arrays)

    def take(self, mesh: Mesh) -> FlatPools:
        """Return the pools of the devices of a mesh, as arrays on it."""
        devices = tuple(mesh.devices.flat)
        if devices not in self._held:
            self._take_apart(devices)
            self._held[devices] = _assemble([self._loose.pop(each) for each in devices], mesh)
        return self._held[devices]

    def put(self, mesh: Mesh, pools: FlatPools) -> None:
        """Keep what a step has made of the pools that `take` gave for this mesh."""
        self._held[tuple(mesh.devices.flat)] = pools

    def allocate(self, mesh: Mesh, layout: Layout, sizes: PoolOptions) -> None:
        """Make empty pools for the devices of a mesh; what was in them is lost."""
        self.drop(mesh)
        if (mesh, sizes) not in self._makers:
            blocks = sizes.num_blocks, sizes.block_size
            self._makers[mesh, sizes] = pools_maker(mesh, layout, *blocks, sizes.dtype)
        self._held[tuple(mesh.devices.flat)] = self._makers[mesh, sizes]()

    def drop(self, mesh: Mesh) -> None:
        """Let go of the pools of the devices of a mesh."""
        devices = tuple(mesh.devices.flat)
        self._held.pop(devices, None)
        self._take_apart(devices)
        for device in devices:
            self._loose.pop(device, None)

    def _take_apart(self, devices: Sequence[Device]) -> None:
        """Let go of what groups hold that have any of these devices.

        A call that has failed leaves nothing of what it was given: its devices have no pools then.
        """
        for held in [each for each in self._held if not set(each).isdisjoint(devices)]:
            pools = self._held.pop(held)
            if any(array.is_deleted() for pool in pools for array in pool):
                continue
            if len(held) == 1:
                self._loose[held[0]] = pools
                continue
            for place, shard in enumerate(pools[0][0].addressable_shards):  # of all in this order
                self._loose[shard.device] = [
                    tuple(array.addressable_data(place) for array in pool) for pool in pools
                ]


def _assemble(buffers: Sequence[FlatPools], mesh: Mesh) -> FlatPools:
    """Put the pools of devices together as arrays of a mesh; on one device they are some.

    An array takes some 40 us of the host, which all groups wait for.
    """
    if len(buffers) == 1:
        return buffers[0]
    sharding = named(mesh, pool_spec())
    make: Any = jax.make_array_from_single_device_arrays

    def array(*parts: jax.Array) -> jax.Array:
        num_blocks, elements = parts[0].shape
        return make((num_blocks, elements * len(parts)), sharding, list(parts))

    return jax.tree.map(array, *buffers)
