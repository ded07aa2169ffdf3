"""Cached blocks that requests have asked to keep for a time, within a bound. No JAX.

    free --> cached (least recently used first) --> kept (the one that expires first)

are given away in this order, all before a running sequence is preempted. So what is kept makes
others' prefixes go sooner, by at most `most_kept` blocks, and costs no request its room.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shiftjax.core.blocks import BlockAllocator
from shiftjax.metric import Metric, counter, gauge

LONGEST_KEEP = 3600.0  # seconds
MOST_GONE = 1024  # entries of the heap
SHARE_OF_ONE = 0.5  # of what may be kept, for one request


@dataclass(frozen=True)
class CacheHints:
    """What a client knows of the prefix of a request; it never changes an output.

    keep_seconds: how long the KV of prompt and output is of use, after the end.
    session: who asks; others' hints do not release what it keeps.
    releases: it is of no use after the end: what this session keeps of it, and what this request
        has computed alone.
    is_alone: nothing is generated; the prefix is released, or fetched from where it is far away.
    """

    keep_seconds: float = 0.0
    session: str | None = None
    releases: bool = False
    is_alone: bool = False


NO_HINTS = CacheHints()


@dataclass(frozen=True)
class KeptStats:
    """Blocks that are kept, and may be; of all groups."""

    num_kept: int
    most_kept: int
    num_refused: int  # blocks that were to be kept, beyond the bound

    def __add__(self, other: "KeptStats") -> "KeptStats":
        """Return those of two groups together."""
        return KeptStats(
            self.num_kept + other.num_kept,
            self.most_kept + other.most_kept,
            self.num_refused + other.num_refused,
        )


class _Keep(NamedTuple):
    until: float
    session: str | None


class _Turn(NamedTuple):
    until: float
    number: int  # of two that expire together, the end of a prefix has the lower one


class KeptBlocks(BlockAllocator):
    """An allocator some of whose cached blocks wait for who has asked for them."""

    def __init__(self, num_blocks: int, block_size: int, share: float):
        self.most_kept = int(share * (num_blocks - 1))
        self._now, self._num_refused = 0.0, 0
        super().__init__(num_blocks, block_size)

    def reset(self) -> None:
        """Forget every table and every cached block: the pool's contents are gone."""
        self._keeps: dict[int, _Keep] = {}  # of blocks with contents, used ones too
        self._kept: dict[int, _Turn] = {}  # of them, those that no table holds
        self._order: list[tuple[_Turn, int]] = []  # a heap of these, with some that are gone
        self._num_turns = 0
        super().reset()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached and kept ones included."""
        return super().num_free_blocks + len(self._kept)

    @property
    def revivable(self) -> Collection[int]:
        """Blocks that no table holds and whose contents can be found: the first to go first."""
        return [*self._cached, *sorted(self._kept, key=self._kept.__getitem__)]

    @property
    def next_evicted(self) -> int | None:
        """The block that the next `allocate` takes what is cached from; None: one is free."""
        if self._free:
            return None
        return next(iter(self._cached)) if self._cached else self._soonest()

    def allocate(self) -> int:
        """One block, referenced once. Check `num_free_blocks` first: none left is an error."""
        if not (self._free or self._cached) and (block := self._soonest()) is not None:
            self._forget_keep(block)
        return super().allocate()

    def retain(self, blocks: Iterable[int]) -> None:
        """One more table holds these blocks, each cached or used."""
        blocks = list(blocks)
        if self._kept:
            for block in blocks:
                if self._kept.pop(block, None) is not None:
                    self._cached[block] = None
        super().retain(blocks)

    def keep(self, blocks: Sequence[int], seconds: float, session: str | None) -> None:
        """Keep the blocks of a prefix for so long; none of them shorter than before."""
        until = self._now + min(seconds, LONGEST_KEEP)
        room = min(self.most_kept - len(self._keeps), int(SHARE_OF_ONE * self.most_kept))
        new = [place for place, block in enumerate(blocks) if block not in self._keeps]
        end = new[room] if len(new) > room else len(blocks)
        self._num_refused += len(blocks) - end
        for block in reversed(blocks[:end]):
            held = self._keeps.get(block)
            if held is None or held.until < until:
                self._keeps[block] = _Keep(until, session)
                if not self._ref_counts[block]:
                    self._cached.pop(block, None)
                    self._hold(block, until)

    def discard(self, blocks: Sequence[int], session: str | None, num_found: int) -> None:
        """Keep these blocks no more that `session` does, and free those from `num_found` on.

        What others hold, or keep, stays.
        """
        for place, block in enumerate(blocks):
            keep = self._keeps.get(block)
            is_own = keep is not None and session is not None and keep.session == session
            if is_own:
                self._forget_keep(block)
            elif keep is not None:
                continue
            if block in self._cached and (is_own or place >= num_found):
                del self._cached[block]
                self._forget(block)
                self._free.append(block)

    def expire(self, now: float) -> None:
        """Keep nothing whose time has passed: it is cached like others, and used just now."""
        self._now = now
        while self._order and self._order[0][0].until <= now:
            turn, block = heapq.heappop(self._order)
            if self._kept.get(block) == turn:
                self._forget_keep(block)

    def clear_cache(self) -> None:
        """Empty the prefix cache; tables keep their blocks."""
        for block in self._kept:
            self._cached[block] = None
        self._kept.clear()
        self._keeps.clear()
        self._order.clear()
        super().clear_cache()

    def states(self) -> Iterator[Any]:
        """Return how much is kept."""
        yield KeptStats(len(self._keeps), self.most_kept, self._num_refused)

    def check(self, tables: Any) -> None:
        """See `BlockAllocator.check`; what is kept can be found, and is no more than may be."""
        super().check(tables)
        kept = {block for block in self._keeps if not self._ref_counts[block]}
        if kept != self._kept.keys() or len(self._keeps) > self.most_kept:
            raise RuntimeError(f"{len(self._keeps)} blocks are kept of {self.most_kept}: wrong.")
        if any(self._contents[block] is None for block in self._keeps):
            raise RuntimeError("A block is kept that nobody can find.")

    def _return(self, block: int) -> None:
        keep = self._keeps.get(block)
        if keep is not None and keep.until > self._now:
            self._hold(block, keep.until)
            return
        self._keeps.pop(block, None)
        super()._return(block)

    def _forget(self, block: int) -> None:
        self._keeps.pop(block, None)
        super()._forget(block)

    def _hold(self, block: int, until: float) -> None:
        self._num_turns += 1
        self._kept[block] = turn = _Turn(until, self._num_turns)
        heapq.heappush(self._order, (turn, block))
        if len(self._order) > 2 * len(self._kept) + MOST_GONE:
            self._order = [(turn, block) for block, turn in self._kept.items()]
            heapq.heapify(self._order)

    def _soonest(self) -> int | None:
        while self._order:
            turn, block = self._order[0]
            if self._kept.get(block) == turn:
                return block
            heapq.heappop(self._order)
        return None

    def _forget_keep(self, block: int) -> None:
        """A block is cached like others from now on, the most recently used one."""
        del self._keeps[block]
        if self._kept.pop(block, None) is not None:
            self._cached[block] = None


def metrics(kept: KeptStats | None) -> Iterator[Metric]:
    """Blocks kept for later requests; nothing where none may be."""
    if kept is None:
        return
    yield gauge("prefix_cache_kept_blocks", "KV blocks kept by hints.", kept.num_kept)
    yield gauge("prefix_cache_most_kept_blocks", "As many as may be.", kept.most_kept)
    text = "KV blocks that hints would have kept beyond that."
    yield counter("prefix_cache_refused_keeps", text, kept.num_refused)
