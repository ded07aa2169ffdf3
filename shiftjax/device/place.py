"""Checkpoint tensors become sharded device arrays, one tensor at a time.

Peak host memory is the part of one tensor that this process stores, once as read and once as
converted, besides the arrays themselves where the device is the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jax.sharding import Mesh
from jax.typing import DTypeLike

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.weights import Weight, family_of, weights_of
from shiftjax.device.mesh import named, stored_spec
from shiftjax.device.views import ALIGNMENT_BYTES
from shiftjax.models.families import FORWARD
from shiftjax.parallel.layout import Layout
from shiftjax.weights.source import TensorSource, check_finite

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ModelDef:
    """A model split into its static part and the flat list of its weights."""

    graphdef: nnx.GraphDef
    treedef: Any  # jax.tree_util.PyTreeDef, for which jaxlib ships no stub
    declared: tuple[Weight, ...]  # in their stored shapes
    dtype: np.dtype

    def merge(self, leaves: tuple[jax.Array, ...]) -> Any:
        """Return the family's module over these weights; call it inside the step."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def define(config: ModelConfig, layout: Layout, dtype: DTypeLike) -> ModelDef:
    """Define the model without allocating anything."""
    stored = {weight.name: layout.stored(weight) for weight in weights_of(config)}
    params = {
        tuple(name.split(".")): nnx.Param(jax.ShapeDtypeStruct(weight.shape, dtype))
        for name, weight in stored.items()
    }
    model = FORWARD[family_of(config).name](config, unflatten_mapping(params))
    graphdef, state = nnx.split(model)
    names = (".".join(map(str, path)) for path, _ in nnx.to_flat_state(state))
    declared = tuple(stored[name] for name in names)
    return ModelDef(graphdef, jax.tree.structure(state), declared, np.dtype(dtype))


def load(
    model: ModelDef, layout: Layout, mesh: Mesh, source: TensorSource, progress: Progress
) -> tuple[jax.Array | None, ...]:
    """Read and place every weight as BASE stores it; None for a tied LM head.

    `mesh` may hold several groups (a leading axis `dp`), which then all get what is read once.

    Raises:
        CheckpointError: a tensor holds values that are not finite.
    """
    arrays: list[jax.Array | None] = []
    for done, weight in enumerate(model.declared):
        progress("weights", done, len(model.declared))
        is_tied = weight.tied_to is not None
        arrays.append(None if is_tied else _load_one(weight, model.dtype, layout, mesh, source))
    progress("weights", len(model.declared), len(model.declared))
    return tuple(arrays)


def _load_one(
    weight: Weight, dtype: np.dtype, layout: Layout, mesh: Mesh, source: TensorSource
) -> jax.Array:
    """Read what this process stores of one weight and put each device's shard on it."""
    sharding = named(mesh, stored_spec(weight, layout))
    places = sharding.addressable_devices_indices_map(weight.shape)
    ranges = {
        device: index[0].indices(weight.shape[0])[:2] if index else (0, weight.shape[0])
        for device, index in places.items()
    }
    shards = _read_shards(weight, dtype, layout, source, sorted(set(ranges.values())))
    # Where the device is the host, devices that hold the same shard share its memory.
    arrays = [jax.device_put(shards[rows], device) for device, rows in ranges.items()]
    return jax.make_array_from_single_device_arrays(weight.shape, sharding, arrays)


def _read_shards(
    weight: Weight,
    dtype: np.dtype,
    layout: Layout,
    source: TensorSource,
    ranges: list[tuple[int, int]],
) -> dict[tuple[int, int], np.ndarray]:
    """Return the rows `[start, stop)` of a stored weight for each range, padding as zeros."""
    axis = weight.axes[0]
    mode = layout.stored_in(weight)
    rows = np.arange(weight.shape[0]) if axis is None else layout.source_rows(axis, mode)
    tail = weight.shape[1:]
    shards = {each: aligned_zeros((each[1] - each[0], *tail), dtype) for each in ranges}
    for nth, part in enumerate(weight.parts):
        place = (slice(None), nth) if weight.stacked else ()
        _fill_shards({each: shard[place] for each, shard in shards.items()}, part, rows, source)
    return shards


def _fill_shards(
    shards: dict[tuple[int, int], np.ndarray],
    weight: Weight,
    rows: np.ndarray,
    source: TensorSource,
) -> None:
    """Read one tensor and copy it into the shards of each range; `rows`: the checkpoint's rows."""
    first, last = _bounds(np.concatenate([rows[start:stop] for start, stop in shards]))
    tail = weight.shape[1:]
    # One stored row is a whole head.
    per_row = tail[0] if weight.axes[0] in ("heads", "kv_heads") else 1
    span = slice(first * per_row, last * per_row)
    info = source.tensors[weight.source]
    index = (span,) + (slice(None),) * (len(info.shape) - 1)
    block = source.read(weight.source, index[::-1] if weight.transposed else index)
    check_finite(weight.source, block, info.file)
    block = (block.T if weight.transposed else block).reshape(last - first, *tail)
    for (start, stop), shard in shards.items():
        real = rows[start:stop] >= 0
        if real.all() and (np.diff(rows[start:stop]) == 1).all():
            shard[:] = block[rows[start] - first : rows[stop - 1] + 1 - first]
        else:
            shard[real] = block[rows[start:stop][real] - first]


def _bounds(rows: np.ndarray) -> tuple[int, int]:
    """Return the range of checkpoint rows that covers all real ones (-1 is padding)."""
    real = rows[rows >= 0]
    return (int(real.min()), int(real.max()) + 1) if real.size else (0, 0)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros at an address that XLA's CPU client takes without a copy."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
