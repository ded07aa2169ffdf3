"""Whether a sequence waits for what is on the disk: only where that takes less than computing it.

Both are predicted from what has been measured: bytes a second of reads, prompt tokens a second of
steps. No JAX.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shiftjax.disk_tier.chunk_index import Chunk, Key
from shiftjax.disk_tier.disk import Disk, Reader

FIRST_BANDWIDTH = 1e9  # bytes a second that a disk is taken to read, until one has
FIRST_PATIENCE = 2.0  # seconds that a read is waited for, until a prompt has been computed
_KEPT = 0.9  # of what earlier measurements count, after one more


@dataclass
class Rate:
    """A quotient of two sums in which old measurements count less."""

    amount: float = 0.0
    seconds: float = 0.0

    def learn(self, amount: float, seconds: float) -> None:
        """Count one more measurement."""
        self.amount = amount + _KEPT * self.amount
        self.seconds = seconds + _KEPT * self.seconds

    def seconds_of(self, amount: float) -> float | None:
        """Return how long so much takes; None: nothing has been measured."""
        return amount * self.seconds / self.amount if self.amount else None


class _Wait(NamedTuple):
    chunks: Sequence[Chunk]
    until: float  # seconds of the clock


class Waits:
    """Who waits for which chunks, of all groups."""

    def __init__(self, disk: Disk, clock: Callable[[], float] = time.monotonic):
        self.prompts, self.reads = Rate(), Rate()  # tokens, bytes
        self._disk, self._clock = disk, clock
        self._waits: dict[Hashable, _Wait] = {}
        disk.watch = self.reads.learn

    def begin(self, owner: Hashable, keys: Sequence[Key], reader: Reader, most_units: int) -> bool:
        """Return whether one waits for chunks that have some of these units, the first ones.

        Decided once, until `forget`. Reads begin of at most `most_units` at a time, and are waited
        for as long as computing takes, at most: so a slow disk costs twice that and no more.
        """
        self._waits[owner] = self._decide(keys, reader, most_units)
        return bool(self.go_on(owner))

    def go_on(self, owner: Hashable) -> bool | None:
        """Return whether one waits still; None: nothing has been decided."""
        wait = self._waits.get(owner)
        if wait is None:
            return None
        return any(chunk.is_read for chunk in wait.chunks) and self._clock() < wait.until

    def forget(self, owner: Hashable) -> None:
        """Called when one has begun, or ended."""
        self._waits.pop(owner, None)

    def _decide(self, keys: Sequence[Key], reader: Reader, most_units: int) -> _Wait:
        chunks: dict[Chunk, None] = {}
        num_bytes, num_tokens = self._disk.num_unread_bytes, 0
        num_units = self._disk.num_unread_units
        for key in keys:
            chunk = self._disk.index.get(key)
            if chunk is None:
                continue
            if chunk not in chunks and not chunk.is_read:
                if num_units + len(chunk.keys) > most_units:
                    break
                num_units += len(chunk.keys)
                num_bytes += chunk.num_bytes
            chunks[chunk] = None
            num_tokens += key[0]
        stats = self._disk.stats
        stats.num_query_tokens += num_tokens
        seconds = self.reads.seconds_of(num_bytes)
        seconds = num_bytes / FIRST_BANDWIDTH if seconds is None else seconds
        computing = self.prompts.seconds_of(num_tokens)
        if computing is not None and seconds >= computing:
            stats.num_slow_tokens += num_tokens
            return _Wait((), 0.0)
        for chunk in chunks:
            self._disk.read(chunk, reader)
        patience = FIRST_PATIENCE if computing is None else computing
        return _Wait(tuple(chunks), self._clock() + patience)
