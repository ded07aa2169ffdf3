"""The slots of adapters on the devices of all groups: what `pool.Slots` says.

All factors of a kind lie with the slots side by side (`arch/lora.py`), and are stored, split and
viewed as weights are: what is written to a slot, the steps of every mode, width and stage have.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shiftjax.adapters.adapter import Adapter, Factor
from shiftjax.arch.lora import A, Adapted, matrices_of, read_together
from shiftjax.arch.weights import Weight
from shiftjax.device.groups import Placed
from shiftjax.device.mesh import replicated_spec
from shiftjax.device.place import rows_values
from shiftjax.device.stages import Stage

Writes = Callable[..., list[jax.Array]]
NOBODY = Adapter("", "", "", 0, {})


class DeviceSlots:
    """Writes adapters to the slots of groups; made when their weights are there.

    On GPUs a slot is written in place, where graphs of steps read it, when the steps in flight are
    over: views of what is donated have gone then. On CPUs, where a view does not know of writes,
    arrays are made anew, and steps in flight have the old ones.
    """

    def __init__(self, groups: Sequence[Placed]):
        numbers = sorted({placed.stage for placed in groups})
        stages = [Stage([p for p in groups if p.stage == number]) for number in numbers]
        self._stages = [_Factors(stage) for stage in stages]
        for slot in range(self._stages[0].num_slots):  # compiles what writes, and fills with zeros
            self.write(slot, self.place(NOBODY))

    def place(self, adapter: Adapter) -> list[list[jax.Array]]:
        """Return an adapter's factors on all devices, of each stage, beside the slots."""
        return [stage.place(adapter) for stage in self._stages]

    def write(self, slot: int, placed: list[list[jax.Array]]) -> None:
        """Have what `place` returned in a slot, for all steps that come later."""
        for stage, values in zip(self._stages, placed, strict=True):
            stage.write(slot, values)


class _Factors:
    """The factors of all slots in one stage."""

    def __init__(self, stage: Stage):
        self._stage = stage
        arrays = enumerate(stage.weights.arrays)
        self._members = {nth: m for nth, m in arrays if m[0].kind == "factor"}
        self._matrices = {each.weight.name: each for each in matrices_of(stage.layout.model)}
        slots = stage.layout.model.lora
        assert slots is not None
        self.num_slots, self._rank = slots.num, slots.rank
        self._writes: Writes | None = None

    def place(self, adapter: Adapter) -> list[jax.Array]:
        """Return what a slot of each array will hold, member by member."""
        stage = self._stage
        values = rows_values(stage.layout, stage.mesh, partial(_rows, self._source_of(adapter)))
        weights = (weight for members in self._members.values() for weight in members)
        each = [(weight, self._slot_axis(weight)) for weight in weights]
        return [values(_of_slot(*one), stage.model.dtype) for one in each]

    def _slot_axis(self, weight: Weight) -> int:
        """Return which dimension of a factor counts slots."""
        own, is_a = self._matrices_of(weight), weight.name.endswith(A)
        if own.split == "experts":
            return 1 if is_a else 2
        if is_a and not own.transposed:
            return 1
        return len(weight.shape) - 2 if own.transposed == is_a else 0

    def _matrices_of(self, weight: Weight) -> Weight:
        return self._matrices[weight.name[: -len(A)]].weight

    def write(self, slot: int, values: Sequence[jax.Array]) -> None:
        """Change a slot of all arrays."""
        stage = self._stage
        arrays = [stage.on_units(nth) for nth in self._members]
        if self._writes is None:
            members = self._members.values()
            kinds = [(len(own), self._slot_axis(own[0])) for own in members]
            self._writes = _writer(arrays, values, kinds)
        if writes_in_place(stage.groups[0].step.platform):
            for placed in stage.groups:
                placed.memory.wait()
                placed.memory.let_go(*self._members)
        changed = self._writes(arrays, list(values), np.int32(slot))
        stage.put_arrays(dict(zip(self._members, changed, strict=True)))

    def _source_of(self, adapter: Adapter) -> Callable[[Weight], np.ndarray]:
        """Return what gives the factor of an adapter that a weight of a slot is, unpadded."""

        def found(name: str) -> tuple[Adapted, Factor | None]:
            own = self._matrices[name]
            return own, adapter.factors.get(own.weight.source)

        def source(weight: Weight) -> np.ndarray:
            name, is_a = weight.name[: -len(A)], weight.name.endswith(A)
            own, factor = found(name)
            if own.is_of_experts:
                names = map(own.weight.of_expert, range(own.weight.shape[0]))
                each = (adapter.factors.get(one.source) or _nothing(own) for one in names)
                padded = (_padded(f.a.T if is_a else f.b, self._rank) for f in each)
                return np.stack([one.T if is_a else one for one in padded])
            if own.weight.transposed or not is_a:
                factor = factor or _nothing(own)
                padded = _padded(factor.a.T if is_a else factor.b, self._rank)
                if own.weight.transposed:
                    return padded.reshape(*own.weight.shape[:-1], -1) if is_a else padded.T
                return padded.reshape(*own.weight.shape[:-1], -1)
            layer, _, first = name.rpartition(".")
            names = (f"{layer}.{each}" for each in read_together(first))
            readers = [found(each) for each in names if each in self._matrices]
            each = [_padded((f or _nothing(own)).a.T, self._rank).T for own, f in readers]
            return np.stack(each)

        return source


