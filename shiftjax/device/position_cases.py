"""The kernels of devices that split positions, tried on one device; see `attention_cases`.

It has the blocks of all, whole stripes. Rows are answered at the place of each neighbour in turn,
for the queries of all, and what comes together is held against the loops, which know of no places.
Tiles are answered for the queries of each neighbour in turn, over pages as these would gather them,
in a buffer so short that long contexts take several rounds. Nothing is exchanged. Chunks of prompts
with latents are loops, and stay out of it.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode_work import DecodeWork
from pallas_kernels.rows import Rows, Sequences
from pallas_kernels.step_work import KernelConfig
from shiftjax.device.attention_steps import Shape
from shiftjax.models.attention import AttentionWork, LayerPool, LayerTerms
from shiftjax.models.attention_backend import AttentionBackend, loops_of, tuned_config
from shiftjax.models.attention_work import LoopSizes, loop_sizes
from shiftjax.models.entry_backend import pallas_entry, pallas_write
from shiftjax.models.neighbours import OwnPart, own_rows
from shiftjax.models.position_backend import RowKernels
from shiftjax.models.softmaxes import State, joined, normalised, sinks_by_row
from shiftjax.models.tile_backend import TileKernels
from shiftjax.parallel.grid import Device
from shiftjax.parallel.positions import Positions

SIZES = loop_sizes("gpu")._replace(gathered=1024, gathers=2)  # the longest chunk takes 5 rounds


class Alone(NamedTuple):
    """Neighbours whose parts one device has, which gathers nothing."""

    positions: Positions  # places in the order of runs

    def gather_blocks(self, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return stripes `[blocks, heads, stripe, width]` as blocks of places, `[ways, ...]`."""
        ways, block = self.positions.ways, self.positions.block

        def cut(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(len(x), x.shape[1], ways, block, -1), 2, 0)

        return tuple(map(cut, parts))


class TurnWork(NamedTuple):
    """The work of one step, for one window."""

    rows: DecodeWork
    asking: Int32[Any, " rows"]  # the position of each row
    tiles: Any  # an AttentionWork; None: every token of the bucket may be a row


def tuned_in_turn(shape: Shape, device: Device) -> AttentionBackend:
    """Return the kernels that serve a shape."""
    own_size = shape.block_size // shape.ways
    config, _ = tuned_config(shape.layout, device, own_size, shape.deterministic)
    return in_turn(shape, config)


def in_turn(
    shape: Shape, config: KernelConfig, interpret: Any = False, sizes: LoopSizes = SIZES
) -> AttentionBackend:
    """Return attention that is answered place by place; `interpret` is for tests alone."""
    model, stripe = shape.layout.model, shape.block_size
    positions = Positions(shape.ways, stripe // shape.ways)
    kernels = RowKernels(model, shape.heads, positions, config.decode, interpret)
    loops, heads = loops_of(model, stripe), (shape.heads // shape.ways, 1)  # of each neighbour
    places = range(positions.ways)
    tiles = TileKernels(model, heads, Alone(positions), config.prefill, sizes, interpret)

    def divide_rows(rows: Rows, num_rows: int) -> tuple[TurnWork, ...]:
        asking = np.zeros(num_rows, np.int32)
        asking[: len(rows.length)] = rows.length - 1
        return tuple(TurnWork(work, asking, None) for work in kernels.divide(rows, num_rows))

    def divide(block_tables, seq_lens, query_start_loc, num_decodes, *, num_tokens, num_rows=None):
        sequences = Sequences(seq_lens, query_start_loc, num_decodes, num_rows)
        works = divide_rows(sequences.rows, sequences.most_rows)
        if num_tokens is None:
            return works
        if model.latent is None:
            most = block_tables.shape[1] * stripe
            chunks = [
                AttentionWork(None, *own) for own in tiles.divide(sequences, num_tokens, most)
            ]
        else:
            sizes = {"num_tokens": num_tokens, "num_rows": num_rows}
            chunks = loops.divide(block_tables, seq_lens, query_start_loc, num_decodes, **sizes)
        return tuple(work._replace(tiles=own) for work, own in zip(works, chunks, strict=True))

    def attend(q, pool, metadata, terms):
        work = metadata.work[terms.window]
        out = attend_rows(q, pool, metadata.block_tables, metadata.work, terms)
        if work.tiles is None:
            return out
        others = metadata._replace(work=tuple(each.tiles for each in metadata.work))
        if model.latent is None:
            return jnp.concatenate([fill(q, out, pool, others, terms, nth) for nth in places], 1)
        in_tiles: Any = loops.attend(q, pool, others, terms)
        is_row = jnp.arange(q.shape[0]) < metadata.query_start_loc[metadata.num_decodes]
        return jnp.where(is_row[:, None, None], out, in_tiles)

    def fill(q, out, pool, metadata, terms: LayerTerms, place: int):
        own = slice(place * heads[0], (place + 1) * heads[0])  # of queries
        sinks = None if terms.sinks is None else terms.sinks[own]
        return tiles.attend(q[:, own], out[:, own], pool, metadata, replace(terms, sinks=sinks))

    def attend_rows(q, pool, block_tables, works, terms: LayerTerms):
        work, count = works[terms.window], min(q.shape[0], works[0].asking.shape[0])
        parts = [answer(q[:count], place, pool, block_tables, work, terms) for place in places]
        state = joined(State(*(jnp.stack(each) for each in zip(*parts, strict=True))))
        out = normalised(state, sinks_by_row(terms.sinks, 1)).reshape(count, shape.heads, -1)
        return jnp.pad(out.astype(q.dtype), ((0, q.shape[0] - count), (0, 0), (0, 0)))

    def answer(
        q: Float[Array, "rows heads head_dim"],
        place: int,
        pool: LayerPool,
        block_tables: Int32[Array, "seqs blocks_per_seq"],
        work: TurnWork,
        terms: LayerTerms,
    ) -> State:
        own = slice(place * positions.block, (place + 1) * positions.block)
        part, window = OwnPart(positions, jnp.int32(place)), model.windows[terms.window]
        rows: Any = own_rows(work.rows, window, work.asking, part)
        return kernels.states(q, tuple(x[:, :, own] for x in pool), block_tables, rows, terms)

    own = divide, divide_rows, attend, attend_rows, pallas_write(interpret), 0
    return AttentionBackend("pallas", *own, enter=pallas_entry(interpret, pads=False))
