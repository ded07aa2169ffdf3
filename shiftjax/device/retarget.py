"""A compiled step, loaded on another group of devices of the same shape: nothing is compiled.

JAX can serialise a compiled program and load it again, but only for the devices that it was
compiled for. Here devices are mapped by their place in the group. What JAX keeps private for that
is used in this file alone; whoever calls compiles instead where it fails.
"""

import io
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from shiftjax.parallel.grid import Device


def load_on(
    compiled: jax.stages.Compiled, devices: Sequence[Device], others: Sequence[Device]
) -> jax.stages.Compiled:
    """Return a program that was compiled for `devices` for as many `others`, place by place.

    Raises:
        Exception: of any kind, where this JAX or this backend cannot do it.
    """
    data, in_tree, out_tree = serialize_executable.serialize(compiled)
    unloaded, info, no_kwargs = _reader(data, devices, others).load()
    info = in_tree.unflatten(info)
    return jax.stages.Compiled(unloaded.load(), [], info, out_tree, no_kwargs=no_kwargs)


def _reader(data: bytes, devices: Sequence[Device], others: Sequence[Device]) -> Any:
    """JAX's own reader of what it has just written, with other devices in the places of these."""
    from jax._src.compiler import get_compile_options

    class Reader(serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid: tuple) -> Any:
            if pid[0] != "exec":
                return super().persistent_load(pid)
            places = np.array([device.id for device in others]).reshape(1, -1)
            options = get_compile_options(1, places.size, places, backend=self.backend)
            return self.backend.deserialize_executable(pid[1], self.execution_devices, options)

    reader: Any = Reader(io.BytesIO(data), others[0].client, others)
    reader.devices_by_id = dict(zip([d.id for d in devices], others, strict=True))
    return reader
