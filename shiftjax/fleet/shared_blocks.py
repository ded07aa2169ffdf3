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

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

from shiftjax.core.blocks import BlockAllocator, CachedPrefix
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
        self._from_top = from_top
        super().__init__(num_blocks, block_size)

    def reset(self) -> None:
        """Forget every table and every cached block of this group and what relatives cache.

        The contents of their pools are gone. Blocks that tables of relatives hold stay theirs.
        """
        if hasattr(self, "_states"):
            for relative in self._relatives:
                relative.clear_cache()
            self.clear_cache()
            held = [block for block, count in enumerate(self._ref_counts) if count]
            for block in held:
                self._ref_counts[block] = 0
                self._contents[block] = None
            self._found.clear()
            self._give_back(held)
            return
        super().reset()
        self._found: set[int] = set()  # in the index, and found by somebody since
        self._free = []
        self._states = bytearray(self.num_blocks)  # all clean
        self._states[0] = State.BLOCKED
        self._users = [0] * self.num_blocks  # relatives that use it
        self._keepers = [0] * self.num_blocks  # relatives that cache something in it
        # No clean, and no foreign, block comes before these in the order of the group.
        self._first_ones = [self.num_blocks - 1 if self._from_top else 1] * 2
        self._num_free, self._num_used = self.num_blocks - 1, 0

    @property
    def relatives(self) -> "list[SharedBlocks]":
        """The allocators of overlapping groups."""
        return self._relatives

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those with cached prefixes included."""
        return self._num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that tables of this group hold."""
        return self._num_used

    def allocate(self) -> int:
        """One block, referenced once; what is cached in it is forgotten."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """As many blocks, each referenced once; all or, with RuntimeError, none."""
        if count > self._num_free:
            raise RuntimeError("The KV pool has no free block; the scheduler must preempt first.")
        blocks = self._first(State.CLEAN, count)
        blocks += self._first(State.FOREIGN, count - len(blocks))
        while len(blocks) < count:
            blocks.append(next(iter(self._cached)))
            self._drop(blocks[-1])
        self._claim(blocks)
        return blocks

    def take(self, block: int) -> None:
        """Reference a free block once, whichever it is; what is cached in it is forgotten."""
        if self._users[block]:
            raise RuntimeError(f"Block {block} belongs to another group.")
        if block in self._cached:
            self._drop(block)
        self._claim([block])

    def retain(self, blocks: Iterable[int]) -> None:
        """One more table holds these blocks, each cached or used."""
        for block in blocks:
            if self._ref_counts[block]:
                self._ref_counts[block] += 1
                continue
            del self._cached[block]
            for relative in self._relatives:
                relative._keepers[block] -= 1
            self._claim([block])

    def release(self, blocks: Sequence[int]) -> None:
        """One table less holds these blocks, given in the order of the table."""
        counts, ended = self._ref_counts, []
        for block in reversed(blocks):
            count = counts[block] - 1
            if count < 0:
                raise RuntimeError(f"Block {block} was released more often than it was retained.")
            counts[block] = count
            if not count:
                ended.append(block)
                if self._contents[block] is not None:
                    self._keep(block)
        if ended:
            self._give_back(ended)

    def note_found(self, blocks: Iterable[int]) -> None:
        """Somebody has found these blocks by their hashes."""
        self._found.update(block for block in blocks if self._contents[block] is not None)

    def found_again(self) -> list[int]:
        """Ends of cached prefixes that were found since they were entered, the last used first."""
        if not self._found:
            return []
        found = [block for block in reversed(self._cached) if block in self._found]
        contents = (self._contents[block] for block in found)
        inner = {self._index.get(each.parent or b"") for each in contents if each is not None}
        return [block for block in found if block not in inner]

    def chain_of(self, block: int) -> list[tuple[int, CachedPrefix]]:
        """The blocks of the prefix that ends with one; none where some of them are gone."""
        chain: list[tuple[int, CachedPrefix]] = []
        number: int | None = block
        while number is not None and (contents := self._contents[number]) is not None:
            chain.append((number, contents))
            if contents.parent is None:
                return chain[::-1]
            number = self._index.get(contents.parent)
        return []

    def clear_cache(self) -> None:
        """Empty the prefix cache; tables keep their blocks."""
        for block in list(self._cached):
            self._drop(block)
        self._clear_index()

    def replace(self, block: int, other: int) -> None:
        """Tables hold a free block in the place of a used one, whose contents have been copied."""
        self.take(other)
        self._ref_counts[other], self._ref_counts[block] = self._ref_counts[block], 0
        contents, self._contents[block] = self._contents[block], None
        if contents is not None:
            self._contents[other] = contents
            self._index[contents.block_hash] = other
            if block in self._found:
                self._found.remove(block)
                self._found.add(other)
        self._give_back([block])

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
        counted = sum(state < State.USED for state in self._states), self._states.count(State.USED)
        if counted != (self._num_free, self._num_used):
            known = self._num_free, self._num_used
            raise RuntimeError(f"{counted} blocks are free and used, not {known}.")
        others = (State.USED, State.CACHED)
        self._free = [b for b in range(1, self.num_blocks) if self._states[b] not in others]
        try:
            super().check(tables)
        finally:
            self._free = []

    def _forget(self, block: int) -> None:
        super()._forget(block)
        self._found.discard(block)

    def _clear_index(self) -> None:
        super()._clear_index()
        self._found.clear()

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
        """Note that a block that no table holds is in another state now."""
        self._states[block] = state
        self._may_come_first([block])

    def _may_come_first(self, blocks: Sequence[int]) -> None:
        """Of the clean or foreign blocks, these may be the next."""
        nearest = max(blocks) if self._from_top else min(blocks)
        for state in _UNKEPT:
            if (nearest > self._first_ones[state]) == self._from_top:
                self._first_ones[state] = nearest

    def _first(self, state: State, count: int) -> list[int]:
        """The first blocks in a state by the group's order, marked as used; at most `count`."""
        states, start, found = self._states, self._first_ones[state], []
        while len(found) < count:
            block = (
                states.rfind(state, 1, start + 1) if self._from_top else states.find(state, start)
            )
            if block < 0:
                start = 0 if self._from_top else self.num_blocks
                break
            states[block] = _USED
            found.append(block)
            start = block
        self._first_ones[state] = start
        return found

    def _claim(self, blocks: Sequence[int]) -> None:
        """One table of this group holds blocks that are free: nobody else may take them."""
        for block in blocks:
            self._ref_counts[block] = 1
            self._states[block] = State.USED
        self._num_free -= len(blocks)
        self._num_used += len(blocks)
        for relative in self._relatives:
            relative._block(blocks)

    def _give_back(self, blocks: Sequence[int]) -> None:
        """Tables hold these blocks no more."""
        if not blocks:
            return
        cached, keepers = self._cached, self._keepers
        for block in blocks:
            self._states[block] = (
                State.CACHED if block in cached else _FOREIGN if keepers[block] else _CLEAN
            )
        self._num_free += len(blocks)
        self._num_used -= len(blocks)
        self._may_come_first(blocks)
        for relative in self._relatives:
            relative._unblock(blocks)

    def _block(self, blocks: Sequence[int]) -> None:
        """Tables of a relative hold these blocks: nothing of this group is cached in them."""
        users, states = self._users, self._states
        for block in blocks:
            if not users[block]:
                if states[block] == _CACHED:
                    self._drop(block)
                states[block] = _BLOCKED
                self._num_free -= 1
            users[block] += 1

    def _unblock(self, blocks: Sequence[int]) -> None:
        """Tables of a relative hold these blocks no more."""
        users, states, keepers, num_free = self._users, self._states, self._keepers, 0
        for block in blocks:
            left = users[block] - 1
            users[block] = left
            if not left:
                states[block] = _FOREIGN if keepers[block] else _CLEAN
                num_free += 1
        if num_free:
            self._num_free += num_free
            self._may_come_first(blocks)

    def _keep(self, block: int) -> None:
        """What a block has is cached from when no table holds it."""
        self._cached[block] = None
        for relative in self._relatives:
            relative._keepers[block] += 1

    def _drop(self, block: int) -> None:
        """Forget what is cached in a block that no table holds."""
        del self._cached[block]
        self._forget(block)
        for relative in self._relatives:
            relative._keepers[block] -= 1
            relative._enter(block, relative._state(block))
        self._enter(block, self._state(block))


_CLEAN, _FOREIGN, _CACHED, _USED, _BLOCKED = (int(state) for state in State)  # quicker than an enum
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
