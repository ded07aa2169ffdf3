"""Extents as bytes that do not depend on the layout of their writer, and back.

Each set of entries that look alike is one array of all layers, `[layers * entries, rows, tokens,
width]`: each row once, without padding, whole blocks. Any layout finds in it what it needs, as in
the extent of another layout (`store_device.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shiftjax import __version__
from shiftjax.arch.formats import FORMATS
from shiftjax.deploy.deployment import Deployment
from shiftjax.disk_tier.chunk_file import BlockShape
from shiftjax.disk_tier.disk import DiskPlace
from shiftjax.host_tier.store_device import Alike, Extents, Part, Row, Rows, piece, shards_of
from shiftjax.parallel.positions import Positions
from shiftjax.weights.source import TensorSource, identify


class _Set(NamedTuple):
    alike: Alike
    layers: range
    num_rows: int
    width: int
    dtype: np.dtype


@dataclass(frozen=True)
class _Whole:
    """Stands where an array of an extent does, and where its only shard: see `shards_of`."""

    data: np.ndarray
    sharding: None = None  # that of no group
    index: tuple[slice, slice] = (slice(None), slice(None))

    @property
    def addressable_shards(self) -> "tuple[_Whole]":
        return (self,)


class ExtentPayloads:
    """The extents of an engine, for `Disk`."""

    def __init__(self, deployment: Deployment, extents: Extents):
        self._extents = extents
        default = FORMATS[deployment.formats.kv].dtype
        self._sets: list[_Set] = []
        for cache in deployment.layout.model.caches:
            for alike in cache.spec.alike:
                entry = cache.spec.entries[alike[0]]
                layers = range(cache.first, cache.first + len(cache.places))
                kind = Alike(cache.heads, alike), layers, entry.rows, entry.width
                self._sets.append(_Set(*kind, entry.dtype(default)))

    def get(self, number: int) -> list[Part] | None:
        """Return the parts of an extent; None: there are none."""
        return self._extents.get(number)

    def pieces(self, payload: Sequence[Part]) -> list[np.ndarray]:
        """Return an array for each set of entries. Raises what made a copy to the host fail."""
        found = []
        for own in self._sets:
            parts = [part for part in payload if part.entries == own.alike]
            stripe = parts[0].held.positions.stripe
            rows = Rows(tuple(map(Row, range(own.num_rows))), Positions(1, stripe))
            found.append(piece(shards_of(parts), own.layers, rows, own.num_rows))
        return found

    def put(self, number: int, shape: BlockShape, pieces: Sequence[np.ndarray]) -> None:
        """Have an extent hold what `pieces` has made, given as bytes. Raises ValueError."""
        parts: list[Part] = []
        for own, data in zip(self._sets, pieces, strict=True):
            num = len(own.layers) * len(own.alike.places)
            size = num, own.num_rows, shape.num_blocks * shape.block_size, own.width
            values = data.view(own.dtype).reshape(size)
            rows = Rows(tuple(map(Row, range(own.num_rows))), Positions(1, shape.block_size))
            array: Any = _Whole(values)
            parts.append(Part(array, own.alike, own.layers, rows))
        self._extents[number] = parts


def disk_place(deployment: Deployment, source: TensorSource, extents: Extents) -> DiskPlace | None:
    """Return where a deployment keeps chunks, and as whose; None: it keeps none.

    Whose: of which weights, in which numbers, computed by which version of this program. What is
    told apart within an engine (adapters, salts) is so by the hashes of blocks.
    """
    if deployment.disk_dir is None:
        return None
    formats, scales = deployment.formats, deployment.kv_scales
    caches = deployment.layout.model.caches
    own = __version__, identify(source), formats, scales, caches
    identity = blake2b(repr(own).encode(), digest_size=16).hexdigest()
    directory = Path(deployment.disk_dir).expanduser()
    payloads = ExtentPayloads(deployment, extents)
    return DiskPlace(directory, deployment.disk_bytes, identity, payloads)
