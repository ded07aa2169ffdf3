"""What an implementation of attention is: a row of the table in `attention_backend`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.rows import Rows
from shiftjax.models.attention import AttentionMetadata, LayerPool, LayerTerms
from shiftjax.models.entry_backend import Entry
from shiftjax.models.products import Codes


class AttentionBackend(NamedTuple):
    """One implementation; scale, windows, block size and the like are bound in its functions.

    Work is divided for each of the model's windows (`ModelConfig.windows`), a tuple in their order,
    and a layer takes that of its own: `LayerTerms.window`.
    """

    name: str
    # (block_tables, seq_lens, query_start_loc, num_decodes, num_tokens, num_rows)
    # -> AttentionMetadata.work: on the host, once a step; num_tokens is None in a bucket whose
    # tokens are all rows, if there is a `most_row_reads`
    divide: Callable[..., tuple[Any, ...]]
    # (rows, num_rows) -> the work of `attend_rows`: on the host, for layers that compute rows only
    divide_rows: Callable[[Rows, int], tuple[Any, ...]]
    # (q, pool, metadata, terms) -> out: numbers as q, or codes where the terms allow such
    attend: Callable[[jax.Array, LayerPool, AttentionMetadata, LayerTerms], jax.Array | Codes]
    # (q, pool, block_tables, work, terms) -> out; q[i] is row i
    attend_rows: Callable[[jax.Array, LayerPool, jax.Array, Any, LayerTerms], jax.Array | Codes]
    # (pool, k, v, slot_mapping, terms) -> the written pool
    write: Callable[..., LayerPool]
    # of context tokens, by the tokens of chunks in a bucket whose tokens are all rows; None: the
    # same work in all buckets
    most_row_reads: int | None = None
    # (inputs of a step) -> what of them is this device's, where devices split positions; None: all
    localise: Callable[[Any], Any] | None = None
    reason: str = ""  # why this one was chosen, in words that may leave the process
    # one launch from the product with q, k and v on, in the place of `write` and of what comes
    # before it; None: there is none
    enter: Entry | None = None
