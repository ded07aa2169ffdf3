"""What devices hold: weights, KV pools and blocks in host memory. It outlives groups and runners.

Weights are loaded once, onto all devices of a grid; a group's arrays are assembled from the
buffers that its devices have, in any mode, without a copy. A runner borrows what its group holds.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from shiftjax.device.host_tier import HostTier
from shiftjax.device.mode_weights import ModeWeights, Weights
from shiftjax.device.pool import PoolOptions, make_pools
from shiftjax.parallel.grid import Mode


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
    """The weights, KV pools and host blocks on the devices of one group.

    `pools` are donated to every step and replaced by what it returns. Weights are never donated:
    those of other modes are views of the stored ones, made when a mode is first used.
    """

    def __init__(self, weights: ModeWeights, stored: Sequence[jax.Array | None], mesh: Mesh):
        self.mesh = mesh
        self._weights = weights
        self._stored = weights.with_head([on_group(array, mesh) for array in stored])
        self._by_mode: dict[Mode, Weights] = {}
        self.pools: list = []
        self.host: HostTier | None = None

    def params(self, mode: Mode) -> Weights:
        """Return the weights that a step of a mode is called with."""
        if mode not in self._by_mode:
            self._by_mode[mode] = self._weights.of(mode, self._stored)
        return self._by_mode[mode]

    def allocate(self, sizes: PoolOptions, *, swaps: bool) -> None:
        """Make empty pools, and with `swaps` an empty host tier. What was in them is lost."""
        layout = self._weights.layout
        self.pools = make_pools(self.mesh, layout, sizes.num_blocks, sizes.block_size, sizes.dtype)
        if self.host is not None:
            self.host.clear()
        elif swaps:
            self.host = HostTier(self.mesh, self.pools)
