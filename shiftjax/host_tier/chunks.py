"""The host tier: which KV blocks lie in host memory, within one budget of bytes. No JAX.

Blocks travel, and are kept and given up, as chunks: the blocks of one copy. A chunk is either

    pinned   sequences that were swapped out need it, or the plan that is being made restores it
    idle     found by hash only; the least recently used one goes first when bytes are needed

so used bytes are those of all chunks; bytes are reserved for what will be swapped out. A block is
found by how many tokens it has and their chained hash, whatever the layout of its writer: any group
whose blocks have as many reads it. When the step that came with its copy has ended well a chunk is
proven, and found by other groups. Others are lost with the pools of their writer, because a copy of
a failed step may never have been made.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby

from shiftjax.core.blocks import CachedPrefix, block_tokens
from shiftjax.core.tier import MOST_AHEAD, Chunk, Offload, Place, Restore, Tier, TierMoves
from shiftjax.host_tier.stats import HostStats

CHUNK_SIZES = (32, 8, 1)  # blocks of a copy; one of a size is one program, one transfer
MOST_IN_FLIGHT = 8  # copies on their way; each holds device memory for a chunk until it is there
NULL_BLOCK = 0


@dataclass
class HostMemory:
    """The chunks of all groups of an engine, `num_bytes` at most."""

    num_bytes: int
    num_used_bytes: int = 0
    num_idle_bytes: int = 0
    dropped: list[int] = field(default_factory=list)  # since the last plan
    given: list[int] = field(default_factory=list)  # what plans shall drop and have not yet
    chunks: set[Chunk] = field(default_factory=set)
    num_reserved_bytes: int = 0
    reservations: dict[Hashable, int] = field(default_factory=dict)  # bytes, by who will need them
    index: dict[tuple[int, bytes], Place] = field(default_factory=dict)
    _idle: OrderedDict[Chunk, None] = field(default_factory=OrderedDict)  # oldest use first
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def num_available_bytes(self) -> int:
        """What new chunks could take, at the expense of all idle ones."""
        return self.num_bytes - self.num_held_bytes

    @property
    def num_held_bytes(self) -> int:
        """Bytes of chunks that are needed, and those reserved."""
        return self.num_used_bytes - self.num_idle_bytes + self.num_reserved_bytes

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

    def add(self, writer: "HostBlocks", contents: Sequence[CachedPrefix | None]) -> Chunk:
        """A new pinned chunk; idle ones go until it fits. Check `num_available_bytes` first.

        Of two blocks with the same hash the first stays the one that is found.
        """
        chunk = Chunk(next(self._numbers), writer, [None] * len(contents), num_pins=1)
        if chunk.num_bytes > self.num_available_bytes:
            raise RuntimeError(f"{chunk.num_bytes} bytes do not fit into the host tier.")
        while self.num_used_bytes + chunk.num_bytes > self.num_bytes:
            self.drop(next(iter(self._idle)))
        self.chunks.add(chunk)
        self.num_used_bytes += chunk.num_bytes
        for row, content in enumerate(contents):
            if content is not None:
                place = self.index.setdefault(_key(writer, content), Place(chunk, row))
                if place == (chunk, row):
                    chunk.contents[row] = content
        return chunk

    def pin(self, chunk: Chunk) -> None:
        """Keep a chunk whatever else needs bytes."""
        if not chunk.num_pins:
            del self._idle[chunk]
            self.num_idle_bytes -= chunk.num_bytes
        chunk.num_pins += 1

    def unpin(self, chunk: Chunk) -> None:
        """Undo one `pin`; a chunk that nobody needs and no hash finds is gone."""
        if chunk not in self.chunks:
            return  # dropped with its writer
        if not chunk.num_pins:
            raise RuntimeError(f"Chunk {chunk.number} was unpinned more often than pinned.")
        chunk.num_pins -= 1
        if chunk.num_pins:
            return
        self._idle[chunk] = None
        self.num_idle_bytes += chunk.num_bytes
        if not any(chunk.contents):
            self.drop(chunk)

    def touch(self, chunk: Chunk) -> None:
        """An idle chunk is the most recently used one now."""
        if not chunk.num_pins:
            self._idle.move_to_end(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Forget a chunk, whoever may need it."""
        if chunk not in self.chunks:
            return
        self.chunks.remove(chunk)
        self._forget(chunk)
        self.num_used_bytes -= chunk.num_bytes
        if not chunk.num_pins:
            del self._idle[chunk]
            self.num_idle_bytes -= chunk.num_bytes
        self.dropped.append(chunk.number)

    def clear_cache(self) -> None:
        """Nothing is found by hash any more; what is pinned stays for those who need it."""
        for chunk in list(self.chunks):
            self._forget(chunk)
            if not chunk.num_pins:
                self.drop(chunk)

    def check(self) -> None:
        """The counts agree with the chunks. Raises `RuntimeError` at the first breach."""
        idle = {chunk for chunk in self.chunks if not chunk.num_pins}
        used_bytes = sum(chunk.num_bytes for chunk in self.chunks)
        counted = used_bytes, sum(chunk.num_bytes for chunk in idle)
        if counted != (self.num_used_bytes, self.num_idle_bytes) or used_bytes > self.num_bytes:
            known = f"{self.num_used_bytes} and {self.num_idle_bytes} of {self.num_bytes}"
            raise RuntimeError(f"The host tier uses and could drop {counted} bytes, not {known}.")
        reserved = sum(self.reservations.values())
        if reserved != self.num_reserved_bytes or self.num_available_bytes < 0:
            raise RuntimeError(f"The host tier cannot keep {reserved} bytes free.")
        if idle != self._idle.keys():
            raise RuntimeError("The host tier's idle chunks are not those that nobody pins.")
        found = {
            _key(chunk.writer, content): (chunk, row)
            for chunk in self.chunks
            for row, content in enumerate(chunk.contents)
            if content is not None
        }
        if found != self.index:
            raise RuntimeError("The host tier's index does not agree with its chunks.")

    def _forget(self, chunk: Chunk) -> None:
        for row, content in enumerate(chunk.contents):
            if content is not None:
                del self.index[_key(chunk.writer, content)]
                chunk.contents[row] = None


