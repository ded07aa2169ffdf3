"""Checkpoint tensors become sharded device arrays, one tensor at a time.

Peak host memory is the part of one tensor that this process stores, once as read and once as
converted, besides the arrays themselves where the device is the host. What is to be loaded again
and again is read once (`HostWeights`) and then costs the host no copy.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from shiftjax.arch.config import Codes, ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.weights import Kind, Weight, family_of, plain_axis
from shiftjax.device.joined import Joiner, Members, zeros
from shiftjax.device.mesh import stored_sharding
from shiftjax.device.views import ALIGNMENT_BYTES
from shiftjax.models.families import FORWARD
from shiftjax.models.products import in_blocks, quantise, relative_error
from shiftjax.parallel.four_bits import ZERO, groups_of_blocks
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.square_blocks import squares_of_blocks
from shiftjax.parallel.stored import (
    FLOAT32,
    INPUTS,
    SCALE,
    codes_in,
    dtype_of,
    plain_weights,
    stored_weights,
)
from shiftjax.weights.kv_scales import read_scale
from shiftjax.weights.source import (
    OF_CODES,
    OF_INPUTS,
    OF_SCALE,
    OF_ZEROS,
    CheckpointError,
    TensorSource,
    check_finite,
    part_shape,
)

_NAME_OF_KIND = {
    **{"codes": OF_CODES, "scale": OF_SCALE, "input_scale": OF_INPUTS},
    **{"scales": OF_SCALE, "zeros": OF_ZEROS},
}
# Relative, in the mean over a matrix. No rounding to the 4 bits of e4m3 changes a number by more,
# so above it many are too small beside their channel's largest to have a code: below 2^-18 of it.
MOST_ADDED_ERROR = 1 / 16
logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
Rows = Callable[[Weight, int, int], np.ndarray]  # rows of a weight as a checkpoint has them


@dataclass(frozen=True)
class ModelDef:
    """A model split into its static part and the flat list of its weights."""

    graphdef: nnx.GraphDef
    treedef: Any  # jax.tree_util.PyTreeDef, for which jaxlib ships no stub
    declared: tuple[Weight, ...]  # in their stored shapes
    formats: Formats

    @property
    def dtype(self) -> np.dtype:
        """Of activations, and of all that is not quantised."""
        return FORMATS[self.formats.activations].dtype

    def merge(self, leaves: tuple[jax.Array, ...]) -> Any:
        """Return the family's module over these weights; call it inside the step."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def define(layout: Layout, formats: Formats) -> ModelDef:
    """Define the model of a layout without allocating anything."""
    config = layout.model
    stored = {weight.name: weight for weight in stored_weights(layout, formats)}
    params = {
        tuple(name.split(".")): nnx.Param(
            jax.ShapeDtypeStruct(weight.shape, dtype_of(weight, formats)),
            gathered=weight.axes[0] if layout.is_gathered(weight) else None,
        )
        for name, weight in stored.items()
    }
    model = FORWARD[family_of(config).name](config, unflatten_mapping(params))
    graphdef, state = nnx.split(model)
    names = (".".join(map(str, path)) for path, _ in nnx.to_flat_state(state))
    declared = tuple(stored[name] for name in names)
    return ModelDef(graphdef, jax.tree.structure(state), declared, formats)


def load(
    model: ModelDef, layout: Layout, mesh: Mesh, source: TensorSource, progress: Progress
) -> tuple[jax.Array | None, ...]:
    """Read and place every weight as BASE stores it; None for a tied LM head.

    `mesh` may hold several groups (a leading axis `dp`), which then all get what is read once.

    Raises:
        CheckpointError: a tensor holds values that are not finite, or codes that must be made
            anew would say other numbers than the checkpoint.
    """
    return load_rows(model, layout, mesh, partial(read_rows, source), progress)


