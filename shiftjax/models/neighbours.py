"""What devices exchange that split the positions of cached heads (`parallel/positions.py`).

They are R neighbours by place, the same devices in every mode. Of a step with m decode rows and h
query heads of width d on a device, in activations of b bytes, with f bytes of a softmax's state:

    all-gather  m * R h * d * b          every one answers the queries of all, at its own positions
    all-to-all  m * R h * (d + 2) * f    parts of each device's own heads come to it

Steps of SHIFT may use q and o as R neighbours together do (`Layout.query_modes`): R times as wide,
in shards that each of them stores. Then every one has the queries of all, and o multiplies what it
has found, weighed by its share of the softmax; the all-reduce after o adds that up. What travels
are normalisers, the largest score and the sum of each softmax:

    all-gather  R * m * R h * 2 * f

Tiles of prompts gather keys and values instead, once a layer (`gathered_tiles.py`).
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.decode_work import DecodeWork
from pallas_kernels.window import Window, first_seen
from shiftjax.models.attention_work import RowWork
from shiftjax.models.softmaxes import State, joined, share_of, with_sinks
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

    def share(self, parts: State, sinks: Float[Array, "cached own"] | None) -> State:
        """Return softmaxes whose outputs are this device's part of those of all heads.

        Its neighbours' add up to the rest. Sinks take part once, as scores that the device of a
        head has found. One exchange, of maxima and sums.
        """
        if sinks is not None:
            of_all = sinks.shape[0], sinks.shape[1] * self.positions.ways
            parts = with_sinks(parts, self.with_own_heads(jnp.full(of_all, -jnp.inf), sinks))
        told = jnp.stack([parts.maximum, parts.total])
        told = jax.lax.all_gather(told, ALL_AXES, axis_index_groups=self._groups)
        weighted = share_of(parts, told[:, 0], told[:, 1])
        return State(parts.maximum, jnp.ones_like(parts.total), weighted)

    def own_heads(self, of_all: Shaped[Array, "rows heads_of_all ..."]) -> jax.Array:
        """Return this device's heads of those of all neighbours, which are a second dimension."""
        own = of_all.shape[1] // self.positions.ways
        return jax.lax.dynamic_slice_in_dim(of_all, self.part.place * own, own, 1)

    def with_own_heads(self, of_all: jax.Array, own: jax.Array) -> jax.Array:
        """Return what all neighbours have with other values of this device's heads."""
        return jax.lax.dynamic_update_slice_in_dim(of_all, own, self.part.place * own.shape[1], 1)

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


def answered(
    neighbours: Neighbours | None,
    q: Float[Array, "rows heads width"],
    states: Callable[[jax.Array], State],
    sinks: Float[Array, "cached own"] | None,
    *,
    of_all: bool,
) -> tuple[State, Float[Array, "cached own"] | None]:
    """Return the softmaxes of rows, and the sinks that are still to take part in them.

    `states` answers queries with what a device has of contexts: its own alone, or those of all
    neighbours. It has them already if they are `of_all`; then outputs are its part of theirs.
    """
    if neighbours is None:
        return states(q), sinks
    if of_all:
        return neighbours.share(states(q), sinks), None
    return neighbours.join(states(neighbours.gather_queries(q))), sinks


def filled(
    neighbours: Neighbours | None,
    attend: Callable[[jax.Array, jax.Array], jax.Array],
    q: Float[Array, "tokens heads _"],
    out: Float[Array, "tokens heads width"],
    num_rows: Int32[Array, ""],
    *,
    of_all: bool,
) -> Float[Array, "tokens heads width"]:
    """Return `out`, which has the decode rows, with tiles as `attend` fills them in.

    Queries may be those of all neighbours: `attend` is given own heads then, of both. Other heads
    of tiles are zeros, as their devices add them.
    """
    if neighbours is None or not of_all:
        return attend(q, out)
    is_row = jnp.arange(len(out), dtype=jnp.int32) < num_rows
    out = jnp.where(is_row[:, None, None], out, 0)
    own = attend(neighbours.own_heads(q), neighbours.own_heads(out))
    return neighbours.with_own_heads(out, own)


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
