"""Chunks of prompts as kernels on devices that split positions: tiles over pages of contexts.

Neighbours gather contexts once a layer, in rounds (`gathered_tiles.py`), and the prefill kernel
reads their pages by a table, as it reads a pool. A round has a part of the contexts: jobs are cut
to it, and what they find is put together with that of other rounds.

Jobs end at spans of 128 tokens, and so do rounds, since contexts are gathered as whole spans. What
is the nth of all contexts lies at n modulo the buffer's length, so that one table serves all rounds
and layers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.prefill_split import SPAN
from pallas_kernels.prefill_work import Job, PrefillConfig, PrefillWork, divide_prefill
from pallas_kernels.rows import Sequences
from shiftjax.arch.config import ModelConfig
from shiftjax.models.attention import (
    AttentionMetadata,
    AttentionWork,
    LayerPool,
    LayerTerms,
    empty_state,
    take,
)
from shiftjax.models.attention_work import GatheredWork, LoopSizes, gathered_of
from shiftjax.models.entry_backend import kv_scales
from shiftjax.models.gathered_tiles import Gathering, Rounds, gather_pages, rounds_of
from shiftjax.models.softmaxes import State, both, normalised, of_normalised, sinks_by_row
from shiftjax.parallel.positions import span_blocks


class TileKernels(NamedTuple):
    """The prefill kernel over what neighbours gather."""

    model: ModelConfig
    heads: tuple[int, int]  # of queries, of keys and values: of one device
    neighbours: Gathering
    config: PrefillConfig
    sizes: LoopSizes
    interpret: Any = False

    @property
    def unit(self) -> int:
        """Blocks of the tables that are whole spans."""
        return span_blocks(self.neighbours.positions.stripe)

    def divide(
        self, sequences: Sequences, num_tokens: int, max_context: int
    ) -> tuple[tuple[PrefillWork, GatheredWork], ...]:
        """Divide the chunks of a step, for each window; `num_tokens` is the bucket's."""
        sizes = {"num_tokens": num_tokens, "heads": self.heads, "max_context": max_context}
        stripe, found = self.neighbours.positions.stripe, []
        for window in self.model.windows:
            jobs = divide_prefill(sequences, window=window, config=self.config, **sizes)
            found.append((jobs, gathered_of(sequences, stripe, window, self.unit)))
        return tuple(found)

    def attend(
        self,
        q: Float[Array, "tokens heads head_dim"],
        out: Float[Array, "tokens heads head_dim"],
        pool: LayerPool,
        metadata: AttentionMetadata,
        terms: LayerTerms,
    ) -> Float[Array, "tokens heads head_dim"]:
        """Return `out`, which has the decode rows, with all others filled in."""
        state = self.states(q, pool, metadata, terms)
        found = normalised(state, sinks_by_row(terms.sinks, 1)).reshape(out.shape)
        num_rows = metadata.query_start_loc[metadata.num_decodes]
        is_row = jnp.arange(len(out), dtype=jnp.int32) < num_rows
        return jnp.where(is_row[:, None, None], out, found.astype(out.dtype))

    def states(
        self,
        q: Float[Array, "tokens heads head_dim"],
        pool: LayerPool,
        metadata: AttentionMetadata,
        terms: LayerTerms,
    ) -> State:
        """Return the softmaxes of all tokens but decode rows, which have anything."""
        work: AttentionWork = metadata.work[terms.window]
        gathered, tables = work.gathered, terms.block_tables(pool, metadata.block_tables)
        assert gathered is not None
        rounds = rounds_of(tables, self.neighbours, self.sizes, self.unit)
        of_pages = page_tables(gathered, rounds, tables.shape[1])

        def attend(first: Int32[Array, ""]) -> State:
            pages = gather_pages(pool, tables, gathered, first, rounds)
            jobs = jobs_of_round(work.tiles.jobs, gathered, first, rounds)
            return self.parts(
                q,
                (*pages, of_pages, metadata.seq_lens),
                work.tiles._replace(jobs=jobs),
                terms,
            )

        if rounds.are_one:
            return attend(jnp.int32(0))
        empty = empty_state(q, len(q), 1, q.shape[1], q.shape[2])

        def run_round(n: Int32[Array, ""], found: State) -> State:
            return both(found, attend(n * rounds.blocks))

        return lax.fori_loop(0, rounds.num_for(gathered), run_round, empty)

    def parts(
        self,
        q: Float[Array, "tokens heads head_dim"],
        kv: tuple[jax.Array, ...],
        work: PrefillWork,
        terms: LayerTerms,
    ) -> State:
        """Return what jobs find; `kv` are the fields of a `PagedKV`."""
        from pallas_kernels.call import AttentionOptions, PagedKV
        from pallas_kernels.prefill import prefill_parts

        model = self.model
        scores = model.attention_scale, model.windows[terms.window], model.attention_soft_cap
        options = AttentionOptions(*scores, kv_scales(terms), interpret=self.interpret)
        values, lse = prefill_parts(q, PagedKV(*kv), work, options, self.config)
        return of_normalised(values[:, None].astype(jnp.float32), lse.T[:, None])


def page_tables(
    work: GatheredWork, rounds: Rounds, blocks_per_seq: int
) -> Int32[Array, "seqs pages_per_seq"]:
    """Return where the pages of each context are in the buffer, in the round that has them."""
    ways = rounds.neighbours.positions.ways
    first = ways * (work.seq_begin - work.seq_first)[:, None]
    nth = first + jnp.arange(ways * blocks_per_seq, dtype=jnp.int32)[None]
    return rounds.page_of(nth % (ways * rounds.blocks))


def jobs_of_round(
    jobs: Int32[Array, "jobs 7"], work: GatheredWork, first: Int32[Array, ""], rounds: Rounds
) -> Int32[Array, "jobs 7"]:
    """Return the jobs of a step, cut to what the buffer has from block `first` of all contexts on.

    Those of which it has nothing see nothing.
    """
    nth, stripe = Job(*range(len(Job._fields))), rounds.neighbours.positions.stripe
    seq, begin, end = jobs[:, nth.seq], jobs[:, nth.first], jobs[:, nth.last]
    block = first - take(work.seq_begin, seq) + take(work.seq_first, seq)  # of a context's table
    low = lax.div(block * stripe, jnp.int32(SPAN))  # whole spans, so that nothing is left
    begin = jnp.maximum(begin, low)
    end = jnp.clip(end, begin, jnp.maximum(begin, low + rounds.blocks * stripe // SPAN))
    return jobs.at[:, nth.first].set(begin).at[:, nth.last].set(end)