def _nothing(own: Adapted) -> Factor:
    return Factor(np.zeros((0, own.inputs), np.float32), np.zeros((own.outputs, 0), np.float32))


def _padded(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Return `[size, rank]` of `[size, less]`."""
    wide = np.zeros((matrix.shape[0], rank), matrix.dtype)
    wide[:, : matrix.shape[1]] = matrix
    return wide


def _rows(
    source: Callable[[Weight], np.ndarray], weight: Weight, first: int, last: int
) -> np.ndarray:
    return np.ascontiguousarray(source(weight)[first:last])


def _of_slot(weight: Weight, axis: int) -> Weight:
    """Return a factor of one slot, whose slots are dimension `axis`."""
    shape, axes = weight.shape, weight.axes
    return weight._replace(
        shape=shape[:axis] + shape[axis + 1 :], axes=axes[:axis] + axes[axis + 1 :]
    )


def _writer(
    arrays: Sequence[jax.Array], values: Sequence[jax.Array], kinds: Sequence[tuple[int, int]]
) -> Writes:
    """Return what writes a slot of all arrays of a stage.

    `kinds` are the members of each array, and which of their dimensions counts slots.
    """

    def write(arrays: list[jax.Array], values: list[jax.Array], slot: jax.Array) -> list[jax.Array]:
        coming = iter(values)
        return [
            _written(array, [next(coming) for _ in range(num)], axis, slot)
            for array, (num, axis) in zip(arrays, kinds, strict=True)
        ]

    shardings = [_sharding_of(array) for array in arrays]
    specs = [sharding.spec for sharding in shardings]
    mapped = jax.shard_map(
        write,
        mesh=shardings[0].mesh,
        in_specs=(specs, [_sharding_of(each).spec for each in values], replicated_spec()),
        out_specs=specs,
        check_vma=False,
    )
    platform = next(iter(arrays[0].sharding.device_set)).platform
    return jax.jit(mapped, donate_argnums=(0,) if writes_in_place(platform) else ())


def writes_in_place(platform: str) -> bool:
    """Whether slots are written where steps read them; else arrays are made anew."""
    return platform == "gpu"


def _sharding_of(array: jax.Array) -> NamedSharding:
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding


def _written(array: jax.Array, values: list[jax.Array], axis: int, slot: jax.Array) -> jax.Array:
    """Return a device's shards of all members with another slot."""
    own = array.reshape(len(values), -1, *array.shape[1:])
    written = jax.lax.dynamic_update_index_in_dim(own, jnp.stack(values), slot, axis + 1)
    return written.reshape(array.shape)