def load_rows(
    model: ModelDef,
    layout: Layout,
    mesh: Mesh,
    rows: Rows,
    progress: Progress,
    arrays: Sequence[Members] | None = None,
) -> tuple[jax.Array | None, ...]:
    """The same of weights whose rows come from elsewhere.

    `arrays`: which weights each array holds (`ModeWeights.arrays`); None: one.
    """
    _tell_of_codes(layout.model, model.formats)
    stored = {weight.name: weight for weight in model.declared}
    joiner = Joiner(arrays or [(weight,) for weight in model.declared])
    errors: dict[str, jax.Array] = {}
    plains = plain_weights(layout, model.formats)
    values = rows_values(layout, mesh, rows)
    for done, plain in enumerate(plains):
        progress("weights", done, len(plains))
        if stored[plain.name].tied_to is not None:
            joiner.put(plain.name, None)
            continue
        parts = parts_of(plain, model)
        placed, error = place_weight(plain, parts, model, layout, mesh, values, rows)
        errors |= {} if error is None else {plain.name: error}
        for part, array in zip(parts, placed, strict=True):
            joiner.put(part.name, array)
    _check_errors(layout.model.name, {name: float(error) for name, error in errors.items()})
    for scales in (weight for weight in model.declared if weight.kind == "kv_scale"):
        joiner.put(scales.name, _load_one(scales, np.dtype(np.float32), layout, mesh, rows))
    for factor in (weight for weight in model.declared if weight.kind == "factor"):
        sharding = stored_sharding(factor, layout, mesh)
        joiner.put(factor.name, zeros(factor.shape, model.dtype, sharding)())
    progress("weights", len(plains), len(plains))
    return joiner.arrays()


# One plain weight as a dtype, where it is stored.
Values = Callable[[Weight, np.dtype], jax.Array]


def rows_values(layout: Layout, mesh: Mesh, rows: Rows) -> Values:
    """Return what places plain weights out of rows that the host has."""
    return partial(_load_one, layout=layout, mesh=mesh, rows=rows)


def parts_of(plain: Weight, model: ModelDef) -> tuple[Weight, ...]:
    """Return what is stored of a plain weight: itself, or its codes and what belongs to them."""
    stored = {weight.name: weight for weight in model.declared}
    if stored[plain.name].kind != "codes":
        return (stored[plain.name],)
    names = (f"{plain.name}{suffix}" for suffix in ("", SCALE, INPUTS, ZERO))
    return tuple(stored[name] for name in names if name in stored)


