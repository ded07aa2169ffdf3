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

Where devices split positions (`parallel/positions.py`) a row has one run of each block. Runs of two
layouts share one range of tokens in a block, or none, and that is copied, of all blocks at once.

Groups of a fleet have blocks of several sizes. What one reads of another is put together of units,
the tokens that are hashed at a time (`units_piece`): each lies in one block of its writer.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from shiftjax.parallel.positions import Positions


class Alike(NamedTuple):
    """Entries that look alike, of the layers that have them."""

    heads: int  # of these layers (`ModelConfig.head_shapes`)
    places: tuple[int, ...]  # in the spec of such a layer


class Row(NamedTuple):
    """What a device has of a row of an entry: one run of every block."""

    number: int  # in the entry
    run: int = 0  # 0 alone where devices do not split positions


class Rows(NamedTuple):
    """Rows that devices have one after the other, and how their blocks are split."""

    rows: tuple[Row, ...]
    positions: Positions


class Part(NamedTuple):
    """What one stage of the writer has of some entries of an extent, in `pinned_host` memory."""

    array: jax.Array  # [layers * entries, rows of all devices, tokens, width]
    entries: Alike
    layers: range  # of those of the model that have such entries
    held: Rows  # of the entries, in the order of devices, which may hold the same ones


Extents = dict[int, list[Part]]  # by number; of all groups and stages of an engine


class Shard(NamedTuple):
    """What one device has written of an extent; nothing is copied to look at it."""

    values: np.ndarray  # [layers * entries, rows, tokens, width]
    layers: range
    held: Rows

    @property
    def num_entries(self) -> int:
        """Entries of each layer."""
        return len(self.values) // len(self.layers)

    @property
    def num_blocks(self) -> int:
        """Blocks of the extent."""
        return self.values.shape[2] // self.held.positions.block

    def of_layers(self, layers: range) -> np.ndarray:
        """The entries of some of its layers."""
        start, num = layers.start - self.layers.start, self.num_entries
        return self.values[num * start : num * (start + len(layers))]

    def of_blocks(self, begin: int, end: int) -> "Shard":
        """The same of some of its blocks; a view."""
        size = self.held.positions.block
        return self._replace(values=self.values[:, :, begin * size : end * size])

    def blocks_of(self, layers: range, place: int) -> np.ndarray:
        """Its row at a place, by blocks: `[layers * entries, blocks, tokens, width]`."""
        values = self.of_layers(layers)[:, place]
        return values.reshape(len(values), self.num_blocks, -1, values.shape[-1])


def shards_of(parts: Sequence[Part]) -> list[Shard]:
    """Wait until an extent is on the host. Raises what made a copy to it fail."""
    found: list[Shard] = []
    for part in parts:
        for shard in part.array.addressable_shards:
            values, first = np.asarray(shard.data), shard.index[1].start or 0
            rows = part.held.rows[first : first + values.shape[1]]
            found.append(Shard(values, part.layers, part.held._replace(rows=rows)))
    return found


