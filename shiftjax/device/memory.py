"""What devices hold: weights, KV pools and blocks in host memory. It outlives groups and runners.

Weights are loaded once, onto all devices of a grid; a group's arrays are assembled from the
buffers that its devices have, in any mode, without a copy. A runner borrows what its group holds.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from shiftjax.device.host_store import Chunks
from shiftjax.device.host_tier import HostTier
from shiftjax.device.mesh import named, replicated_spec
from shiftjax.device.mode_weights import ModeWeights, Weights
from shiftjax.device.pool import DevicePools, FlatPools, PoolOptions
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout


def on_group(array: jax.Array | None, mesh: Mesh) -> jax.Array | None:
    """Return an array of a grid as that of one of its groups, over the same buffers."""
    if array is None:
        return None
    assert isinstance(array.sharding, NamedSharding)
    sharding = NamedSharding(mesh, array.sharding.spec)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    mine = [shards[device] for device in mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, mine)


class GroupMemory:
    """The weights and KV pools on the devices of one group, and its way to the host tier.

    `pools` are donated to every step and replaced by what it returns. Weights are never donated:
    those of other modes are views of the stored ones, made when a mode is first used.
    """

    def __init__(
        self,
        weights: ModeWeights,
        stored: Sequence[jax.Array | None],
        mesh: Mesh,
        device_pools: DevicePools,
    ):
        self.mesh = mesh
        self.everywhere = named(mesh, replicated_spec())  # small inputs of what runs on it
        self._device_pools = device_pools
        self._weights = weights
        self._stored = weights.with_head([on_group(array, mesh) for array in stored])
        self._by_mode: dict[Mode, Weights] = {}
        self.host: HostTier | None = None

    @property
    def layout(self) -> Layout:
        """How the model falls on the devices of the group."""
        return self._weights.layout

    @property
    def pools(self) -> FlatPools:
        """The pools on the devices of the group; whoever donates them sets what came of them."""
        return self._device_pools.take(self.mesh)

    @pools.setter
    def pools(self, pools: FlatPools) -> None:
        self._device_pools.put(self.mesh, pools)

    def params(self, mode: Mode) -> Weights:
        """Return the weights that a step of a mode is called with."""
        if mode not in self._by_mode:
            self._by_mode[mode] = self._weights.of(mode, self._stored)
        return self._by_mode[mode]

    def prepare(self, sizes: PoolOptions, chunks: Chunks | None) -> None:
        """Make pools where the devices have none yet, and a host tier over `chunks`, if any."""
        if not self._device_pools.has(self.mesh):
            self._device_pools.allocate(self.mesh, self._weights.layout, sizes)
        if chunks is not None:
            self.host = HostTier(self.mesh, self.layout, sizes, chunks)

    def allocate(self, sizes: PoolOptions) -> None:
        """Make empty pools. What was in them is lost."""
        self._device_pools.allocate(self.mesh, self._weights.layout, sizes)
