"""Admission where requests have adapters: they wait until a slot holds theirs. No JAX."""

from typing import Literal

from shiftjax.adapters.pool import AdapterPool
from shiftjax.core.admission import Admission
from shiftjax.core.block_tables import BlockTables
from shiftjax.core.request import SequenceState


class WithAdapters(Admission):
    """Passes over sequences whose adapter is in no slot."""

    def __init__(self, pool: AdapterPool):
        self._pool = pool

    def verdict(
        self, sequence: SequenceState, tables: BlockTables
    ) -> Literal["admit", "skip", "park"]:
        """Return `skip` while an adapter is on its way, or waits for a slot."""
        key = sequence.request.adapter
        return "admit" if key is None or self._pool.acquire(key) else "skip"
