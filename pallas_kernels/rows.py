"""Decode rows: the tokens of a step that attend one by one, each with a context of its own. No JAX.

A decode is one row. So is every drafted token, and every token whose logits are wanted: the rows of
a sequence share its block table and differ in how much of the context they see.

sequence    0    1    1    1    2        3 rows of sequence 1, which has a context of 9 tokens
length      5    7    8    9    4        with the row's own token
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32


class Rows(NamedTuple):
    """The decode rows of a step, as NumPy arrays without padding; row i asks with query i."""

    seq: Int32[Any, " rows"]  # whose block table it reads
    length: Int32[Any, " rows"]  # the context that it sees: the position of its token, plus one
    # The first token of it that it sees, where the layer's window does not say: where a pool has
    # some of a sequence's tokens only, and lengths are of those.
    low: Int32[Any, " rows"] | None = None


class Sequences(NamedTuple):
    """The sequences of a step, padded to its bucket; those whose tokens are decode rows first."""

    lens: Int32[Any, " seqs"]  # of the context, with the new tokens
    starts: Int32[Any, " seqs_plus_1"]  # first token of each
    num_decodes: int
    num_rows: int | None = None  # that the bucket has at most; None: as many as sequences

    @property
    def rows(self) -> Rows:
        """The tokens of the first `num_decodes`."""
        return rows_of(self.lens, self.starts, self.num_decodes)

    @property
    def most_rows(self) -> int:
        """Decode rows that a step of the bucket has at most."""
        return self.num_rows or len(self.lens)


def rows_of(
    seq_lens: Int32[np.ndarray, " seqs"],
    query_start_loc: Int32[np.ndarray, " seqs_plus_1"],
    num_seqs: int,
) -> Rows:
    """Return the tokens of the first `num_seqs` sequences, given the padded arrays of a step."""
    lens = np.diff(query_start_loc[: num_seqs + 1])
    seq = np.repeat(np.arange(num_seqs, dtype=np.int32), lens)
    after = query_start_loc[1:][seq] - np.arange(len(seq), dtype=np.int32)
    return Rows(seq, seq_lens[seq] + 1 - after)
