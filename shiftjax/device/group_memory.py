"""What devices hold: weights, KV pools and blocks in host memory. It outlives groups and runners.

Weights are loaded once, onto all devices of a grid; a group's arrays are assembled from the
buffers that its devices have, in any mode, without a copy. A runner borrows what its group holds.
Where other groups take turns on the same devices, a group lets go of all of it and is filled again.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import jax
from jax.sharding import Mesh, NamedSharding

from shiftjax.device.mesh import named, on_group, replicated_spec
from shiftjax.device.mode_weights import ModeWeights, Views, Weights
from shiftjax.device.pool import DevicePools, FlatPools, PoolOptions
from shiftjax.host_tier.copies_device import HostTier
from shiftjax.host_tier.store_device import Extents
from shiftjax.parallel.grid import PLAIN_USE, Mode, Use
from shiftjax.parallel.layout import Layout


def array_on_group(array: jax.Array | None, mesh: Mesh) -> jax.Array | None:
    """Return an array of a grid as that of one of its groups, over the same buffers."""
    if array is None:
        return None
    assert isinstance(array.sharding, NamedSharding)
    sharding = on_group(array.sharding, mesh)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    mine = [shards[device] for device in mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, mine)


class GroupMemory:
    """The weights and KV pools on the devices of one group, and its way to the host tier.

    It is empty until `fill`. `pools` are donated to every step and replaced by what it returns.
    Weights are never donated: those of other modes are views of the stored ones, made when a mode
    is first used.
    """

    def __init__(self, weights: ModeWeights, mesh: Mesh, device_pools: DevicePools):
        self.mesh = mesh
        self.everywhere = named(mesh, replicated_spec())  # small inputs of what runs on it
        self._device_pools = device_pools
        self._weights = weights
        self._given: list[jax.Array | None] = []  # as `fill` took them: None for a tied head
        self._stored: Weights = ()  # the same with the head; made of it when a step first needs it
        self._by_use: dict[tuple[Mode, Use], Weights] = {}
        self._uses: set[tuple[Mode, Use]] = set()  # that steps have been run in
        self._views: Views = {}
        self._sizes: PoolOptions | None = None
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

    def params(self, mode: Mode, use: Use = PLAIN_USE) -> Weights:
        """Return the weights that a step of a mode is called with.

        What several uses have in common is one view, or one copy.
        """
        key = mode, use
        if key not in self._by_use:
            self._uses.add(key)
            self._stored = self._stored or self._weights.with_head(self._given)
            self._by_use[key] = self._weights.of(mode, self._stored, use, self._views)
        return self._by_use[key]

    def fill(self, stored: Sequence[jax.Array | None]) -> None:
        """Take weights as `device.place` has put them on this group's devices, and others'.

        After `drop` with empty pools, and with the weights of all modes, so that no step waits.
        """
        if self._sizes is not None:
            self.allocate(self._sizes)
        self.hold(stored)

    def hold(self, stored: Sequence[jax.Array | None]) -> None:
        """Take weights as `fill` does; pools stay as they are."""
        self.drop_weights()
        self._given = [array_on_group(array, self.mesh) for array in stored]
        self.view()

    @property
    def given(self) -> Sequence[jax.Array | None]:
        """The weights on this group as `fill` took them; nothing while there are none."""
        return tuple(self._given)

    @property
    def num_copied_bytes(self) -> int:
        """Bytes of what modes have copies of; what else they have is views."""
        arrays = self._weights.arrays
        copies = (v for (n, *_), v in self._views.items() if self._weights.copies(arrays[n][0]))
        return sum(shard.data.nbytes for each in copies for shard in each.addressable_shards)

    def let_go(self, *places: int) -> None:
        """Hold arrays no more, nor what shares their memory; `take` is to follow."""
        arrays = self._weights.arrays
        names = {weight.name for nth in places for weight in arrays[nth]}
        gone = {n for n, (first, *_) in enumerate(arrays) if first.tied_to in names} | {*places}
        for nth in places:
            self._given[nth] = None
        self._stored = ()
        self._by_use.clear()
        self._views = {key: view for key, view in self._views.items() if key[0] not in gone}

    def take(self, nth: int, array: jax.Array) -> None:
        """Hold an array, like those that `fill` takes, as the nth; `view` is to follow."""
        self.let_go(nth)
        self._given[nth] = array_on_group(array, self.mesh)

    def take_all(self, arrays: Mapping[int, jax.Array]) -> None:
        """Hold several arrays, by their places."""
        self.let_go(*arrays)
        for nth, array in arrays.items():
            self._given[nth] = array_on_group(array, self.mesh)

    def view(self) -> None:
        """Make the weights of every mode that steps have been run in."""
        for use in self._uses:
            self.params(*use)

    def wait(self) -> None:
        """Wait until all of it is on the devices. Raises what made a transfer fail."""
        pools = [] if self._sizes is None else self.pools
        jax.block_until_ready((self._given, pools))

    def drop(self) -> None:
        """Let go of weights and pools, when no step is in flight. Extents on the host stay.

        Of one whose copy has failed whoever reads it will hear.
        """
        self.drop_weights()
        self.drop_pools()

    def drop_weights(self) -> None:
        """Let go of all weights, when no step is in flight."""
        self._given, self._stored = [], ()
        self._by_use.clear()
        self._views.clear()

    def drop_pools(self) -> None:
        """Let go of the pools, when no step is in flight."""
        if self.host is not None:
            self.host.prefetch(())
            with suppress(Exception):
                self.host.settle()
        self._device_pools.drop(self.mesh)

    @property
    def num_pool_bytes(self) -> int:
        """Bytes of the pools on the devices of this group and of all that share them with it."""
        return self._device_pools.num_bytes

    def make_pools(self) -> None:
        """Make empty pools where the devices have none."""
        if self._sizes is not None and not self._device_pools.has(self.mesh):
            self.allocate(self._sizes)

    def prepare(self, sizes: PoolOptions, extents: Extents | None) -> None:
        """Make pools where the devices have none yet, and a host tier over `extents`, if any."""
        self._sizes = sizes
        self.make_pools()
        if extents is not None:
            self.host = HostTier(self.mesh, self.layout, sizes, extents)

    def settle(self) -> None:
        """Until all copies to and from the host are made."""
        if self.host is not None:
            self.host.settle()

    def allocate(self, sizes: PoolOptions) -> None:
        """Make empty pools. What was in them is lost."""
        self._device_pools.allocate(self.mesh, self._weights.layout, sizes)
