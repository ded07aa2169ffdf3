"""Admission where requests have adapters: they wait until a slot holds theirs. No JAX."""

from collections.abc import Collection, Iterable
from typing import Literal

from shiftjax.adapters.pool import AdapterPool
from shiftjax.core.admission import Admission
from shiftjax.core.block_tables import BlockTables
from shiftjax.core.request import SequenceState

MOST_APART = 1024  # sequences that each turn asks about; others wait before all lanes


class WithAdapters(Admission):
    """Passes over sequences whose adapter is in no slot; a lane may have many of them."""

    def __init__(self, pool: AdapterPool):
        self._pool = pool

    def leaving(self, sequences: Iterable[SequenceState]) -> Collection[SequenceState]:
        """Return none: a turn begins."""
        self._pool.begin_turn()
        self.apart = 0, 0
        return ()

    def verdict(
        self, sequence: SequenceState, tables: BlockTables
    ) -> Literal["admit", "skip", "park"]:
        """Return `skip` while an adapter is on its way, or waits for a slot."""
        key = sequence.request.adapter
        if key is None or self._pool.acquire(key):
            return "admit"
        if self.apart[0] < MOST_APART:
            self.apart = self.apart[0] + 1, self.apart[1] + sequence.num_prompt_tokens
        return "skip"
