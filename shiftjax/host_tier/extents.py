"""The host tier: which KV blocks lie in host memory, within one budget of bytes. No JAX.

Blocks travel, and are kept and given up, as extents: the blocks of one copy. An extent is either

    pinned   sequences that were swapped out need it, or the plan that is being made restores it
    idle     found by hash only; the least recently used one goes first when bytes are needed

so used bytes are those of all extents; bytes are reserved for what will be swapped out.

Units are found: as many tokens as are hashed at a time, of which a block has some whole number, by
their chained hash and whatever the layout of their writer. Any group that hashes as many reads
them, though its blocks have more or fewer. When the step that came with its copy has ended well an
extent is proven, and found by other groups. Others are lost with the pools of their writer, because
a copy of a failed step may never have been made.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

from shiftjax.core.blocks import CachedPrefix, block_tokens
from shiftjax.core.tier import (
    MOST_AHEAD,
    Extent,
    Offload,
    Place,
    Restore,
    Tier,
    TierMoves,
    UnitRestore,
)
from shiftjax.host_tier.host_stats import HostStats

EXTENT_SIZES = (32, 8, 1)  # blocks of a copy; one of a size is one program, one transfer
MOST_IN_FLIGHT = 8  # copies on their way; each holds device memory for an extent until it is there
NULL_BLOCK = 0


@dataclass
class HostMemory:
    """The extents of all groups of an engine, `num_bytes` at most."""

    num_bytes: int
    num_used_bytes: int = 0
    num_idle_bytes: int = 0
    dropped: list[int] = field(default_factory=list)  # since the last plan
    given: list[int] = field(default_factory=list)  # what plans shall drop and have not yet
    extents: set[Extent] = field(default_factory=set)
    num_reserved_bytes: int = 0
    reservations: dict[Hashable, int] = field(default_factory=dict)  # bytes, by who will need them
    index: dict[tuple[int, bytes], Place] = field(default_factory=dict)
    leaves: Callable[[Extent], None] = lambda extent: None  # told of what has to go for others
    _idle: OrderedDict[Extent, None] = field(default_factory=OrderedDict)  # oldest use first
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def num_available_bytes(self) -> int:
        """What new extents could take, at the expense of all idle ones."""
        return self.num_bytes - self.num_held_bytes

    @property
    def num_held_bytes(self) -> int:
        """Bytes of extents that are needed, and those reserved."""
        return self.num_used_bytes - self.num_idle_bytes + self.num_reserved_bytes

    @property
    def idle(self) -> list[Extent]:
        """Extents that are found by hash only, the least recently used one first."""
        return list(self._idle)

    def reserve(self, owner: Hashable, num_bytes: int) -> bool:
        """Keep bytes free for one that has none reserved, until `cancel`; False if they are not."""
        if num_bytes > self.num_available_bytes:
            return False
        self.reservations[owner] = num_bytes
        self.num_reserved_bytes += num_bytes
        return True

    def cancel(self, owner: Hashable) -> None:
        """Keep nothing free for one any more; it need not have a reservation."""
        self.num_reserved_bytes -= self.reservations.pop(owner, 0)

    def add(self, writer: "HostBlocks", contents: Sequence[CachedPrefix | None]) -> Extent:
        """A new pinned extent; idle ones go until it fits. Check `num_available_bytes` first.

        Of two units with the same hash the first stays the one that is found.
        """
        num_bytes = len(contents) * writer.block_bytes
        units = list(chain.from_iterable(map(writer.units_of, contents)))
        extent = Extent(next(self._numbers), writer, [None] * len(units), num_bytes, num_pins=1)
        if extent.num_bytes > self.num_available_bytes:
            raise RuntimeError(f"{extent.num_bytes} bytes do not fit into the host tier.")
        while self.num_used_bytes + extent.num_bytes > self.num_bytes:
            oldest = next(iter(self._idle))
            self.leaves(oldest)
            self.drop(oldest)
        self.extents.add(extent)
        self.num_used_bytes += extent.num_bytes
        for number, content in enumerate(units):
            if content is not None:
                key = writer.hash_size, content.block_hash
                place = self.index.setdefault(key, Place(extent, number))
                if place == (extent, number):
                    extent.contents[number] = content
        return extent

    def pin(self, extent: Extent) -> None:
        """Keep an extent whatever else needs bytes."""
        if not extent.num_pins:
            del self._idle[extent]
            self.num_idle_bytes -= extent.num_bytes
        extent.num_pins += 1

    def unpin(self, extent: Extent) -> None:
        """Undo one `pin`; an extent that nobody needs and no hash finds is gone."""
        if extent not in self.extents:
            return  # dropped with its writer
        if not extent.num_pins:
            raise RuntimeError(f"Extent {extent.number} was unpinned more often than pinned.")
        extent.num_pins -= 1
        if extent.num_pins:
            return
        self._idle[extent] = None
        self.num_idle_bytes += extent.num_bytes
        if not any(extent.contents):
            self.drop(extent)

    def touch(self, extent: Extent) -> None:
        """An idle extent is the most recently used one now."""
        if not extent.num_pins:
            self._idle.move_to_end(extent)

    def drop(self, extent: Extent) -> None:
        """Forget an extent, whoever may need it."""
        if extent not in self.extents:
            return
        self.extents.remove(extent)
        self._forget(extent)
        self.num_used_bytes -= extent.num_bytes
        if not extent.num_pins:
            del self._idle[extent]
            self.num_idle_bytes -= extent.num_bytes
        self.dropped.append(extent.number)

    def clear_cache(self) -> None:
        """Nothing is found by hash any more; what is pinned stays for those who need it."""
        for extent in list(self.extents):
            self._forget(extent)
            if not extent.num_pins:
                self.drop(extent)

    def check(self) -> None:
        """The counts agree with the extents. Raises `RuntimeError` at the first breach."""
        idle = {extent for extent in self.extents if not extent.num_pins}
        used_bytes = sum(extent.num_bytes for extent in self.extents)
        counted = used_bytes, sum(extent.num_bytes for extent in idle)
        if counted != (self.num_used_bytes, self.num_idle_bytes) or used_bytes > self.num_bytes:
            known = f"{self.num_used_bytes} and {self.num_idle_bytes} of {self.num_bytes}"
            raise RuntimeError(f"The host tier uses and could drop {counted} bytes, not {known}.")
        reserved = sum(self.reservations.values())
        if reserved != self.num_reserved_bytes or self.num_available_bytes < 0:
            raise RuntimeError(f"The host tier cannot keep {reserved} bytes free.")
        if idle != self._idle.keys():
            raise RuntimeError("The host tier's idle extents are not those that nobody pins.")
        found = {
            (extent.writer.hash_size, content.block_hash): (extent, number)
            for extent in self.extents
            for number, content in enumerate(extent.contents)
            if content is not None
        }
        if found != self.index:
            raise RuntimeError("The host tier's index does not agree with its extents.")

    def _forget(self, extent: Extent) -> None:
        for number, content in enumerate(extent.contents):
            if content is not None:
                del self.index[extent.writer.hash_size, content.block_hash]
                extent.contents[number] = None


class HostBlocks(Tier):
    """What one group has of the host tier. Groups of equal `hash_size` find each other's blocks.

    `block_bytes` are those of a block on all devices of the group; prefixes are hashed every
    `hash_size` tokens (0: every block), a whole number of times a block. Copies are collected while
    a plan is made; `finish` hands them over.
    """

    def __init__(self, memory: HostMemory, block_size: int, block_bytes: int, hash_size: int = 0):
        self.memory, self.block_size, self.block_bytes = memory, block_size, block_bytes
        self.hash_size = hash_size or block_size
        self._several = block_size // self.hash_size  # units of a block
        self.num_offloaded_blocks = self.num_restored_blocks = 0
        self._offloads: list[tuple[Extent, list[int]]] = []
        self._restores: list[tuple[list[Extent], Restore | UnitRestore]] = []
        self._unproven: dict[int, Extent] = {}
        self.num_prefetches = self.num_prefetch_hits = 0  # extents
        self._ahead: set[int] = set()  # extents that the last plan has prefetched
        self._num_query_tokens = self._num_hit_tokens = 0

    keeps_evicted = True

    @property
    def has_prefixes(self) -> bool:
        """Return whether any group has left something that is found by its hash."""
        return bool(self.memory.index)

    def reserve(self, owner: Hashable, num_blocks: int) -> bool:
        """Keep room for blocks of a sequence until it is swapped out, if there is."""
        return self.memory.reserve(owner, num_blocks * self.block_bytes)

    def could_reserve(self, num_blocks: int) -> bool:
        """Return whether the host would have room for so many blocks if it were empty."""
        return num_blocks * self.block_bytes <= self.memory.num_bytes

    def cancel(self, owner: Hashable) -> None:
        """Keep no room for a sequence."""
        self.memory.cancel(owner)

    def match(
        self, hashes: Sequence[bytes], token_ids: list[int], start: int, limit: int
    ) -> list[Place]:
        """Where the units of blocks `start`, `start + 1` ... are, `limit` blocks at most in all.

        The tokens are compared as well, so that a collision of hashes is a miss.
        """
        places: list[Place] = []
        for number in range(start * self._several, min(limit * self._several, len(hashes))):
            tokens = block_tokens(token_ids, number, self.hash_size)
            place = self.find(hashes[number], tokens)
            if place is None:
                break
            places.append(place)
        del places[len(places) - len(places) % self._several :]
        self._num_query_tokens += len(token_ids) - start * self.block_size
        self._num_hit_tokens += len(places) * self.hash_size
        return places

    def find(self, block_hash: bytes, tokens: list[int]) -> Place | None:
        """Where the unit with this hash and these tokens is, if this group may read it."""
        place = self.memory.index.get((self.hash_size, block_hash))
        if place is None:
            return None
        content = place.extent.contents[place.unit]
        if content is None or content.tokens != tokens or not self._may_read(place.extent):
            return None
        return place

    def knows(self, block_hash: bytes) -> bool:
        """Whether a block is in the index; may be too hopeful."""
        return (self.hash_size, block_hash) in self.memory.index

    def extents_of(self, hashes: Iterable[bytes]) -> list[Extent]:
        """The extents of the units that come first, until one is missing; may be too hopeful.

        What other groups' sizes of blocks make of an extent is put together at its restore.
        """
        extents: dict[Extent, None] = {}
        for block_hash in hashes:
            place = self.memory.index.get((self.hash_size, block_hash))
            if place is None or not self._may_read(place.extent):
                break
            if self._is_alike(place.extent):
                extents[place.extent] = None
            if len(extents) == MOST_AHEAD:
                break
        return list(extents)

    def swap_out(
        self, blocks: Sequence[int], contents: Sequence[CachedPrefix | None]
    ) -> list[Place] | None:
        """Offload what a sequence has computed, pinned until `release`; None if there is no room.

        `contents` are what hashes lead to the blocks. A beginning that others have swapped out is
        shared with them.
        """
        shared = self._pinned_beginning(contents)
        num_shared = len(shared) // self._several
        blocks, contents = blocks[num_shared:], contents[num_shared:]
        if len(blocks) * self.block_bytes > self.memory.num_available_bytes:
            return None
        for extent in {place.extent: None for place in shared}:
            self.memory.pin(extent)
        extents = self._offload(blocks, contents)
        return shared + [
            Place(extent, unit) for extent in extents for unit in range(len(extent.contents))
        ]

    def units_of(self, content: CachedPrefix | None) -> list[CachedPrefix | None]:
        """Return what the units of a block with these contents are found by; None: by nothing."""
        if content is None:
            return [None] * self._several
        hashes = content.unit_hashes
        if len(hashes) != self._several:
            raise ValueError(f"A block of {self._several} units has {len(hashes)} hashes.")
        return [
            CachedPrefix(each, block_tokens(content.tokens, number, self.hash_size))
            for number, each in enumerate(hashes)
        ]

    def _pinned_beginning(self, contents: Sequence[CachedPrefix | None]) -> list[Place]:
        """Where the units of the first blocks are, as far as others keep them there anyway."""
        places: list[Place] = []
        for unit in chain.from_iterable(map(self.units_of, contents)):
            place = unit and self.memory.index.get((self.hash_size, unit.block_hash))
            if not unit or not place or not place.extent.num_pins:
                break
            if place.extent.contents[place.unit] != unit or not self._may_read(place.extent):
                break
            places.append(place)
        return places[: len(places) - len(places) % self._several]

    def _may_read(self, extent: Extent) -> bool:
        """Whether the copy was made, or is made before any that this group makes."""
        return extent.is_proven or extent.writer is self

    def _is_alike(self, extent: Extent) -> bool:
        """Whether its blocks have as many tokens as those of this group."""
        writer = extent.writer
        return isinstance(writer, HostBlocks) and writer.block_size == self.block_size

    def save(self, evicted: Sequence[tuple[int, CachedPrefix]]) -> None:
        """Offload blocks that the device's prefix cache gives up, in the order in which it does.

        Where not all fit the first are lost: the tails of prefixes, see `BlockAllocator.release`.
        """
        index, new = self.memory.index, []
        for block, content in evicted:
            places = [index.get((self.hash_size, each)) for each in content.unit_hashes]
            for place in places:
                if place is not None:
                    self.memory.touch(place.extent)
            if None in places:
                new.append((block, content))
        room = self.memory.num_available_bytes // self.block_bytes
        new = new[max(0, len(new) - room) :]
        for extent in self._offload([block for block, _ in new], [content for _, content in new]):
            self.memory.unpin(extent)

    def restore(self, places: Sequence[Place], blocks: Sequence[int]) -> None:
        """Copy units on the host to device blocks; their extents stay until the plan is made.

        A block whose units lie as in a block of an extent is copied as it is, with its neighbours.
        Others are put together of units.
        """
        several = self._several
        together: list[tuple[int, list[Place]]] = []
        last, targets = None, list[int]()  # the extent that blocks come from, and where they go
        for number, block in enumerate(blocks):
            units = list(places[number * several : (number + 1) * several])
            extent, first = units[0]
            if not self._is_alike(extent) or not is_whole(units, several):
                together.append((block, units))
                last = None
                continue
            self._restore_together(together)
            if extent is not last:
                self.memory.pin(extent)
                last, targets = extent, [NULL_BLOCK] * (len(extent.contents) // several)
                self._restores.append(([extent], Restore(extent.number, targets)))
            targets[first // several] = block
        self._restore_together(together)
        self.num_restored_blocks += len(blocks)

    def _restore_together(self, parts: list[tuple[int, list[Place]]]) -> None:
        """Restore blocks that are put together of units, and empty the list of them."""
        for size in extent_sizes(len(parts)):
            some, parts[:size] = parts[:size], []
            places = [place for _, units in some for place in units]
            extents = list({place.extent: None for place in places})
            for extent in extents:
                self.memory.pin(extent)
            units = [(place.extent.number, place.unit) for place in places]
            blocks = [block for block, _ in some]
            self._restores.append((extents, UnitRestore(units, blocks, self.hash_size)))

    def release(self, places: Iterable[Place]) -> None:
        """A sequence needs what it has swapped out no more."""
        for extent in {place.extent: None for place in places}:
            self.memory.unpin(extent)

    def finish(self, *, is_planned: bool, wanted: Iterable[Extent] = ()) -> TierMoves:
        """The copies of the plan. If there is none, no copy will be made: new extents are gone.

        The extents `wanted` by sequences that come next are prefetched, the first `MOST_AHEAD`.
        """
        memory = self.memory
        if is_planned:  # what this plan restores goes with a later one at the earliest
            memory.given, memory.dropped = memory.given + memory.dropped, []
        for extents, _ in reversed(self._restores):  # so that a beginning outlives what follows it
            for extent in reversed(extents):
                memory.unpin(extent)
        offloads, restores = self._offloads, self._restores
        self._offloads, self._restores = [], []
        if not is_planned:
            for extent, _ in offloads:
                memory.drop(extent)
            return TierMoves([], [], [], [], [])
        self._unproven |= {extent.number: extent for extent, _ in offloads}
        self.num_offloaded_blocks += sum(len(blocks) for _, blocks in offloads)
        whole = [each for _, each in restores if isinstance(each, Restore)]
        self.num_prefetch_hits += len({each.extent for each in whole} & self._ahead)
        return TierMoves(
            memory.given,
            [Offload(extent.number, blocks) for extent, blocks in offloads],
            whole,
            self._prefetch(wanted),
            [each for _, each in restores if isinstance(each, UnitRestore)],
        )

    def _prefetch(self, wanted: Iterable[Extent]) -> list[int]:
        extents = self.memory.extents
        alike = (each for each in wanted if each in extents and self._is_alike(each))
        here = dict.fromkeys(each.number for each in alike)
        prefetches = list(here)[:MOST_AHEAD]
        self.num_prefetches += len(set(prefetches) - self._ahead)
        self._ahead = set(prefetches)
        return prefetches

    def prove(self, offloads: Iterable[Offload]) -> None:
        """The step of a plan with these copies has ended."""
        for number, _ in offloads:
            self._unproven.pop(number).is_proven = True

    @property
    def is_offloading(self) -> bool:
        """Whether there are copies for the plan that is made."""
        return bool(self._offloads)

    def holds(self, places: Iterable[Place]) -> bool:
        """Whether all of this is there still."""
        return all(place.extent in self.memory.extents for place in places)

    def reset(self, suspects: Collection[int] = ()) -> None:
        """The group's pools are lost, and extents of its that are not proven: were they written?

        So are `suspects`, the numbers of those that a failed step has read.
        """
        for extents, _ in self._restores:
            for extent in extents:
                self.memory.unpin(extent)
        for extent in list(self.memory.extents):
            is_written = extent.is_proven or extent.writer is not self
            if not is_written or extent.number in suspects:
                self.memory.drop(extent)
        self._offloads, self._restores = [], []
        self._unproven.clear()
        self._ahead.clear()

    def clear_cache(self) -> None:
        """Find nothing by its hash any more, in any group."""
        self.memory.clear_cache()

    def check(self) -> None:
        """Check conservation of bytes. Raises RuntimeError at the first breach."""
        self.memory.check()

    def states(self) -> Iterator[HostStats]:
        """Return what this group has done, and the bytes of all."""
        yield HostStats(
            num_query_tokens=self._num_query_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_offloaded_bytes=self.num_offloaded_blocks * self.block_bytes,
            num_restored_bytes=self.num_restored_blocks * self.block_bytes,
            num_used_bytes=self.memory.num_used_bytes,
            num_bytes=self.memory.num_bytes,
            num_prefetches=self.num_prefetches,
            num_prefetch_hits=self.num_prefetch_hits,
        )

    def _offload(
        self, blocks: Sequence[int], contents: Sequence[CachedPrefix | None]
    ) -> list[Extent]:
        """Extents of these blocks, each pinned once."""
        extents, start = [], 0
        for size in extent_sizes(len(blocks)):
            extent = self.memory.add(self, contents[start : start + size])
            self._offloads.append((extent, list(blocks[start : start + size])))
            extents.append(extent)
            start += size
        return extents


def is_whole(units: Sequence[Place], several: int) -> bool:
    """Return whether units are all that one block of an extent has, in their order."""
    extent, first = units[0]
    return (
        first % several == 0
        and len(units) == several
        and all(each == (extent, first + number) for number, each in enumerate(units))
    )


def extent_sizes(num_blocks: int) -> Iterator[int]:
    """The sizes of the fewest extents that hold exactly so many blocks."""
    for size in EXTENT_SIZES:
        while num_blocks >= size:
            yield size
            num_blocks -= size