def piece(shards: Sequence[Shard], layers: range, wanted: Rows, num_rows: int) -> np.ndarray:
    """What a device needs of an extent: `[layers * entries, rows, tokens, width]`.

    Where one device has written all of it, that is a view. Rows from `num_rows` on are padding,
    zeros, as no weights lead to them. Raises KeyError if the extent lacks a layer or row, and
    ValueError if its blocks have other numbers of tokens.
    """
    rows, positions = wanted
    for shard in shards:
        if shard.held.positions.stripe != positions.stripe:
            sizes = f"{shard.held.positions.stripe} tokens, not {positions.stripe}"
            raise ValueError(f"Blocks of an extent have {sizes}.")
        held = shard.held.rows
        first = held.index(rows[0]) if rows[0] in held else 0
        found = Rows(held[first : first + len(rows)], shard.held.positions)
        if found == wanted and common(layers, shard.layers) == layers:
            return shard.of_layers(layers)[:, first : first + len(rows)]
    num, num_blocks, width = shards[0].num_entries, shards[0].num_blocks, shards[0].values.shape[-1]
    shape = num * len(layers), len(rows), num_blocks, positions.block, width
    made = np.zeros(shape, shards[0].values.dtype)
    # Which tokens of a block are there yet; padding is.
    is_there = np.zeros((len(layers), len(rows), positions.block), bool)
    is_there[:, [row.number >= num_rows for row in rows]] = True
    for shard in shards:
        shared = common(layers, shard.layers)
        start = shared.start - layers.start
        of_layers = slice(num * start, num * (start + len(shared)))
        for place, row in enumerate(rows):
            for source, own in enumerate(shard.held.rows):
                ours, theirs = _common_tokens(row, positions, own, shard.held.positions)
                there = is_there[start : start + len(shared), place, ours]
                if own.number == row.number and not there.all():
                    values = shard.blocks_of(shared, source)[:, :, theirs]
                    made[of_layers, place, :, ours] = values
                    there[:] = True
    if not is_there.all():
        places = zip(*np.where(~is_there.all(axis=2)), strict=True)
        lacks = [(layers[layer], *rows[place]) for layer, place in places]
        raise KeyError(f"The host has not all of an extent: layers, rows and runs {lacks}.")
    return made.reshape(*shape[:2], -1, width)


def units_piece(
    units: Sequence[tuple[int, int]],
    shards: Mapping[int, Sequence[Shard]],
    unit_tokens: int,
    layers: range,
    wanted: Rows,
    num_rows: int,
    num_blocks: int,
) -> np.ndarray:
    """What a device needs of units, `(extent, unit)`: `[layers * entries, rows, tokens, width]`.

    They are one after the other the tokens of so many blocks of this device's group; those that the
    last one lacks are zeros. `shards` are those of each extent. Raises KeyError as `piece` does.
    """
    rows, positions = wanted
    whole_rows = tuple(Row(row.number) for row in rows)
    parts: list[np.ndarray] = []
    for number, first, count in _runs(units):
        stripe = shards[number][0].held.positions.stripe
        several = stripe // unit_tokens
        begin, end = first // several, -(-(first + count) // several)
        some = [shard.of_blocks(begin, end) for shard in shards[number]]
        whole = piece(some, layers, Rows(whole_rows, Positions(1, stripe)), num_rows)
        start = (first - begin * several) * unit_tokens
        parts.append(whole[:, :, start : start + count * unit_tokens])
    num, _, _, width = parts[0].shape
    missing = num_blocks * positions.stripe - sum(part.shape[2] for part in parts)
    parts.append(np.zeros((num, len(rows), missing, width), parts[0].dtype))
    tokens = np.concatenate(parts, axis=2)
    by_run = tokens.reshape(num, len(rows), num_blocks, positions.ways, positions.block, width)
    own = [by_run[:, place, :, row.run] for place, row in enumerate(rows)]
    return np.stack(own, axis=1).reshape(num, len(rows), -1, width)


def _runs(units: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return units that lie one after the other in an extent: its number, the first, how many."""
    found: list[tuple[int, int, int]] = []
    for number, unit in units:
        if found and (number, unit) == (found[-1][0], sum(found[-1][1:])):
            found[-1] = number, found[-1][1], found[-1][2] + 1
        else:
            found.append((number, unit, 1))
    return found


def _common_tokens(
    one: Row, positions: Positions, other: Row, theirs: Positions
) -> tuple[slice, slice]:
    """Return where the tokens of a block that both runs have are in the one and in the other."""
    first, second = one.run * positions.block, other.run * theirs.block
    begin = max(first, second)
    end = max(begin, min(first + positions.block, second + theirs.block))
    return slice(begin - first, end - first), slice(begin - second, end - second)


def common(one: range, other: range) -> range:
    """The layers that are in both; of length 0 if none is."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
