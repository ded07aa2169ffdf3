"""The weights of a mode as a second `jax.Array` over the memory of the stored ones.

Each weight is stored with its sharded dimension first, so the shard of a device in any mode is a
contiguous range of rows of the base shard that the device already holds. A view per device,
assembled into one array, costs no memory and no time at a switch; the published system keeps a
second copy, w / (SP * TP) per device (Shift Parallelism, arXiv 2509.16495, section 3.3.2).

The base arrays own the memory: whoever holds a view keeps the base array alive, and neither may
ever be donated.
"""

import ctypes
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shiftjax.device.mesh import mesh_of, named, view_spec
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Device, Mode
from shiftjax.parallel.layout import Layout

ALIGNMENT_BYTES = 64  # what XLA's CPU client wants of a buffer that it does not copy


def array_in_mode(
    stored: jax.Array,
    axis: str,
    layout: Layout,
    mode: Mode,
    name: str,
    *,
    rows: int | None = None,
    copy: bool = False,
    split: Mode | None = None,
) -> jax.Array:
    """Return a stored array, split along `axis` as a mode wants it, over the same memory.

    A device has `rows` of it, from its first on (None: those of one weight). With `copy` the shards
    get memory of their own. They are those of a step of the mode `split`, which may be split
    further (None: the same): then the array has them once for each device.

    Raises:
        ConfigError: the backend would have copied a shard that should have been viewed.
    """
    take, rows = row_copy if copy else row_view, rows or layout.shard_rows(axis, mode)
    shards = {shard.device: shard.data for shard in stored.addressable_shards}
    mesh = _mesh_of(stored)
    views = [
        take(shards[device], layout.shard_offset(axis, mode, place), rows, name)
        for place, device in enumerate(mesh.devices.flat)
        if device in shards
    ]
    split = split or mode
    shape = (rows * layout.ways(split), *stored.shape[1:])
    sharding = named(mesh_of(mesh, split), view_spec())
    return jax.make_array_from_single_device_arrays(shape, sharding, views)


def _mesh_of(array: jax.Array) -> Mesh:
    """Return the mesh over which `device.place` has put an array."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh), sharding
    return sharding.mesh


def _device_of(shard: jax.Array) -> Device:
    """Return the one device of a shard."""
    (device,) = shard.devices()
    return device


def row_view(shard: jax.Array, start: int, rows: int, name: str) -> jax.Array:
    """Return rows `[start, start + rows)` of a single-device array, over the same memory."""
    make = host_view if _device_of(shard).platform == "cpu" else dlpack_view
    view = make(shard, start, rows)
    offset = start * shard.nbytes // shard.shape[0]
    if view.unsafe_buffer_pointer() != shard.unsafe_buffer_pointer() + offset:
        raise ConfigError(
            [
                f"{name}: rows {start}..{start + rows} at byte {offset} of the base shard cannot "
                f"be viewed in place (the backend wants {ALIGNMENT_BYTES}-byte alignment); "
                "use weights=gather, or other degrees"
            ]
        )
    return view


def host_view(shard: jax.Array, start: int, rows: int) -> jax.Array:
    """Return the view where device memory is NumPy's, of any CPU device (DLPack knows only one).

    A copy, without a word, of rows that do not begin at a multiple of `ALIGNMENT_BYTES`.
    """
    return jax.device_put(np.asarray(shard)[start : start + rows], _device_of(shard))


def dlpack_view(shard: jax.Array, start: int, rows: int) -> jax.Array:
    """Return the view of a buffer of an accelerator (or of the first CPU device).

    It keeps the whole buffer alive, as a view of NumPy's does.
    """
    return jax.dlpack.from_dlpack(RowsOf(shard, start, rows))


def row_copy(shard: jax.Array, start: int, rows: int, name: str) -> jax.Array:
    """Return rows `[start, start + rows)` of a single-device array in memory of their own."""
    del name  # a copy cannot fail as a view can
    return jax.device_put(np.array(shard[start : start + rows]), _device_of(shard))


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """The head of `DLTensor` in dlpack.h, which a capsule named "dltensor" points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class RowsOf:
    """DLPack producer of some rows of a row-major array.

    The capsule of the whole array is made by JAX (and keeps the array alive); its data pointer
    is advanced and its first dimension cut before a consumer sees it.
    """

    def __init__(self, array: jax.Array, start: int, rows: int):
        self.array: Any = array  # the stubs of jax.Array know half of its DLPack methods
        self.start, self.rows = start, rows

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **_):
        capsule = self.array.__dlpack__(stream=stream)
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = (
            ctypes.c_void_p,
            [ctypes.py_object, ctypes.c_char_p],
        )
        pointer = get_pointer(capsule, b"dltensor")
        tensor = ctypes.cast(pointer, ctypes.POINTER(_Tensor)).contents
        tensor.data += self.start * self.array.nbytes // self.array.shape[0]
        tensor.shape[0] = self.rows
        return capsule
