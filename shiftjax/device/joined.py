"""The weights of one kind of all layers as one array, so that a step is called with few.

Each argument of a step costs the host some microseconds at every call, whatever it holds: 80 layers
of 9 weights on 8 devices are milliseconds beside steps of five (docs/gpu.md). On each device the
array holds the shards of one layer after the other. A step takes those of a layer by a static
slice of rows, which XLA reads in place. In another mode the array is viewed from the first row
that the device uses of the first layer on.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from shiftjax.arch.formats import Formats
from shiftjax.arch.weights import Weight
from shiftjax.device.mesh import replicated_spec
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import dtype_of

# Platforms whose programs read a slice of a weight in place. A CPU's copy it, and there devices
# share weights.
JOINED_ON = ("gpu",)
# On a device. More would take XLA's kernels from 32 to 64 bits for each index into the array.
MOST_ELEMENTS = (1 << 31) - 1
# What a kernel reads beside the pools that it writes: a slice would be a launch (`mosaic.apart`),
# as it is where several kernels read it.
BESIDE_POOLS = tuple(
    f".attention.{name}" for name in ("sinks", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias")
)
ARGUMENT_ALIGNMENT = 256  # bytes: Mosaic refuses an argument of a kernel that begins elsewhere
_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")

Members = tuple[Weight, ...]  # the weights of one array, one after the other


@lru_cache(maxsize=64)
def joined_weights(
    declared: tuple[Weight, ...], layout: Layout, formats: Formats, apart: tuple[str, ...] = ()
) -> tuple[Members, ...]:
    """Return the weights of each array: of one kind and shape in all layers, as many as fit.

    Scales of KV and `BESIDE_POOLS` are an array each, and what devices split along an axis of
    `apart`. So are those of which a second one would not begin where kernels can read.
    """
    kinds: dict[Weight, list[list[Weight]]] = {}
    for weight in declared:
        each = weight.num_elements // ways_stored(weight, layout)
        is_apart = weight.kind == "kv_scale" or weight.name.endswith(BESIDE_POOLS)
        is_apart |= weight.split in apart
        is_apart |= each * dtype_of(weight, formats).itemsize % ARGUMENT_ALIGNMENT > 0
        name = weight.name if is_apart else _LAYER.sub("*", weight.name)
        kind = weight._replace(name=name, source="", stacked=())
        arrays = kinds.setdefault(kind, [[]])
        if len(arrays[-1]) == max(1, MOST_ELEMENTS // each):
            arrays.append([])
        arrays[-1].append(weight)
    return tuple(tuple(members) for arrays in kinds.values() for members in arrays)


def ways_stored(weight: Weight, layout: Layout) -> int:
    """Return how many devices of a group split a weight as it is stored."""
    return layout.ways(layout.stored_in(weight)) if weight.axes[0] else 1


def joined_shape(members: Members) -> tuple[int, ...]:
    """Return the shape of an array, over the devices that split it."""
    rows, *tail = members[0].shape
    return len(members) * rows, *tail


def layer_slices(array: jax.Array, count: int, rows: int | None) -> list[jax.Array]:
    """Return, inside a step, the `rows` of each of `count` members of a device's array.

    None: all rows of each. Else the array begins with the first of them and ends with the last, and
    has as many between two members as lie between them where they are stored.
    """
    if count == 1:
        return [array]
    rows = array.shape[0] // count if rows is None else rows
    step = (array.shape[0] - rows) // (count - 1)
    return [lax.slice_in_dim(array, nth * step, nth * step + rows) for nth in range(count)]


class Joiner:
    """Puts weights where they belong as they come; beside the arrays there is one of them."""

    def __init__(self, arrays: Sequence[Members]):
        self._arrays = arrays
        self._place = {
            weight.name: (members, nth) for members in arrays for nth, weight in enumerate(members)
        }
        self._found: dict[Members, jax.Array | None] = {}

    def put(self, name: str, array: jax.Array | None) -> None:
        """Take one weight, as `device.place` has put it on devices; None for a tied LM head."""
        members, nth = self._place[name]
        if len(members) == 1 or array is None:
            self._found[members] = array
            return
        assert isinstance(array.sharding, NamedSharding)
        whole = self._found.get(members)
        if whole is None:
            whole = zeros(joined_shape(members), array.dtype, array.sharding)()
        self._found[members] = put_member(whole, array, members, nth)

    def arrays(self) -> tuple[jax.Array | None, ...]:
        """Return all arrays, in their order."""
        return tuple(self._found[members] for members in self._arrays)


@lru_cache(maxsize=64)
def zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """Return what makes an array of zeros."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def put_member(array: jax.Array, shards: jax.Array, members: Members, nth: int) -> jax.Array:
    """Return an array with other shards of its nth member, in place: `array` is no more."""
    assert isinstance(shards.sharding, NamedSharding)
    return _putter(shards.sharding, len(members))(array, shards, nth)


@lru_cache(maxsize=64)
def _putter(sharding: NamedSharding, count: int) -> Any:
    """Return what writes the shards of one of `count` members into an array, in place."""

    def put(array: jax.Array, shard: jax.Array, nth: jax.Array) -> jax.Array:
        assert array.shape[0] == count * shard.shape[0]
        return lax.dynamic_update_slice_in_dim(array, shard, nth * shard.shape[0], axis=0)

    mapped = jax.shard_map(
        put,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, sharding.spec, replicated_spec()),
        out_specs=sharding.spec,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)
