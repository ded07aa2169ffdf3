"""The weights and KV pools of a running engine, changed in place; see `control.Store`.

All that steps of any mode, width, stage or phase are given of a weight is one array of its devices,
or a view of it that `GroupMemory` makes anew, so an array that changes has changed for all of them.
Weights change one by one: beside all of them there are at most two copies of one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from shiftjax.device.groups import Placed
from shiftjax.device.place import (
    HostWeights,
    aligned_zeros,
    place_arrays,
    read_rows,
    rows_values,
)
from shiftjax.device.stages import Stage
from shiftjax.parallel.stored import codes_in
from shiftjax.rollouts.given_device import (
    Array,
    Pairs,
    Tensors,
    check_shapes,
    check_tensors,
    is_unused,
    open_given,
)
from shiftjax.weights.source import CheckpointError, TensorSource


class Copy(NamedTuple):
    """An array on the host: what each range of rows has, once."""

    shape: tuple[int, ...]
    sharding: NamedSharding
    shards: dict[str, np.ndarray]


class DeviceStore:
    """The weights and pools of groups, by phase: of one, or of two that have the devices in turn.

    With two, `rows` are the copy on the host that they are loaded from.
    """

    def __init__(self, phases: Sequence[Sequence[Placed]], rows: HostWeights | None = None):
        self._stages = [
            Stage([placed for placed in groups if placed.stage == number])
            for groups in phases
            for number in sorted({placed.stage for placed in groups})
        ]
        self._rows = rows
        self._asleep: list[Stage] = []  # whose weights the host keeps
        self._copies: list[list[Copy | None]] = []  # of these; none where `rows` has them
        self._without_pools: list[Stage] = []
        self._is_mixed = False  # an update has ended in the middle
        self.watchers: list[Callable[[], None]] = []  # told when all that devices held is lost

    @property
    def is_whole(self) -> bool:
        """Whether devices hold every weight, all of one update."""
        return not self._is_mixed and bool(self._at_work) and all(s.is_held for s in self._at_work)

    @property
    def _at_work(self) -> list[Stage]:
        """The stages that have the devices; of two phases those of one."""
        return [s for s in self._stages if s.is_held] if self._rows is not None else self._stages

    # ------------------------------------------------------------------ update

    def update(self, given: Any) -> int:
        """Take other weights, one by one; `given` is what `open_given` takes.

        A tree is checked before anything changes, pairs as they come, files by their headers.
        """
        update = _Update(self._at_work, self._rows)
        source = open_given(given, self._at_work[0].layout.model)
        was_mixed = self._is_mixed
        try:
            update.take_all(source)
        except BaseException:
            self._is_mixed |= update.has_begun
            raise
        for stage in self._at_work:
            stage.finish()
        self._is_mixed = was_mixed and not update.is_complete
        return update.num_bytes

    # ------------------------------------------------------------------ sleep

    @property
    def levels(self) -> tuple[int, ...]:
        """How deep it can sleep; split phases have their weights on the host anyway."""
        return (0, 1, 2) if self._rows is None else (0, 1)

    def to_host(self) -> None:
        """Let go of the weights on devices, and keep them in host memory, each shard once."""
        self._asleep = self._at_work
        for stage in self._asleep:
            if self._rows is None:
                self._copies.append([a if a is None else _copy_of(a) for a in stage.arrays()])
            stage.forget()

    def drop(self) -> None:
        """Let go of the weights for good."""
        for stage in self._stages:
            stage.forget()
        for told in self.watchers:
            told()

    def restore(self) -> None:
        """Bring back what `to_host` has kept."""
        for number, stage in enumerate(self._asleep):
            if self._rows is not None:
                stage.load(self._rows)
            else:
                stage.hold([c if c is None else _restored(c) for c in self._copies[number]])
        self._asleep, self._copies = [], []

    def drop_pools(self) -> None:
        """Let go of the KV pools."""
        self._without_pools = self._at_work
        for stage in self._without_pools:
            for placed in stage.groups:
                placed.memory.drop_pools()

    def make_pools(self) -> None:
        """Make empty KV pools, those of the widest groups first."""
        for stage in self._without_pools:
            for placed in sorted(stage.groups, key=lambda placed: -placed.group.width):
                placed.memory.make_pools()

    def held_bytes(self) -> dict[str, int]:
        """Bytes on devices by tag, and those of weights on the host."""
        held = [stage for stage in self._stages if stage.is_held]
        arrays = (array for stage in held for array in stage.arrays() if array is not None)
        weights = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
        weights += sum(p.memory.num_copied_bytes for stage in held for p in stage.groups)
        pools = sum(stage.groups[0].memory.num_pool_bytes for stage in self._stages)
        copies = (copy for stage in self._copies for copy in stage if copy is not None)
        host = sum(shard.nbytes for copy in copies for shard in copy.shards.values())
        kept = 0 if self._rows is None else self._rows.num_bytes
        return {"weights": weights, "kv_cache": pools, "host": host + kept}


class _Update:
    """One update on its way: tensors wait until all of a weight are there."""

    def __init__(self, stages: Sequence[Stage], rows: HostWeights | None):
        self._stages, self._rows = stages, rows
        self._config = stages[0].layout.model
        self.num_bytes, self.has_begun = 0, False
        self._needs = [(stage, plain, own) for stage in stages for plain, own in stage.plains]
        self._users: dict[str, list[int]] = {}  # of a tensor: weights, by their place in `_needs`
        self._expected: dict[str, tuple[int, ...]] = {}
        for number, (*_, own) in enumerate(self._needs):
            self._expected |= own.tensors
            for name in own.tensors:
                self._users.setdefault(name, []).append(number)
        self._come: dict[str, Array] = {}
        self._done: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every weight has changed."""
        return len(self._done) == len(self._needs)

    def take_all(self, source: TensorSource | Mapping[str, Array] | Pairs) -> None:
        """Change all weights that a source has. Raises CheckpointError."""
        if isinstance(source, TensorSource):
            self._check_source(source)
            for number in range(len(self._needs)):
                self._place(number, source, {})
            return
        self._refuse_codes()
        if isinstance(source, Mapping):
            wanted = [name for name in source if not self._is_unused(name)]
            check_tensors(((name, source[name]) for name in wanted), self._expected)
            for name in wanted:
                self._take(name, source[name])
        else:
            for name, array in source:
                if not self._is_unused(name):
                    check_tensors([(name, array)], self._expected)
                    self._take(name, array)
        self._end()

    def _is_unused(self, name: str) -> bool:
        return name not in self._expected and is_unused(name, self._config)

    def _check_source(self, source: TensorSource) -> None:
        missing = self._expected.keys() - source.tensors.keys()
        if missing:
            words = f"tensor {min(missing)}: expected shape {list(self._expected[min(missing)])}"
            raise CheckpointError(f"{source.location}: {words}, found nothing")
        check_shapes({n: source.tensors[n] for n in self._expected}, self._expected)
        if source.config.codes != self._config.codes:
            raise CheckpointError(f"{source.location}: its matrices are in another format")

    def _refuse_codes(self) -> None:
        for stage in self._stages:
            codes = codes_in(stage.layout.model, stage.model.formats)
            if codes is not None and not codes.are_made_anew:
                words = "matrices are codes of a checkpoint: update them from another one"
                raise CheckpointError(f"{stage.layout.model.name}: {words}")

    def _take(self, name: str, array: Array) -> None:
        """Take one tensor, and change the weights that have all of theirs by now."""
        self._come[name] = array
        for number in self._users[name]:
            names = self._needs[number][2].tensors
            if all(each in self._come for each in names):
                arrays = {each: self._come[each] for each in names}
                self._place(number, Tensors(self._config, arrays), arrays)
                for each in names:
                    if self._done.issuperset(self._users[each]):
                        self._come.pop(each)

    def _end(self) -> None:
        """Raise CheckpointError where only a part of a weight has come."""
        for name in self._come:
            names = self._needs[self._users[name][0]][2].tensors
            missing = [each for each in names if each not in self._come]
            words = f"is one weight with {', '.join(missing[:3])}, which has not come"
            raise CheckpointError(f"the update: tensor {name}: {words}")

    def _place(self, number: int, source: TensorSource, arrays: Mapping[str, Array]) -> None:
        """Change one weight: out of arrays on devices without the host, where they are there."""
        stage, plain, own = self._needs[number]
        self.has_begun = True
        rows: Any = partial(read_rows, source)
        if self._rows is not None:
            rows = self._rows
            for part in own.parts:
                rows.renew(part, source)
        values = rows_values(stage.layout, stage.mesh, rows)
        on_devices = {n: a for n, a in arrays.items() if isinstance(a, jax.Array)}
        if arrays and self._rows is None and len(on_devices) == len(arrays):
            where = {"layout": stage.layout, "mesh": stage.mesh}
            values = partial(place_arrays, **where, own=own, tensors=on_devices)
        for weight, array in stage.place(plain, values, rows):
            self.num_bytes += sum(shard.data.nbytes for shard in array.addressable_shards)
            stage.put(weight, array)
        self._done.add(number)


def _copy_of(array: jax.Array) -> Copy:
    assert isinstance(array.sharding, NamedSharding)
    shards: dict[str, np.ndarray] = {}
    for shard in array.addressable_shards:
        if repr(shard.index) not in shards:
            held = aligned_zeros(shard.data.shape, np.dtype(array.dtype))
            held[...] = np.asarray(shard.data)
            shards[repr(shard.index)] = held
    return Copy(array.shape, array.sharding, shards)


def _restored(copy: Copy) -> jax.Array:
    places = copy.sharding.addressable_devices_indices_map(copy.shape)
    arrays = [jax.device_put(copy.shards[repr(index)], device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(copy.shape, copy.sharding, arrays)
