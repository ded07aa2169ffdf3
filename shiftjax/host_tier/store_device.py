"""Extents of KV blocks in host memory, and what of them a device of any layout has to get.

An extent is head-major: `[2 * layers, kv heads, blocks * block_size, head_dim]` (Seesaw, arXiv
2503.06433), keys of a layer before its values. Each stage of its writer has a part: its layers, its
heads, split over its devices. So what another split of layers or heads needs is found by
addressing, and copied in runs of all tokens of a head:

    written by pp = 2, tp = 2         read by tp = 2: device 0      by pp = 2, tp = 1: device 0

    layers 0-3   | h0 h1 | h2 h3 |    layers 0-3   | h0 h1 |        layers 0-3  | h0 h1 h2 h3 |
    layers 4-7   | h0 h1 | h2 h3 |    layers 4-7   | h0 h1 |
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np


class Part(NamedTuple):
    """What one stage of the writer has of an extent, in `pinned_host` memory."""

    array: jax.Array  # [2 * layers, rows of all devices, tokens, head_dim]
    first_layer: int
    heads: tuple[int, ...]  # the KV head of each row; devices may hold the same ones

    @property
    def layers(self) -> range:
        """The layers of the model that it has."""
        return range(self.first_layer, self.first_layer + self.array.shape[0] // 2)


Extents = dict[int, list[Part]]  # by number; of all groups and stages of an engine


class Shard(NamedTuple):
    """What one device has written of an extent; nothing is copied to look at it."""

    values: np.ndarray  # [2 * layers, heads, tokens, head_dim]
    layers: range
    heads: tuple[int, ...]

    def of_layers(self, layers: range) -> np.ndarray:
        """The keys and values of some of its layers."""
        start = layers.start - self.layers.start
        return self.values[2 * start : 2 * (start + len(layers))]


def shards_of(parts: Sequence[Part]) -> list[Shard]:
    """Wait until an extent is on the host. Raises what made a copy to it fail."""
    found: list[Shard] = []
    for part in parts:
        for shard in part.array.addressable_shards:
            values, first = np.asarray(shard.data), shard.index[1].start or 0
            found.append(Shard(values, part.layers, part.heads[first : first + values.shape[1]]))
    return found


def piece(
    shards: Sequence[Shard], layers: range, heads: Sequence[int], num_kv_heads: int
) -> np.ndarray:
    """What a device needs of an extent: `[2 * layers, heads, tokens, head_dim]`.

    Where one device has written all of it, that is a view. Heads from `num_kv_heads` on are
    padding, zeros, as no weights lead to them. Raises KeyError if the extent lacks a layer or head.
    """
    for shard in shards:
        row = shard.heads.index(heads[0]) if heads[0] in shard.heads else 0
        rows = slice(row, row + len(heads))
        if shard.heads[rows] == tuple(heads) and common(layers, shard.layers) == layers:
            return shard.of_layers(layers)[:, rows]
    _, _, *size = shards[0].values.shape
    made = np.zeros((2 * len(layers), len(heads), *size), shards[0].values.dtype)
    missing = {(layer, head) for layer in layers for head in heads if head < num_kv_heads}
    for shard in shards:
        shared = common(layers, shard.layers)
        start = 2 * (shared.start - layers.start)
        for row, head in enumerate(heads):
            if head in shard.heads and (shared.start, head) in missing:
                values = shard.of_layers(shared)[:, shard.heads.index(head)]
                made[start : start + len(values), row] = values
        missing -= {(layer, head) for layer in shared for head in shard.heads}
    if missing:
        raise KeyError(f"The host has not all of an extent: layers and heads {sorted(missing)}.")
    return made


def common(one: range, other: range) -> range:
    """The layers that are in both; of length 0 if none is."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
