"""Attention kernels on devices that split positions: each has a part of every context.

rows      neighbours gather queries, or have made those of all; the decode kernel answers them at a
          device's own positions, which are a sequence without holes; parts come together as those
          of the loops, or in the sum after o
tiles     chunks of prompts are the prefill kernel over what is gathered (`tile_backend.py`); of
          latents XLA loops (`gathered_tiles.py`)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode_work import (
    LEAST_ROUNDS,
    DecodeConfig,
    DecodeWork,
    divide_decode,
    groups_of,
)
from pallas_kernels.decode_work import num_workers as workers_of
from pallas_kernels.rows import Rows, Sequences
from pallas_kernels.step_work import KernelConfig
from pallas_kernels.window import first_seen
from shiftjax.arch.config import ModelConfig
from shiftjax.models.attention import (
    AttentionMetadata,
    LayerPool,
    LayerTerms,
    LoopOptions,
    in_tiles,
)
from shiftjax.models.attention_table import AttentionBackend
from shiftjax.models.attention_work import (
    AttentionWork,
    check_contexts,
    divide_gathered,
    divide_tiles,
    loop_sizes,
)
from shiftjax.models.entry_backend import kv_scales, pallas_entry, pallas_write
from shiftjax.models.gathered_tiles import in_gathered_tiles
from shiftjax.models.neighbours import answered, filled, localise_by, neighbours_of
from shiftjax.models.softmaxes import State, normalised, of_normalised, sinks_by_row
from shiftjax.models.tile_backend import TileKernels
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import Positions

OF_LATENTS = "decode kernel"  # and loops for prompts


class RowKernels(NamedTuple):
    """The decode kernel at a part of the positions: of one KV head, or of latents (MLA)."""

    model: ModelConfig
    heads: int  # of all who ask
    positions: Positions
    config: DecodeConfig
    interpret: Any = False

    def divide(self, rows: Rows, num_rows: int) -> tuple[DecodeWork, ...]:
        """Return the work of rows for each window: from the first to the last that a device has.

        What a device has not of it is cut off in the step (`neighbours.localised`).
        """
        positions, found = self.positions, []
        ends = np.asarray(rows.length, np.int64)
        longest = positions.count(ends, 0)
        for window in self.model.windows:
            low = None
            if window is not None:
                oldest = np.maximum(first_seen(ends - 1, window), 0)
                low = positions.count(oldest, positions.ways - 1)
            own = Rows(rows.seq, longest, low)
            sizes = {"kv_heads": self.groups, "window": window, "config": self.config}
            found.append(divide_decode(own, num_rows, **sizes))
        return tuple(found)

    @property
    def groups(self) -> int:
        """The KV heads of the work; groups of heads, where all attend to latents."""
        return 1 if self.model.latent is None else groups_of(self.heads)

    def states(
        self,
        q: Float[Array, "rows heads_of_all head_dim"],
        pool: LayerPool,
        block_tables: Int32[Array, "seqs blocks_per_seq"],
        work: DecodeWork,
        terms: LayerTerms,
    ) -> State:
        """Return the softmaxes of rows over what a device has of their contexts.

        The work is that of the device.
        """
        from pallas_kernels.call import AttentionOptions, PagedKV
        from pallas_kernels.decode import decode_parts

        model = self.model
        scores = model.attention_scale, model.windows[terms.window], model.attention_soft_cap
        options = AttentionOptions(*scores, kv_scales(terms), interpret=self.interpret)
        options = options._replace(values_in_keys=model.values_in_keys)
        k, v = (*terms.own(pool), None)[:2]
        kv = PagedKV(k, v, block_tables, None)  # rows say how much they see
        values, lse = decode_parts(q, kv, work, options, self.config)
        return of_normalised(values[:, None], lse[:, None])


def position_attention(
    layout: Layout, config: KernelConfig, block_size: int, *, interpret: Any = False
) -> AttentionBackend:
    """Return the kernels of devices that split positions, in blocks that are stripes of theirs.

    Or of devices that have all of them, of latents. Of these decodes alone have a kernel, and
    others than attention's are not had with it: the name says so. Chunks of prompts run as loops.

    Shapes that the kernels do not have raise ValueError where they are traced. `interpret` is for
    tests alone.
    """
    model, neighbours = layout.model, neighbours_of(layout, block_size)
    positions = Positions(1, block_size) if neighbours is None else neighbours.positions
    heads = layout.heads_per_device * layout.position_ways
    kernels = RowKernels(model, heads, positions, config.decode, interpret)
    sizes, tiles = loop_sizes("gpu", exchanges=True), None
    if neighbours is not None and model.latent is None:
        own = layout.heads_per_device, layout.kv_heads_per_device
        tiles = TileKernels(model, own, neighbours, config.prefill, sizes, interpret)

    def divide(block_tables, seq_lens, query_start_loc, num_decodes, *, num_tokens, num_rows=None):
        check_contexts(block_tables, seq_lens, block_size)
        sequences = Sequences(seq_lens, query_start_loc, num_decodes, num_rows)
        rows = kernels.divide(sequences.rows, sequences.most_rows)
        if num_tokens is None:
            return tuple(AttentionWork(each, None) for each in rows)
        if tiles is not None:
            chunks = tiles.divide(sequences, num_tokens, block_tables.shape[1] * block_size)
        else:
            own = {"num_tokens": num_tokens, "block_size": block_size, "sizes": sizes}
            cut: Any = divide_tiles if neighbours is None else divide_gathered
            chunks = [cut(sequences, window=window, **own) for window in model.windows]
        each = zip(rows, chunks, strict=True)
        return tuple(AttentionWork(work, *of_chunks) for work, of_chunks in each)

    @jax.jit  # layers of a window share what is traced and lowered, once a step
    def attend(q, pool: LayerPool, metadata: AttentionMetadata, terms: LayerTerms):
        work, tables = metadata.work[terms.window], metadata.block_tables
        dtype, q = q.dtype, _by_head(q)
        out = of_rows(q, pool, tables, work.rows, terms)
        if work.tiles is not None and tiles is not None:
            attend = functools.partial(tiles.attend, pool=pool, metadata=metadata, terms=terms)
            num_rows = metadata.query_start_loc[metadata.num_decodes]
            out = filled(neighbours, attend, q, out, num_rows, of_all=terms.of_all)
        elif work.tiles is not None:
            own = model.windows[terms.window], terms.kv_scales, terms.sinks
            own = *own, sizes, model.frees_blocks, neighbours, model.values_in_keys
            options = LoopOptions(model.attention_scale, model.attention_soft_cap, *own)
            tables = terms.block_tables(pool, tables)
            loops = in_tiles if neighbours is None else in_gathered_tiles
            out = loops(q, out, pool, tables, work, options)
        return out.astype(dtype)

    @jax.jit
    def attend_rows(q, pool: LayerPool, block_tables, work, terms: LayerTerms):
        out = of_rows(_by_head(q), pool, block_tables, work[terms.window], terms)
        return out.astype(q.dtype)

    def of_rows(q, pool, block_tables, work: DecodeWork, terms: LayerTerms):
        (tokens, heads, _), count = q.shape, min(q.shape[0], work.row_length.shape[0])
        found = answered(
            neighbours,
            q[:count],
            lambda asked: kernels.states(asked, pool, block_tables, work, terms),
            sinks_by_row(terms.sinks, 1),
            of_all=terms.of_all,
        )
        out = normalised(*found).reshape(count, heads, -1)
        return jnp.pad(out.astype(q.dtype), ((0, tokens - count), (0, 0), (0, 0)))

    workers = workers_of(config.decode.num_blocks, kernels.groups)
    reads = LEAST_ROUNDS * config.decode.kv_tile * workers * layout.position_ways
    if config.decode.fixed_rounds is not None:
        reads = 0  # a prompt's tokens are always tiles: what a row gives differs in the last bits
    own = divide, kernels.divide, attend, attend_rows, jax.jit(pallas_write(interpret)), reads
    localise = None if neighbours is None else localise_by(neighbours, model.windows)
    if model.latent is not None:
        return AttentionBackend(OF_LATENTS, *own, localise)
    return AttentionBackend("pallas", *own, localise, enter=pallas_entry(interpret, pads=False))


def _by_head(q: Any) -> Float[Array, "tokens heads head_dim"]:
    """Return queries as neighbours gather them; those that a kernel has made have their type."""
    from pallas_kernels.queries import Queries, by_head

    return by_head(q, q.values.dtype) if isinstance(q, Queries) else q