def _key(writer: Tier, content: CachedPrefix) -> tuple[int, bytes]:
    return writer.block_size, content.block_hash


class HostBlocks(Tier):
    """What one group has of the host tier. Groups of equal `block_size` find each other's blocks.

    `block_bytes` are those of a block on all devices of the group. Copies are collected while a
    plan is made; `finish` hands them over.
    """

    def __init__(self, memory: HostMemory, block_size: int, block_bytes: int):
        self.memory, self.block_size, self.block_bytes = memory, block_size, block_bytes
        self.num_offloaded_blocks = self.num_restored_blocks = 0
        self._offloads: list[tuple[Chunk, list[int]]] = []
        self._restores: list[tuple[Chunk, list[int]]] = []
        self._unproven: dict[int, Chunk] = {}
        self.num_prefetches = self.num_prefetch_hits = 0  # chunks
        self._ahead: set[int] = set()  # chunks that the last plan has prefetched
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
        """Where blocks `start`, `start + 1` ... of a sequence are, `limit` at most in all.

        The tokens are compared as well, so that a collision of hashes is a miss.
        """
        places: list[Place] = []
        for number in range(start, min(limit, len(hashes))):
            place = self.memory.index.get((self.block_size, hashes[number]))
            if place is None:
                break
            chunk, row = place
            content = chunk.contents[row]
            tokens = block_tokens(token_ids, number, self.block_size)
            if content is None or content.tokens != tokens:
                break
            if not self._may_read(chunk):
                break
            places.append(place)
        self._num_query_tokens += len(token_ids) - start * self.block_size
        self._num_hit_tokens += len(places) * self.block_size
        return places

    def chunks_of(self, hashes: Iterable[bytes]) -> list[Chunk]:
        """The chunks of the blocks that come first, until one is missing; may be too hopeful."""
        chunks: dict[Chunk, None] = {}
        for block_hash in hashes:
            place = self.memory.index.get((self.block_size, block_hash))
            if place is None or not self._may_read(place.chunk):
                break
            chunks[place.chunk] = None
            if len(chunks) == MOST_AHEAD:
                break
        return list(chunks)

    def swap_out(
        self, blocks: Sequence[int], contents: Sequence[CachedPrefix | None]
    ) -> list[Place] | None:
        """Offload what a sequence has computed, pinned until `release`; None if there is no room.

        `contents` are what hashes lead to the blocks. A beginning that others have swapped out is
        shared with them.
        """
        shared = self._pinned_beginning(contents)
        blocks, contents = blocks[len(shared) :], contents[len(shared) :]
        if len(blocks) * self.block_bytes > self.memory.num_available_bytes:
            return None
        for chunk in {place.chunk: None for place in shared}:
            self.memory.pin(chunk)
        chunks = self._offload(blocks, contents)
        return shared + [
            Place(chunk, row) for chunk in chunks for row in range(len(chunk.contents))
        ]

    def _pinned_beginning(self, contents: Sequence[CachedPrefix | None]) -> list[Place]:
        """Where the first of these blocks are, as far as others keep them there anyway."""
        places: list[Place] = []
        for content in contents:
            place = content and self.memory.index.get((self.block_size, content.block_hash))
            if not content or not place or not place.chunk.num_pins:
                break
            if place.chunk.contents[place.row] != content or not self._may_read(place.chunk):
                break
            places.append(place)
        return places

    def _may_read(self, chunk: Chunk) -> bool:
        """Whether the copy was made, or is made before any that this group makes."""
        return chunk.is_proven or chunk.writer is self

    def save(self, evicted: Sequence[tuple[int, CachedPrefix]]) -> None:
        """Offload blocks that the device's prefix cache gives up, in the order in which it does.

        Where not all fit the first are lost: the tails of prefixes, see `BlockAllocator.release`.
        """
        index, new = self.memory.index, []
        for block, content in evicted:
            place = index.get((self.block_size, content.block_hash))
            if place is None:
                new.append((block, content))
            else:
                self.memory.touch(place.chunk)
        room = self.memory.num_available_bytes // self.block_bytes
        new = new[max(0, len(new) - room) :]
        for chunk in self._offload([block for block, _ in new], [content for _, content in new]):
            self.memory.unpin(chunk)

    def restore(self, places: Sequence[Place], blocks: Sequence[int]) -> None:
        """Copy blocks on the host to device blocks; their chunks stay until the plan is made."""
        pairs = zip(places, blocks, strict=True)
        for chunk, some in groupby(pairs, key=lambda pair: pair[0].chunk):
            targets = [NULL_BLOCK] * len(chunk.contents)
            for place, block in some:
                targets[place.row] = block
            self.memory.pin(chunk)
            self._restores.append((chunk, targets))
        self.num_restored_blocks += len(places)

    def release(self, places: Iterable[Place]) -> None:
        """A sequence needs what it has swapped out no more."""
        for chunk in {place.chunk: None for place in places}:
            self.memory.unpin(chunk)

    def finish(self, *, is_planned: bool, wanted: Iterable[Chunk] = ()) -> TierMoves:
        """The copies of the plan. If there is none, no copy will be made: new chunks are gone.

        The chunks `wanted` by sequences that come next are prefetched, the first `MOST_AHEAD`.
        """
        memory = self.memory
        if is_planned:  # what this plan restores goes with a later one at the earliest
            memory.given, memory.dropped = memory.given + memory.dropped, []
        for chunk, _ in reversed(self._restores):  # so that a beginning outlives what follows it
            memory.unpin(chunk)
        offloads, restores = self._offloads, self._restores
        self._offloads, self._restores = [], []
        if not is_planned:
            for chunk, _ in offloads:
                memory.drop(chunk)
            return TierMoves([], [], [], [])
        self._unproven |= {chunk.number: chunk for chunk, _ in offloads}
        self.num_offloaded_blocks += sum(len(blocks) for _, blocks in offloads)
        self.num_prefetch_hits += len({chunk.number for chunk, _ in restores} & self._ahead)
        return TierMoves(
            memory.given,
            [Offload(chunk.number, blocks) for chunk, blocks in offloads],
            [Restore(chunk.number, blocks) for chunk, blocks in restores],
            self._prefetch(wanted),
        )

    def _prefetch(self, wanted: Iterable[Chunk]) -> list[int]:
        here = dict.fromkeys(each.number for each in wanted if each in self.memory.chunks)
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
        return all(place.chunk in self.memory.chunks for place in places)

    def reset(self, suspects: Collection[int] = ()) -> None:
        """The group's pools are lost, and chunks of its that are not proven: were they written?

        So are `suspects`, the numbers of those that a failed step has read.
        """
        for chunk, _ in self._restores:
            self.memory.unpin(chunk)
        for chunk in list(self.memory.chunks):
            is_written = chunk.is_proven or chunk.writer is not self
            if not is_written or chunk.number in suspects:
                self.memory.drop(chunk)
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
    ) -> list[Chunk]:
        """Chunks of these blocks, each pinned once."""
        chunks, start = [], 0
        for size in chunk_sizes(len(blocks)):
            chunk = self.memory.add(self, contents[start : start + size])
            self._offloads.append((chunk, list(blocks[start : start + size])))
            chunks.append(chunk)
            start += size
        return chunks


def chunk_sizes(num_blocks: int) -> Iterator[int]:
    """The sizes of the fewest chunks that hold exactly so many blocks."""
    for size in CHUNK_SIZES:
        while num_blocks >= size:
            yield size
            num_blocks -= size
