"""What the groups of a stage hold of weights: one copy on all of its units, which may change."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shiftjax.arch.weights import Weight, weights_of
from shiftjax.device.groups import Placed
from shiftjax.device.joined import Joiner, joined_shape, put_member, zeros
from shiftjax.device.mesh import joined_mesh, stored_sharding
from shiftjax.device.place import HostWeights, Values, load_rows, parts_of, place_weight
from shiftjax.parallel.stored import dtype_of, plain_weights


class Stage:
    """The groups that hold the same weights: those of a deployment, or of one of its stages."""

    def __init__(self, groups: Sequence[Placed]):
        self.groups = groups
        narrowest = min(placed.group.width for placed in groups)
        self._units = [placed for placed in groups if placed.group.width == narrowest]
        first = self._units[0].step
        self.weights, self.layout = first.weights, first.layout
        self.mesh: Mesh = joined_mesh([placed.step.mesh for placed in self._units])
        self.model = first.weights.model
        own = {weight.name: weight for weight in weights_of(self.layout.model)}
        self.plains = [
            (plain, own[plain.name])
            for plain in plain_weights(self.layout, self.model.formats)
            if plain.tied_to is None
        ]
        self._places = {
            weight.name: (nth, number)
            for nth, members in enumerate(self.weights.arrays)
            for number, weight in enumerate(members)
        }
        self._pending: Joiner | None = None  # of weights that come where there are none
        self._missing: set[str] = set()

    @property
    def is_held(self) -> bool:
        """Whether its devices hold weights."""
        return bool(self.groups[0].memory.given)

    def place(self, plain: Weight, values: Values, rows: Any) -> Iterator[tuple[Weight, jax.Array]]:
        """Yield what is stored of a plain weight, on all units."""
        parts = parts_of(plain, self.model)
        placed, _ = place_weight(plain, parts, self.model, self.layout, self.mesh, values, rows)
        yield from zip(parts, placed, strict=True)

    def put(self, weight: Weight, array: jax.Array) -> None:
        """Have an array of all units in the place of a stored weight."""
        if not self.is_held:
            self._put_aside(weight, array)
            return
        nth, number = self._places[weight.name]
        members = self.weights.arrays[nth]
        if len(members) > 1:
            whole = self.on_units(nth)
            for placed in self.groups:
                placed.memory.let_go(nth)
            array = put_member(whole, array, members, number)
        for placed in self.groups:
            placed.memory.take(nth, array)

    def _put_aside(self, weight: Weight, array: jax.Array) -> None:
        if self._pending is None:
            self._pending = Joiner(self.weights.arrays)
            self._missing = {weight.name for weight in self.model.declared}
            for each in self.model.declared:
                if each.tied_to is not None:
                    self._pending.put(each.name, None)
                    self._missing.discard(each.name)
                if each.kind == "factor":  # slots of adapters begin empty
                    self._pending.put(each.name, self._zeros(each))
                    self._missing.discard(each.name)
        self._pending.put(weight.name, array)
        self._missing.discard(weight.name)

    def _zeros(self, weight: Weight) -> jax.Array:
        sharding = stored_sharding(weight, self.layout, self.mesh)
        return zeros(weight.shape, dtype_of(weight, self.model.formats), sharding)()

    def put_arrays(self, arrays: Mapping[int, jax.Array]) -> None:
        """Have arrays of all units in the place of others, and let steps see them."""
        for placed in self.groups:
            placed.memory.take_all(arrays)
            placed.memory.view()

    def finish(self) -> None:
        """Let steps see what has been put, if all of it is there."""
        if self._pending is not None and not self._missing:
            arrays, self._pending = self._pending.arrays(), None
            self.hold(arrays)
        if self.is_held:
            for placed in self.groups:
                placed.memory.view()
            jax.block_until_ready([placed.memory.given for placed in self.groups])

    def load(self, rows: HostWeights) -> None:
        """Take all weights out of a copy on the host."""
        how = self.model, self.layout, self.mesh, rows, lambda *_: None, self.weights.arrays
        self.hold(load_rows(*how))

    def forget(self) -> None:
        """Let go of all weights."""
        self._pending = None
        for placed in self.groups:
            placed.memory.drop_weights()

    def hold(self, arrays: Sequence[jax.Array | None]) -> None:
        """Take all weights, on all units."""
        for placed in self.groups:
            placed.memory.hold(arrays)

    def arrays(self) -> Iterator[jax.Array | None]:
        """Yield the weights on all units, as `hold` takes them."""
        for nth, array in enumerate(self.groups[0].memory.given):
            yield None if array is None else self.on_units(nth)

    def on_units(self, nth: int) -> jax.Array:
        """Return the nth array of weights, on all units."""
        members = self.weights.arrays[nth]
        sharding = stored_sharding(members[0], self.layout, self.mesh)
        held = (placed.memory.given[nth] for placed in self._units)
        shards = [s.data for array in held if array is not None for s in array.addressable_shards]
        shape = joined_shape(members)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)
