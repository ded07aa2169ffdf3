"""Blocks of groups that share their units' pools: what one uses, the others cannot. No JAX.

A block number of a group means the same number on all its units (Flying Serving's shared ids, F7),
and its bytes have the layout of the group that uses it, its owner. Every group has an allocator of
its own over all numbers; those of overlapping groups are `relatives` and tell each other:

    clean    nobody's                                       any relative may take it
    foreign  a relative keeps a cached prefix in it         taken after the clean ones
    cached   this group keeps a cached prefix in it         taken last, least recently used first
    used     tables of this group hold it
    blocked  tables of a relative hold it

Narrow groups take the lowest numbers, wide ones the highest, so that numbers which are free on all
units of a wide group stay; where there are too few, `plan_compaction` moves blocks down.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

from shiftjax.control.blocks import BlockAllocator
from shiftjax.parallel.grid import Group


class State(IntEnum):
    """Of a block, as one group sees it."""

    CLEAN = 0
    FOREIGN = 1
    CACHED = 2
    USED = 3
    BLOCKED = 4


class SharedBlocks(BlockAllocator):
    """The allocator of one group of a fleet; see `BlockAllocator` for what it does.

    With `from_top` it takes the highest numbers first. `relatives` are set by `share`.
    """

    def __init__(self, num_blocks: int, block_size: int, *, from_top: bool):
        self._relatives: list[SharedBlocks] = []
        self._sign = -1 if from_top else 1
        super().__init__(num_blocks, block_size)

    def reset(self) -> None:
        """Forget every table and every cached block of this group and what relatives cache.

        The contents of their pools are gone. Blocks that tables of relatives hold stay theirs.
        """
        if hasattr(self, "_states"):
            for relative in self._relatives:
                relative.clear_cache()
            self.clear_cache()
            for block in [b for b, count in enumerate(self._ref_counts) if count]:
                self._ref_counts[block] = 0
                self._contents[block] = None
                self._give_back(block)
            return
        super().reset()
        self._free = []
        self._states = [State.CLEAN] * self.num_blocks
        self._users = [0] * self.num_blocks  # relatives that use it
        self._keepers = [0] * self.num_blocks  # relatives that cache something in it
        numbers = list(range(1, self.num_blocks))[:: self._sign]
        self._heaps: dict[State, list[int]] = {
            State.CLEAN: [self._sign * number for number in numbers],
            State.FOREIGN: [],
        }
        self._queued = {
            State.CLEAN: bytearray(b"\1" * self.num_blocks),
            State.FOREIGN: bytearray(self.num_blocks),
        }
        self._counts = [self.num_blocks - 1, 0, 0, 0, 0]

    @property
    def relatives(self) -> "list[SharedBlocks]":
        """The allocators of overlapping groups."""
        return self._relatives

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those with cached prefixes included."""
        counts = self._counts
        return counts[State.CLEAN] + counts[State.FOREIGN] + counts[State.CACHED]

    @property
    def num_used_blocks(self) -> int:
        """Blocks that tables of this group hold."""
        return self._counts[State.USED]

    def allocate(self) -> int:
        """One block, referenced once; what is cached in it is forgotten."""
        block = (
            self._first(State.CLEAN) or self._first(State.FOREIGN) or next(iter(self._cached), 0)
        )
        if not block:
            raise RuntimeError("The KV pool has no free block; the scheduler must preempt first.")
        self.take(block)
        return block

    def take(self, block: int) -> None:
        """Reference a free block once, whichever it is; what is cached in it is forgotten."""
        if block in self._cached:
            self._drop(block)
        self._claim(block)
        self._ref_counts[block] = 1

    def retain(self, blocks: Iterable[int]) -> None:
        """One more table holds these blocks, each cached or used."""
        for block in blocks:
            if not self._ref_counts[block]:
                del self._cached[block]
                for relative in self._relatives:
                    relative._keepers[block] -= 1
                self._claim(block)
            self._ref_counts[block] += 1

    def clear_cache(self) -> None:
        """Empty the prefix cache; tables keep their blocks."""
        for block in list(self._cached):
            self._drop(block)
        self._index.clear()
        self._contents = [None] * self.num_blocks

    def replace(self, block: int, other: int) -> None:
        """Tables hold a free block in the place of a used one, whose contents have been copied."""
        if other in self._cached:
            self._drop(other)
        self._claim(other)
        self._ref_counts[other], self._ref_counts[block] = self._ref_counts[block], 0
        contents, self._contents[block] = self._contents[block], None
        if contents is not None:
            self._contents[other] = contents
            self._index[contents.block_hash] = other
        self._give_back(block)

    def state_of(self, block: int) -> State:
        """What a block is to this group."""
        return State(self._states[block])

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Conservation, against all tables of the group and the relatives' states."""
        tables = list(tables)
        for block in range(1, self.num_blocks):
            users = sum(bool(other._ref_counts[block]) for other in self._relatives)
            keepers = sum(block in other._cached for other in self._relatives)
            if (users, keepers) != (self._users[block], self._keepers[block]):
                known = f"{self._users[block]} and {self._keepers[block]}"
                raise RuntimeError(
                    f"Block {block}: {users} relatives use it and {keepers} cache it, not {known}."
                )
            if users and (self._ref_counts[block] or block in self._cached):
                raise RuntimeError(f"Block {block} belongs to two groups.")
            if self._states[block] != self._state(block):
                raise RuntimeError(f"Block {block} is {self.state_of(block).name}: wrong.")
        others = (State.USED, State.CACHED)
        self._free = [b for b in range(1, self.num_blocks) if self._states[b] not in others]
        try:
            super().check(tables)
        finally:
            self._free = []

    # ------------------------------------------------------------------ states

    def _state(self, block: int) -> State:
        if self._ref_counts[block]:
            return State.USED
        if self._users[block]:
            return State.BLOCKED
        if block in self._cached:
            return State.CACHED
        return State.FOREIGN if self._keepers[block] else State.CLEAN

    def _enter(self, block: int, state: State) -> None:
        """Note that a block is in a state now."""
        self._counts[self._states[block]] -= 1
        self._counts[state] += 1
        self._states[block] = state
        if state in _UNKEPT and not self._queued[state][block]:
            self._queued[state][block] = 1
            heapq.heappush(self._heaps[state], self._sign * block)

    def _first(self, state: State) -> int:
        """The first block in a state by the group's order; 0: there is none."""
        heap, queued = self._heaps[state], self._queued[state]
        while heap:
            block = self._sign * heap[0]
            if self._states[block] == state:
                return block
            heapq.heappop(heap)  # it has changed since it was put here
            queued[block] = 0
        return 0

    def _claim(self, block: int) -> None:
        """Tables of this group will hold a block: nobody else may, and nothing is cached in it."""
        if self._users[block]:
            raise RuntimeError(f"Block {block} belongs to another group.")
        for relative in self._relatives:
            if block in relative._cached:
                relative._drop(block)
            relative._users[block] += 1
            relative._enter(block, State.BLOCKED)
        self._enter(block, State.USED)

    def _give_back(self, block: int) -> None:
        """Tables hold a block no more."""
        self._enter(block, self._state(block))
        for relative in self._relatives:
            relative._users[block] -= 1
            relative._enter(block, relative._state(block))

    def _return(self, block: int) -> None:
        if self._contents[block] is not None:
            self._cached[block] = None
            for relative in self._relatives:
                relative._keepers[block] += 1
        self._give_back(block)

    def _drop(self, block: int) -> None:
        """Forget what is cached in a block that no table holds."""
        del self._cached[block]
        self._forget(block)
        for relative in self._relatives:
            relative._keepers[block] -= 1
            relative._enter(block, relative._state(block))
        self._enter(block, self._state(block))


