"""What devices exchange that split the positions of cached heads (`parallel/positions.py`).

They are R neighbours by place, the same devices in every mode. Of a step with m decode rows and h
query heads of width d on a device, in activations of b bytes, with f bytes of a softmax's state:

    all-gather  m * R h * d * b          every one answers the queries of all, at its own positions
    all-to-all  m * R h * (d + 2) * f    parts of each device's own heads come to it

Tiles of prompts gather keys and values instead, once a layer (`gathered_tiles.py`).
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode_work import DecodeWork
from pallas_kernels.window import Window, first_seen
from shiftjax.models.attention_work import RowWork
from shiftjax.models.softmaxes import State, joined
from shiftjax.parallel.grid import ALL_AXES
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import Positions


class Neighbours(NamedTuple):
    """Devices of a group that split positions; inside a step."""

    positions: Positions
    num_devices: int  # of the group

    @property
    def part(self) -> "OwnPart":
        """What this device has."""
        return OwnPart(self.positions, jax.lax.axis_index(ALL_AXES) % self.positions.ways)

    @property
    def _groups(self) -> list[list[int]]:
        ways = self.positions.ways
        return [list(range(n, n + ways)) for n in range(0, self.num_devices, ways)]

    def gather_queries(
        self, q: Float[Array, "rows heads width"]
    ) -> Float[Array, "rows heads_of_all width"]:
        """Return the queries of all neighbours, whose heads lie next to each other."""
        own = {"axis": 1, "tiled": True, "axis_index_groups": self._groups}
        return jax.lax.all_gather(q, ALL_AXES, **own)

    def exchange_parts(
        self, parts: Float[Array, "rows cached of_all width"]
    ) -> Float[Array, "ways rows cached own width"]:
        """Return what each neighbour has found for this device's own of the queries of all."""
        rows, cached, of_all, width = parts.shape
        ways = self.positions.ways
        parts = parts.reshape(rows, cached, ways, of_all // ways, width)
        send = jnp.moveaxis(parts, 2, 0)
        return jax.lax.all_to_all(send, ALL_AXES, 0, 0, axis_index_groups=self._groups)

    def join(self, parts: State) -> State:
        """Return the softmaxes of this device's heads, of which all have parts: one exchange.

        Summed in the order of places: the same bits in all modes.
        """
        packed = parts.weighted, parts.total[..., None], parts.maximum[..., None]
        found = self.exchange_parts(jnp.concatenate(packed, axis=-1))
        return joined(State(found[..., -1], found[..., -2], found[..., :-2]))

    def gather_blocks(self, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return blocks `[blocks, ...]` of all neighbours: `[ways, blocks, ...]` of each array.

        Arrays of several widths go together, in one exchange.
        """
        flat = [part.reshape(len(part), -1) for part in parts]
        sent = jnp.concatenate(flat, axis=-1)
        found = jax.lax.all_gather(sent, ALL_AXES, axis_index_groups=self._groups)
        ends = list(itertools.accumulate(part.shape[-1] for part in flat))
        split = jnp.split(found, ends[:-1], axis=-1)
        ways = self.positions.ways
        return tuple(x.reshape(ways, *part.shape) for x, part in zip(split, parts, strict=True))


def neighbours_of(layout: Layout, block_size: int) -> Neighbours | None:
    """Return the neighbours that split blocks of so many tokens; None: nobody does."""
    positions = layout.positions(block_size)
    return None if positions is None else Neighbours(positions, layout.num_devices)


class OwnPart(NamedTuple):
    """What a device has of the positions: its place among those that split them."""

    positions: Positions
    place: Any

    def seen(
        self, at: Int32[Array, "..."], window: Window | None
    ) -> tuple[Int32[Array, "..."], Int32[Array, "..."]]:
        """Return the first of its own tokens that a token at `at` sees, and one past the last."""
        low = self.positions.count(jnp.maximum(first_seen(at, window), 0), self.place)
        return low, self.positions.count(at + 1, self.place)


def own_rows(
    rows: RowWork | DecodeWork,
    window: Window | None,
    asking: Int32[Array, " rows"],
    part: OwnPart,
) -> RowWork | DecodeWork:
    """Return the work of rows, cut to what a device has of their contexts.

    Jobs of the loops are cut, and the rows of the kernel's.
    """
    if isinstance(rows, DecodeWork):
        row = jnp.arange(rows.row_length.shape[0], dtype=jnp.int32)
        low, high = part.seen(asking[jnp.minimum(row, asking.shape[0] - 1)], window)
        return rows._replace(row_length=high, row_low=None if rows.row_low is None else low)
    low, high = part.seen(asking[jnp.minimum(rows.job_row, asking.shape[0] - 1)], window)
    begin, end = jnp.maximum(rows.job_begin, low), jnp.minimum(rows.job_end, high)
    return rows._replace(job_begin=begin, job_end=end)


def localise_by(neighbours: Neighbours, windows: tuple[Window | None, ...]) -> Callable[..., Any]:
    """Return `AttentionBackend.localise` of a device that has neighbours; `windows` may be others.

    Those of a model whose heads have several shapes, of which a backend has one.
    """

    def localise(inputs: Any, windows: tuple[Window | None, ...] = windows) -> Any:
        return localised(inputs, neighbours.part, windows)

    return localise


def localised(inputs: Any, part: OwnPart, windows: tuple[Window | None, ...]) -> Any:
    """Return the inputs of a step as a device needs them that has a part of the positions.

    Tokens of others go to the null block. Jobs of rows end, and begin, where the device's own part
    of their context does. Tiles read all of their context, and stay as they are.
    """
    metadata, late = inputs.attention, inputs.late
    own = tuple(
        work._replace(rows=own_rows(work.rows, window, inputs.positions, part))
        for work, window in zip(metadata.work, windows, strict=True)
    )
    slots = part.positions.own_slots(metadata.slot_mapping, part.place)
    if late is not None:
        asking = inputs.positions[inputs.sample_rows]
        works = zip(late.work, windows, strict=True)
        late = late._replace(work=tuple(own_rows(*each, asking, part) for each in works))
    metadata = metadata._replace(slot_mapping=slots, work=own)
    return inputs._replace(attention=metadata, late=late)
