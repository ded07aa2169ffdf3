"""The weights of a mode out of the stored ones, by one of four strategies.

    alias       views of the stored shards: no memory (biases and scales, a few kilobytes that need
                not be aligned, are copied)
    slice       the stored shards themselves, sliced inside the step; a control
    replicate   a separate copy, w / ways more per device: the published way (arXiv 2509.16495,
                section 3.3.2) and a control
    gather      the layout's: what SHIFT uses is all that is stored, and enters the steps of every
                mode; those that split tokens gather the rest (`models/gathered.py`)

LM head and late layers are split over all devices in every mode: they are no mode's alone, and are
stored so, unless groups of other widths share them. A tied head is the embedding in that split.

An array holds one weight, or those of one kind of all layers (`device/joined.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shiftjax.arch.weights import Weight
from shiftjax.device.joined import Members, joined_shape, joined_weights, layer_slices, ways_stored
from shiftjax.device.mesh import mesh_of, named, weight_spec
from shiftjax.device.place import ModelDef
from shiftjax.device.views import array_in_mode
from shiftjax.parallel.grid import ALL_AXES, PLAIN_USE, STORED_AXES, WEIGHT_AXES, Mode, Use
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import COPIED, dtype_of

Weights = tuple[jax.Array, ...]
# Of an array, by its place, as one mode has it in steps of another, or of its own.
Views = dict[tuple[int, Mode, Mode], jax.Array]


class ModeWeights(NamedTuple):
    """How the steps of one model on one layout come by the weights of their mode."""

    model: ModelDef
    layout: Layout
    strategy: str  # alias, slice, replicate; gather: `layout.gathers`, which counts
    # layers' weights of one kind are one array; not where they are copied, or gathered: XLA would
    # copy a slice before its all-gather
    is_joined: bool = False
    loops_over_experts: bool = False  # a slice of a joined array before a loop would be a copy

    @property
    def arrays(self) -> tuple[Members, ...]:
        """The weights of each array, one after the other."""
        if self.is_joined and self.strategy != "replicate" and not self.layout.gathers:
            apart = ("experts",) if self.loops_over_experts else ()
            return joined_weights(self.model.declared, self.layout, self.model.formats, apart)
        return tuple((weight,) for weight in self.model.declared)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes to choose from: copies are kept for SHIFT alone, as published."""
        modes = self.layout.modes
        return (
            modes if self.strategy != "replicate" else tuple(dict.fromkeys((modes[0], modes[-1])))
        )

    def with_head(self, stored: Sequence[jax.Array | None]) -> Weights:
        """Return the stored arrays with a tied LM head in the place of None."""
        firsts = [members[0] for members in self.arrays]
        arrays: dict[str, Any] = {
            weight.name: array for weight, array in zip(firsts, stored, strict=True)
        }
        return tuple(
            arrays[weight.name] if weight.tied_to is None else self._head(arrays[weight.tied_to])
            for weight in firsts
        )

    def of(
        self,
        mode: Mode,
        stored: Weights,
        use: Use = PLAIN_USE,
        held: Views | None = None,
    ) -> Weights:
        """Return the arrays that a step of this mode is called with.

        `held` has the views that were made before, and takes those that are made.

        Raises:
            ConfigError: a shard cannot be viewed in place.
        """
        held, arrays = {} if held is None else held, []
        for nth, (members, array) in enumerate(zip(self.arrays, stored, strict=True)):
            used, split = self._used(members[0], mode, use)
            if not self._is_viewed(members[0], used, split):
                arrays.append(array)
                continue
            if (nth, used, split) not in held:
                held[nth, used, split] = self._view(members, used, split, array)
            arrays.append(held[nth, used, split])
        return tuple(arrays)

    def specs(self) -> tuple[Any, ...]:
        """Return the spec with which each array enters a step, of any mode."""
        if self.strategy == "slice":
            return tuple(weight_spec(self._as_sliced(one), STORED_AXES) for one, *_ in self.arrays)
        return tuple(
            weight_spec(weight._replace(in_shift=self._is_in_shift(weight)), WEIGHT_AXES)
            for weight, *_ in self.arrays
        )

    def abstract(
        self, mode: Mode, mesh: Mesh, use: Use = PLAIN_USE
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return `of` as shapes: what compiling needs where there are no weights."""
        mesh, params = mesh_of(mesh, mode, use.experts), []
        for members, spec in zip(self.arrays, self.specs(), strict=True):
            weight, shape = members[0], joined_shape(members)
            used, split = self._used(weight, mode, use)
            if self._is_viewed(weight, used, split):
                ways = self.layout.ways(split)
                shape = (self._viewed_rows(members, used) * ways, *shape[1:])
            sharding = named(mesh, spec)
            dtype = dtype_of(weight, self.model.formats)
            params.append(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
        return tuple(params)

    def local(self, mode: Mode, params: Sequence[jax.Array], use: Use = PLAIN_USE) -> Weights:
        """Return, inside a step, this device's shard of every declared weight in this mode.

        Those that are stored, if they are to be sliced, are sliced here.
        """
        shards: dict[str, jax.Array] = {}
        for members, array in zip(self.arrays, params, strict=True):
            used, split = self._used(members[0], mode, use)
            is_viewed = self._is_viewed(members[0], used, split)
            rows = self._rows(members[0], used) if is_viewed else None
            each = layer_slices(array, len(members), rows)
            shards |= zip((weight.name for weight in members), each, strict=True)
        weights = ((weight, shards[weight.name]) for weight in self.model.declared)
        if self.strategy != "slice":
            return tuple(array for _, array in weights)
        return tuple(
            self._slice(weight, self.layout.used_in(weight, mode, use), array)
            for weight, array in weights
        )

    def whole_arrays(
        self, params: Sequence[jax.Array], names: Sequence[str]
    ) -> dict[str, jax.Array]:
        """Return, inside a step, arrays that have a weight of several layers, by its name there.

        The n-th member is that of layer n, from 0 on; a weight of an array of its own has none.
        """
        found = {}
        for members, array in zip(self.arrays, params, strict=True):
            name = members[0].name.removeprefix("layers.0.")
            if name in names and len(members) > 1:
                own = [f"layers.{index}.{name}" for index in range(len(members))]
                assert [weight.name for weight in members] == own
                found[name] = array
        return found

    def _head(self, embedding: Any) -> Any:
        layout = self.layout  # if it gathers, the embedding is stored as the head
        if self.strategy == "slice" or layout.sp == 1 or layout.widest or layout.gathers:
            return embedding
        copy = self.strategy == "replicate"
        return array_in_mode(embedding, "vocab", layout, layout.shift, "lm_head", copy=copy)

    def _used(self, weight: Weight, mode: Mode, use: Use) -> tuple[Mode, Mode]:
        """Return the mode whose shards devices use, and the one as which an array has them.

        They are one but for q and o as neighbours use them who split positions: there every device
        of SHIFT has a shard of its own, and neighbours have the same.
        """
        own = use._replace(queries=None)
        return self.layout.used_in(weight, mode, use), self.layout.used_in(weight, mode, own)

    def _view(self, members: Members, used: Mode, split: Mode, stored: jax.Array) -> jax.Array:
        weight = members[0]
        own = {"rows": self._viewed_rows(members, used), "copy": self.copies(weight)}
        axis = weight.axes[0]
        assert axis is not None
        return array_in_mode(stored, axis, self.layout, used, weight.name, split=split, **own)

    def copies(self, weight: Weight) -> bool:
        """Whether modes have copies of a weight, in the place of views."""
        return self.strategy == "replicate" or weight.kind in COPIED

    def _rows(self, weight: Weight, used: Mode) -> int:
        """How many rows of a weight that has views a device uses."""
        axis = weight.axes[0]
        assert axis is not None
        return self.layout.shard_rows(axis, used)

    def _viewed_rows(self, members: Members, used: Mode) -> int:
        """Rows of a device's view of an array: up to the last that is used of the last."""
        first = members[0]
        stored = first.shape[0] // ways_stored(first, self.layout)
        return (len(members) - 1) * stored + self._rows(first, used)

    def _is_viewed(self, weight: Weight, used: Mode, split: Mode) -> bool:
        """Whether steps that use it so (`_used`) have another array of it."""
        if weight.axes[0] is None or self.strategy == "slice" or self.layout.gathers:
            return False
        return not used == split == self.layout.stored_in(weight)

    def _is_in_shift(self, weight: Weight) -> bool:
        """Whether it enters a step split over all devices; a tied head is sliced in the step."""
        if self.layout.gathers:
            return True
        return weight.in_shift and not (self.strategy == "slice" and weight.tied_to is not None)

    def _as_sliced(self, weight: Weight) -> Weight:
        """With the axes that split it as it is stored: experts like all else, or over all."""
        if weight.split != "experts":
            return weight._replace(in_shift=self._is_in_shift(weight))
        axes = ("rows", *weight.axes[1:])
        return weight._replace(axes=axes, in_shift=self.layout.stored_in(weight).sp == 1)

    def _slice(self, weight: Weight, used: Mode, stored: jax.Array) -> jax.Array:
        axis = weight.axes[0]
        stored_in = self.layout.base if weight.tied_to else self.layout.stored_in(weight)
        if axis is None or used == stored_in or self._is_in_shift(weight):
            return stored
        places = range(self.layout.num_devices)
        starts = [self.layout.shard_offset(axis, used, place) for place in places]
        start = jnp.asarray(np.array(starts, np.int32))[jax.lax.axis_index(ALL_AXES)]
        rows = self.layout.shard_rows(axis, used)
        return jax.lax.dynamic_slice_in_dim(stored, start, rows)
