"""What becomes of the cached blocks of an engine's groups, for others to know where prefixes are.

An index that applies every batch in its order equals the hash indexes of the groups, but for
private blocks. No JAX.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shiftjax.core.blocks import BlockAllocator, CachedPrefix


class Stored(NamedTuple):
    """Blocks that are found from now on, each the child of the one before it."""

    hashes: list[bytes]
    parent: bytes | None  # of the first; None: that begins a sequence
    token_ids: list[int]  # of all of them
    block_size: int  # tokens of each


class Removed(NamedTuple):
    """Blocks that are found no more."""

    hashes: list[bytes]


class Cleared(NamedTuple):
    """No block of the group is found any more."""


CacheEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one group, in their order."""

    rank: int | None  # the number of the group; None: there is one
    events: Sequence[CacheEvent]


@dataclass(frozen=True, slots=True)
class Everything:
    """All that a group had, for an index that has nothing of it."""

    rank: int | None
    contents: list[CachedPrefix]
    block_size: int

    @property
    def events(self) -> Sequence[CacheEvent]:
        """Made when they are asked for: that takes too long for the thread of the engine.

        Each block comes after its parent, if that was still found.
        """
        log = _Log(self.block_size)
        by_hash = {each.block_hash: each for each in self.contents}
        told: set[bytes] = set()
        for contents in self.contents:
            chain: list[CachedPrefix] = []
            link: CachedPrefix | None = contents
            while link is not None and link.block_hash not in told:
                told.add(link.block_hash)
                chain.append(link)
                link = None if link.parent is None else by_hash.get(link.parent)
            for each in reversed(chain):
                log.stored(each)
        return log.events


class _Log:
    """Hears of the blocks of one group. What belongs together becomes one event."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.events: list[CacheEvent] = []
        self.was_cleared = False

    def stored(self, contents: CachedPrefix) -> None:
        last = self.events[-1] if self.events else None
        if isinstance(last, Stored) and last.hashes[-1] == contents.parent:
            last.hashes.append(contents.block_hash)
            last.token_ids.extend(contents.tokens)
            return
        hashes, tokens = [contents.block_hash], list(contents.tokens)
        self.events.append(Stored(hashes, contents.parent, tokens, self.block_size))

    def removed(self, block_hash: bytes) -> None:
        last = self.events[-1] if self.events else None
        if isinstance(last, Removed):
            last.hashes.append(block_hash)
        else:
            self.events.append(Removed([block_hash]))

    def cleared(self) -> None:
        self.events, self.was_cleared = [], True


class CacheFeed:
    """Collects what groups do to their prefix caches, on the thread of their engine.

    Some subscribers take a group's `Cleared` for that of all. So where one was cleared, or somebody
    has missed something (`tell_all`), all are: first every group is cleared, then all that they
    have is told again.
    """

    def __init__(self, groups: Sequence[BlockAllocator]):
        self._groups = groups
        self._ranks = range(len(groups)) if len(groups) > 1 else [None]
        self._logs = [_Log(blocks.block_size) for blocks in groups]
        for blocks, log in zip(groups, self._logs, strict=True):
            blocks.observer = log
        self._tells_all = True  # nobody knows anything yet

    def tell_all(self) -> None:
        """The next batches shall bring what there is, whatever was told before."""
        self._tells_all = True

    def take(self) -> tuple[list[Batch | Everything], bool]:
        """What has happened since the last time, and whether it tells all."""
        tells_all = self._tells_all or any(log.was_cleared for log in self._logs)
        self._tells_all = False
        batches = list(self._all() if tells_all else self._news())
        for log in self._logs:
            log.events, log.was_cleared = [], False
        return batches, tells_all

    def _news(self) -> Iterator[Batch]:
        for rank, log in zip(self._ranks, self._logs, strict=True):
            if log.events:
                yield Batch(rank, log.events)

    def _all(self) -> Iterator[Batch | Everything]:
        for rank in self._ranks:
            yield Batch(rank, [Cleared()])
        for rank, blocks in zip(self._ranks, self._groups, strict=True):
            if contents := blocks.shown():
                yield Everything(rank, contents, blocks.block_size)
