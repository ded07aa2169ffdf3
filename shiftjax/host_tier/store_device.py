"""Extents of KV blocks in host memory, and what of them a device of any layout has to get.

An array of an extent is row-major: `[layers * entries, rows, blocks * block_size, width]` (Seesaw,
arXiv 2503.06433); its entries are those that look alike (`CacheSpec.alike`), one after the other
for each layer. Layers whose heads have another shape have arrays of their own. Each stage of its
writer has a part: its layers, their rows, split over its devices.
So what another split of layers or rows needs is found by addressing, and copied in runs of all
tokens of a row; of keys and values these are heads:

    written by pp = 2, tp = 2         read by tp = 2: device 0      by pp = 2, tp = 1: device 0

    layers 0-3   | h0 h1 | h2 h3 |    layers 0-3   | h0 h1 |        layers 0-3  | h0 h1 h2 h3 |
    layers 4-7   | h0 h1 | h2 h3 |    layers 4-7   | h0 h1 |
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np


class Alike(NamedTuple):
    """Entries that look alike, of the layers that have them."""

    heads: int  # of these layers (`ModelConfig.head_shapes`)
    places: tuple[int, ...]  # in the spec of such a layer


class Part(NamedTuple):
    """What one stage of the writer has of some entries of an extent, in `pinned_host` memory."""

    array: jax.Array  # [layers * entries, rows of all devices, tokens, width]
    entries: Alike
    layers: range  # of those of the model that have such entries
    rows: tuple[int, ...]  # of the entries, in the order of devices, which may hold the same ones


Extents = dict[int, list[Part]]  # by number; of all groups and stages of an engine


class Shard(NamedTuple):
    """What one device has written of an extent; nothing is copied to look at it."""

    values: np.ndarray  # [layers * entries, rows, tokens, width]
    layers: range
    rows: tuple[int, ...]

    @property
    def num_entries(self) -> int:
        """Entries of each layer."""
        return len(self.values) // len(self.layers)

    def of_layers(self, layers: range) -> np.ndarray:
        """The entries of some of its layers."""
        start, num = layers.start - self.layers.start, self.num_entries
        return self.values[num * start : num * (start + len(layers))]


def shards_of(parts: Sequence[Part]) -> list[Shard]:
    """Wait until an extent is on the host. Raises what made a copy to it fail."""
    found: list[Shard] = []
    for part in parts:
        for shard in part.array.addressable_shards:
            values, first = np.asarray(shard.data), shard.index[1].start or 0
            found.append(Shard(values, part.layers, part.rows[first : first + values.shape[1]]))
    return found


def piece(shards: Sequence[Shard], layers: range, rows: Sequence[int], num_rows: int) -> np.ndarray:
    """What a device needs of an extent: `[layers * entries, rows, tokens, width]`.

    Where one device has written all of it, that is a view. Rows from `num_rows` on are padding,
    zeros, as no weights lead to them. Raises KeyError if the extent lacks a layer or row.
    """
    for shard in shards:
        first = shard.rows.index(rows[0]) if rows[0] in shard.rows else 0
        found = slice(first, first + len(rows))
        if shard.rows[found] == tuple(rows) and common(layers, shard.layers) == layers:
            return shard.of_layers(layers)[:, found]
    (_, _, *size), num = shards[0].values.shape, shards[0].num_entries
    made = np.zeros((num * len(layers), len(rows), *size), shards[0].values.dtype)
    missing = {(layer, row) for layer in layers for row in rows if row < num_rows}
    for shard in shards:
        shared = common(layers, shard.layers)
        start = num * (shared.start - layers.start)
        for place, row in enumerate(rows):
            if row in shard.rows and (shared.start, row) in missing:
                values = shard.of_layers(shared)[:, shard.rows.index(row)]
                made[start : start + len(values), place] = values
        missing -= {(layer, row) for layer in shared for row in shard.rows}
    if missing:
        raise KeyError(f"The host has not all of an extent: layers and rows {sorted(missing)}.")
    return made


def common(one: range, other: range) -> range:
    """The layers that are in both; of length 0 if none is."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
