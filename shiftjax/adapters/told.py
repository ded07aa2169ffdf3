"""An adapter as one host of an engine tells it to the others: for which slot, and its numbers."""

import json
import struct

import numpy as np

from shiftjax.adapters.adapter import Adapter, Factor
from shiftjax.arch.formats import FORMATS

MARK = b"\xff" * 8  # where calls of steps have their number
_SIZES = struct.Struct("<II")  # the slot, and bytes of what follows that say what is where


def encode(slot: int, adapter: Adapter) -> bytes:
    """Return a call that has an adapter written to a slot."""
    matrices = [matrix for factor in adapter.factors.values() for matrix in factor]
    said = {
        "name": adapter.name,
        "digest": adapter.digest,
        "rank": adapter.rank,
        "dtype": matrices[0].dtype.name if matrices else "float32",
        "shapes": {name: [f.a.shape, f.b.shape] for name, f in adapter.factors.items()},
    }
    head = json.dumps(said).encode()
    parts = (np.ascontiguousarray(matrix).view(np.uint8).data for matrix in matrices)
    return b"".join([MARK, _SIZES.pack(slot, len(head)), head, *parts])


def decode(call: bytes) -> tuple[int, Adapter] | None:
    """Undo it; None: the call is another. Raises ValueError for what is cut off."""
    if not call.startswith(MARK):
        return None
    slot, size = _SIZES.unpack_from(call, len(MARK))
    at = len(MARK) + _SIZES.size
    said = json.loads(call[at : at + size])
    at, dtype, factors = at + size, FORMATS[said["dtype"]].dtype, {}
    for name, shapes in said["shapes"].items():
        both = []
        for shape in shapes:
            count = int(np.prod(shape))
            both.append(np.frombuffer(call, dtype, count, at).reshape(shape))
            at += count * dtype.itemsize
        factors[name] = Factor(*both)
    if at != len(call):
        raise ValueError(f"an adapter of {len(call)} bytes should have {at}")
    return slot, Adapter(said["name"], "", said["digest"], said["rank"], factors)