_UNKEPT = (State.CLEAN, State.FOREIGN)


def share(num_blocks: int, block_sizes: Mapping[Group, int]) -> dict[Group, SharedBlocks]:
    """The allocators of groups over the same pools, by the tokens of each one's blocks."""
    narrowest = min(group.width for group in block_sizes)
    found = {
        group: SharedBlocks(num_blocks, size, from_top=group.width > narrowest)
        for group, size in block_sizes.items()
    }
    for group, blocks in found.items():
        blocks._relatives = [
            other for each, other in found.items() if each != group and each.overlaps(group)
        ]
    return found


def plan_compaction(
    wide: SharedBlocks, owners: Sequence[SharedBlocks], wanted: int
) -> list[tuple[SharedBlocks, int, int]]:
    """Copies, `(owner, block, new block)`, that make `wanted` blocks free for a wide group.

    `owners` are its relatives whose tables hold blocks. The blocks that are held by the fewest of
    them are emptied first, highest numbers first; what they hold goes to the lowest numbers that
    are free for their owner and not for the wide group. As many as can be had where that is less.
    """
    missing = wanted - wide.num_free_blocks
    if missing <= 0:
        return []
    held = {
        block: [owner for owner in owners if owner.state_of(block) is State.USED]
        for block in range(1, wide.num_blocks)
        if wide.state_of(block) is State.BLOCKED
    }
    order = sorted(held, key=lambda block: (len(held[block]), -block))
    room = {
        id(owner): [b for b in sorted(held) if owner.state_of(b) in (*_UNKEPT, State.CACHED)]
        for owner in owners
    }
    copies: list[tuple[SharedBlocks, int, int]] = []
    emptied: set[int] = set()
    filled: set[int] = set()
    for block in order:
        if missing <= 0:
            break
        found = []
        for owner in held[block]:
            free = next((b for b in room[id(owner)] if b not in emptied and b != block), None)
            if free is None:
                break
            found.append((owner, block, free))
        if block in filled or len(found) < len(held[block]):
            continue
        for owner, _, free in found:
            room[id(owner)].remove(free)
            filled.add(free)
        copies += found
        emptied.add(block)
        missing -= 1
    return copies