def place_weight(
    plain: Weight,
    parts: tuple[Weight, ...],
    model: ModelDef,
    layout: Layout,
    mesh: Mesh,
    values: Values,
    rows: Rows,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Return what is stored of a plain weight, and the error of codes that are made anew.

    `values` has its numbers; where codes of the checkpoint are kept, `rows` has these.
    """
    if parts[0].kind != "codes":
        return [values(plain, dtype_of(parts[0], model.formats))], None
    codes = codes_in(layout.model, model.formats)
    if codes is not None and not codes.are_made_anew:
        return _load_codes(plain, parts, layout, mesh, rows), None
    shardings = tuple(stored_sharding(each, layout, mesh) for each in parts)
    blocks = parts[0].shape if plain.transposed else None
    quantise_ = _quantiser(blocks, shardings, codes is not None)
    *placed, error = quantise_(values(plain, model.dtype))
    return placed, error


def _tell_of_codes(model: ModelConfig, formats: Formats) -> None:
    """Tell what becomes of a checkpoint's four bits."""
    if model.codes is None or not FORMATS[model.codes.format].is_packed:
        return
    name = model.codes.format
    if formats.weights == name:
        words = f"its {name} stays as it is"
    else:
        words = f"its {name} becomes {formats.weights}, because quantization says so"
    logger.info("%s: %s on the devices", model.name, words)


def _load_codes(
    plain: Weight, parts: tuple[Weight, ...], layout: Layout, mesh: Mesh, rows: Rows
) -> list[jax.Array]:
    """Place codes and scales of the checkpoint; devices cut row-parallel ones in blocks."""
    codes, *scales = parts
    own = layout.model.codes
    assert own is not None
    dtype, is_packed = dtype_read("codes", own), FORMATS[own.format].is_packed
    if not plain.transposed:
        return [_load_one(each, dtype_read(each.kind, own), layout, mesh, rows) for each in parts]
    as_read = plain._replace(kind="codes")
    if is_packed:  # two inputs are a row
        *inputs, each, outputs = plain.shape
        as_read = as_read._replace(shape=(*inputs, each // 2, outputs))
    array = _load_one(as_read, dtype, layout, mesh, rows)
    cut = _cutter(codes.shape, stored_sharding(codes, layout, mesh))
    wanted = groups_of_blocks(plain, layout, own) if is_packed else None
    if own.rows_of_scale:
        wanted = squares_of_blocks(plain, codes, layout)
    placed = [cut(array)]
    for each in scales:
        as_read = each
        if wanted is not None:  # rows of the checkpoint's groups, of which a block has some
            shape, axes = (int(wanted.max()) + 1, each.shape[-1]), ("groups", None)
            as_read = each._replace(shape=shape, axes=axes, transposed=True)
        dtype = dtype_read(each.kind, own)
        placed.append(_load_one(each, dtype, layout, mesh, rows, (as_read, wanted)))
    return placed


def _check_errors(model: str, errors: dict[str, float]) -> None:
    """Tell what codes differ by from what a checkpoint of other codes says.

    Raises:
        CheckpointError: a matrix has lost more than one rounding each of its numbers.
    """
    if not errors:
        return
    worst = max(errors, key=lambda name: errors[name])
    logger.info(
        "%s: codes are made anew, with a scale for each output channel, which adds "
        "errors of %.2f%% to its numbers, %.2f%% in %s",
        model,
        100 * sum(errors.values()) / len(errors),
        100 * errors[worst],
        worst,
    )
    if errors[worst] > MOST_ADDED_ERROR:
        raise CheckpointError(
            f"{model}: {worst} cannot be had with a scale for each output channel: its numbers "
            f"would change by {errors[worst]:.1%} in the mean, where {MOST_ADDED_ERROR:.1%} is the "
            "limit; say --quantization none"
        )


@lru_cache(maxsize=64)
def _quantiser(
    blocks: tuple[int, ...] | None, shardings: tuple[NamedSharding, ...], is_judged: bool
) -> Any:
    """Return what makes codes and scale of a stored matrix, on the devices that have it.

    And, if `is_judged`, the relative error of what they say. `blocks` is the shape of the codes of
    a row-parallel matrix; None: a column-parallel one. One program for each shape.
    """

    def convert(values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        matrix = values.reshape(-1, values.shape[-1]).T if blocks else values
        codes, scale = quantise(matrix)
        error = relative_error(matrix, codes, scale) if is_judged else None
        return _cut(codes, blocks) if blocks else codes, scale, error

    return jax.jit(convert, out_shardings=(*shardings, None))


@lru_cache(maxsize=64)
def _cutter(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return what cuts codes `[*inputs, out]` in blocks, on the devices that have them."""

    def cut(codes: jax.Array) -> jax.Array:
        return _cut(codes.reshape(-1, codes.shape[-1]).T, shape)

    return jax.jit(cut, out_shardings=sharding)


def _cut(codes: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Cut codes `[out, in]` in blocks of inputs, `[*blocks, out, block]`."""
    return in_blocks(codes, math.prod(shape[:-2])).reshape(shape)


class HostWeights:
    """The weights of a model in host memory, as devices store them: one copy for every layout.

    A tensor is read, checked, converted and turned when it is first asked for; codes of a
    checkpoint stay codes. From then on a shard is a range of its rows, and is put on a device from
    where it lies (Seesaw reshards its weights out of such a copy, arXiv 2503.06433, section 4.1).
    """

    def __init__(self, source: TensorSource, dtype: DTypeLike):
        self._source, self._dtype = source, np.dtype(dtype)
        self._held: dict[str, np.ndarray] = {}

    @property
    def num_bytes(self) -> int:
        """What is held so far."""
        return sum(array.nbytes for array in self._held.values())

    def __call__(self, weight: Weight, first: int, last: int) -> np.ndarray:
        """Rows [first, last) of a weight that has one part. Raises CheckpointError like `load`."""
        if weight.kind == "kv_scale":
            return read_rows(self._source, weight, first, last)
        name = tensor_of(weight)
        if name not in self._held:
            self._held[name] = self._read(weight, self._source)
        return self._held[name][first:last]

    def renew(self, weight: Weight, source: TensorSource) -> None:
        """Hold a weight of one part as another source has it; devices keep what they have."""
        name = tensor_of(weight)
        self._held[name] = self._read(weight, source)

    def _read(self, weight: Weight, source: TensorSource) -> np.ndarray:
        rows = read_rows(source, weight, 0, _num_rows(source, weight))
        codes = source.config.codes
        held = aligned_zeros(rows.shape, dtype_read(weight.kind, codes, self._dtype))
        held[:] = rows
        return held


def dtype_read(kind: Kind, codes: Codes | None, plain: DTypeLike = np.float32) -> np.dtype:
    """Return what a weight of a kind is made of as it is read; `plain`: if it is no codes' part."""
    own = FORMATS[codes.format if codes else "fp8"]
    special = {"codes": own.dtype, "scales": own.scale, "zeros": np.dtype(np.uint8)}
    if kind in special:
        return special[kind]
    return np.dtype(np.float32 if kind in FLOAT32 else plain)


def place_arrays(
    weight: Weight,
    dtype: np.dtype,
    layout: Layout,
    mesh: Mesh,
    own: Weight,
    tensors: Mapping[str, jax.Array],
) -> jax.Array:
    """Put one weight where it is stored, out of a checkpoint's tensors that are on devices.

    `own` is the weight as `weights_of` has it, unpadded. The tensors may have any sharding. They
    are turned and padded where they are, and go to where they are stored in one transfer.
    """
    wanted = _wanted_rows(weight, layout).astype(np.int64)
    given = [tensors[name] for name in own.tensors]
    turned = _turner(own, wanted.tobytes(), dtype)(*given)
    sharding = stored_sharding(weight, layout, mesh)
    return jax.device_put(turned, sharding, may_alias=False)  # the tensors' owner may donate them


@lru_cache(maxsize=256)
def _turner(weight: Weight, wanted: bytes, dtype: np.dtype) -> Any:
    """Return what makes a stored weight of its tensors, in the order of `Weight.tensors`."""
    rows = np.frombuffer(wanted, np.int64)

    def matrix(one: Weight, given: dict[str, jax.Array]) -> jax.Array:
        if one.axes[0] == "experts":
            each = [matrix(one.of_expert(n), given) for n in range(one.shape[0])]
            return jnp.stack(each)
        found = given[one.source]
        return (found.T if one.transposed else found).reshape(-1, *one.shape[1:])

    def turn(*given: jax.Array) -> jax.Array:
        tensors = dict(zip(weight.tensors, given, strict=True))
        parts = [matrix(part, tensors) for part in weight.parts]
        whole = jnp.stack(parts, axis=1) if weight.stacked else parts[0]
        if not np.array_equal(rows, np.arange(len(whole))):
            is_real = jnp.asarray(rows >= 0).reshape(-1, *[1] * (whole.ndim - 1))
            whole = jnp.where(is_real, whole[np.maximum(rows, 0)], 0)
        return whole.astype(dtype)

    return jax.jit(turn)


def _load_one(
    weight: Weight,
    dtype: np.dtype,
    layout: Layout,
    mesh: Mesh,
    rows: Rows,
    source: tuple[Weight, np.ndarray | None] | None = None,
) -> jax.Array:
    """Read what this process stores of one weight and put each device's shard on it.

    `source`: as which weight it is read, and which of its rows each stored row has, `[rows, n]`, if
    these are other than the layout says.
    """
    as_read, wanted = source or (weight, None)
    sharding = stored_sharding(weight, layout, mesh)
    places = sharding.addressable_devices_indices_map(weight.shape)
    ranges = {
        device: index[0].indices(weight.shape[0])[:2] if index else (0, weight.shape[0])
        for device, index in places.items()
    }
    wanted = _wanted_rows(as_read, layout)[:, None] if wanted is None else wanted
    spans = {span: wanted[slice(*span)].reshape(-1) for span in sorted(set(ranges.values()))}
    shards = _make_shards(as_read, dtype, rows, spans)
    shards = {span: shard.reshape(-1, *weight.shape[1:]) for span, shard in shards.items()}
    # Where the device is the host, devices that hold the same shard share its memory.
    arrays = [jax.device_put(shards[span], device) for device, span in ranges.items()]
    return jax.make_array_from_single_device_arrays(weight.shape, sharding, arrays)


def _wanted_rows(weight: Weight, layout: Layout) -> np.ndarray:
    """Return which row of the checkpoint each stored row of a weight is; -1: padding."""
    axis = weight.axes[0]
    if axis is None:
        return np.arange(weight.shape[0])
    wanted = layout.source_rows(axis, layout.stored_in(weight))
    if weight.kind == "codes" and len(wanted) == 2 * weight.shape[0]:  # two inputs in a byte
        return wanted[::2] // 2
    return wanted


def _make_shards(
    weight: Weight, dtype: np.dtype, rows: Rows, wanted: dict[tuple[int, int], np.ndarray]
) -> dict[tuple[int, int], np.ndarray]:
    """Return the `wanted` rows of a weight for each range of devices, padding as zeros."""
    first, last = _bounds(np.concatenate(list(wanted.values())))
    spans = [(each, np.where(mine < 0, -1, mine - first)) for each, mine in wanted.items()]
    if not weight.stacked:
        block = rows(weight, first, last)
        return {each: _shard_of(block, mine, dtype) for each, mine in spans}
    tail = weight.shape[1:]
    shards = {each: aligned_zeros((len(mine), *tail), dtype) for each, mine in spans}
    if weight.kind == "kv_scale":  # also of heads that are padding: 0 / 0 would be NaN
        for shard in shards.values():
            shard[:] = 1
    for nth, part in enumerate(weight.parts):
        block = rows(part, first, last)
        for each, mine in spans:
            _copy_rows(block, mine, shards[each][:, nth])
    return shards


def _shard_of(block: np.ndarray, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows of a block, -1 for one of zeros: a part of it where that is what devices want."""
    if block.dtype == dtype and _is_range(rows):
        shard = block[rows[0] : rows[-1] + 1]
        if shard.ctypes.data % ALIGNMENT_BYTES == 0 and shard.flags.c_contiguous:
            return shard
    shard = aligned_zeros((len(rows), *block.shape[1:]), dtype)
    _copy_rows(block, rows, shard)
    return shard


def _copy_rows(block: np.ndarray, rows: np.ndarray, shard: np.ndarray) -> None:
    """Copy rows of a block; -1 is padding, which stays as it is."""
    if _is_range(rows):
        shard[:] = block[rows[0] : rows[-1] + 1]
    else:
        shard[rows >= 0] = block[rows[rows >= 0]]


def _is_range(rows: np.ndarray) -> bool:
    return rows.size > 0 and bool(rows[0] >= 0 and (np.diff(rows) == 1).all())


def read_rows(source: TensorSource, weight: Weight, first: int, last: int) -> np.ndarray:
    """Read rows [first, last) of a weight that has one part, in the shape that it is stored in.

    Rows of attention's projections are whole heads. Raises CheckpointError for values that are
    not finite.
    """
    if weight.axes[0] == "experts":
        return _read_experts(source, weight, first, last)
    if weight.kind == "kv_scale":
        _, heads = plain_axis(weight.axes[0] or "")
        num_kv_heads, _ = source.config.head_shapes[heads]
        return read_scale(source, weight.source, num_kv_heads)[first:last]
    tail, per_row = weight.shape[1:], _rows_of_tensor(weight)
    info, name = source.tensors[weight.source], tensor_of(weight)
    rows = slice(first * per_row, last * per_row)
    block = source.read(name, (slice(None), rows) if weight.transposed else (rows,))
    check_finite(name, block, info.file)
    return (block.T if weight.transposed else block).reshape(last - first, *tail)


def _read_experts(source: TensorSource, weight: Weight, first: int, last: int) -> np.ndarray:
    """Read experts [first, last), each of which is a tensor: none of the others is touched."""
    plain = source.tensors[weight.of_expert(0).source].dtype
    dtype = dtype_read(weight.kind, source.config.codes, plain)
    block = aligned_zeros((last - first, *weight.shape[1:]), dtype)
    for expert in range(first, last):
        one = weight.of_expert(expert)
        if weight.kind in ("scales", "zeros"):  # stored with the groups first
            one = one._replace(transposed=True)
        block[expert - first] = read_rows(source, one, 0, one.shape[0])
    return block


def tensor_of(weight: Weight) -> str:
    """The name by which a source reads a weight of one part: a matrix, its codes or its scale."""
    return weight.source + _NAME_OF_KIND.get(weight.kind, "")


def _rows_of_tensor(weight: Weight) -> int:
    """How many rows of a checkpoint's tensor are one of the weight: a whole head's, or one."""
    has_heads = weight.split in ("heads", "kv_heads") and weight.kind != "head_norm"
    return weight.shape[1] if has_heads else 1


def _num_rows(source: TensorSource, weight: Weight) -> int:
    """The rows that a checkpoint has of a weight of one part; experts are tensors of their own."""
    if weight.axes[0] == "experts":
        assert source.config.experts is not None
        return source.config.experts.num
    if weight.kind == "input_scale":
        return 1
    shape = source.tensors[weight.source].shape
    shape = part_shape(shape, _NAME_OF_KIND.get(weight.kind, ""), source.config.codes)
    return shape[-1 if weight.transposed else 0] // _rows_of_tensor(weight)


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
