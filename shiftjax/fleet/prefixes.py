"""Cached prefixes come along when groups change: those that somebody has found again. No JAX.

A wide block has what several narrow blocks of one narrow group have, one after the other. So a
prefix that a group keeps is moved as a running sequence is, and is found in the other group by the
hashes of its units. A bind moves those of all narrow groups into the wide one. A release moves each
prefix into one narrow group: where most of it is, say with a sequence, else where most is free; the
requests that begin with it go there (`core.lane.least_loaded`). What nobody has found again stays
where it is: most prefixes end with their request, and moving takes time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shiftjax.core.blocks import CachedPrefix
from shiftjax.core.lane import Lane
from shiftjax.fleet.handover import Handover, place_of, shared_blocks_of
from shiftjax.fleet.shared_blocks import SharedBlocks
from shiftjax.parallel.arrangements import Change

MOST_FILLED = 2  # one part in so many of the free blocks may be filled with prefixes


def adopt(
    sources: Sequence[Lane], targets: Sequence[Lane], change: Change, handover: Handover
) -> int:
    """Have the groups that come find what those that go have kept; returns their new blocks.

    Sequences have been carried, so the old groups hold no blocks any more. Moves are appended to
    those of the hand-over. The prefixes that were used last come first, and fill no more than a
    part of what is free.
    """
    if change.is_bind:
        return _adopt_wide(sources, targets[0], change, handover)
    return _adopt_narrow(sources[0], targets, change, handover)


def _adopt_wide(sources: Sequence[Lane], wide: Lane, change: Change, handover: Handover) -> int:
    new, found = shared_blocks_of(wide), []
    room = new.num_free_blocks // MOST_FILLED
    carried = {pair[:2]: pair[2] for _, pair in handover.moves}
    for source in sources:
        old = shared_blocks_of(source)
        width, place = source.group.width, place_of(change.wide, source.group)
        for part, contents in _wide_parts(old, new.block_size // old.block_size):
            narrow = tuple(block for block, _ in part)
            if (block := carried.get((place, narrow))) is not None:  # with a running sequence
                new.enter(block, contents)
                new.note_found([block])
                continue
            if len(found) == room:
                break
            is_there = all(old.contents_of(block) is each for block, each in part)
            if not is_there or new.is_indexed(contents.block_hash):
                continue  # what it had may have become a new block of the wide group
            found.append(new.allocate())
            new.enter(found[-1], contents)
            handover.moves.append((width, (place, narrow, found[-1])))
    new.note_found(found)
    new.release(found)  # of which the last one goes first
    return len(found)


type _Part = list[tuple[int, CachedPrefix]]  # narrow blocks, with what they hold


def _wide_parts(old: SharedBlocks, several: int) -> Iterator[tuple[_Part, CachedPrefix]]:
    """Yield what fills a wide block, beginnings first: those of the prefix that was used last."""
    seen: set[bytes] = set()
    for last in old.found_again():
        chain = old.chain_of(last)
        parent: bytes | None = None
        for first in range(0, len(chain) - several + 1, several):
            part = chain[first : first + several]
            tokens = [token for _, contents in part for token in contents.tokens]
            end = part[-1][1]
            is_private = any(contents.is_private for _, contents in part)
            hashes = [unit for _, contents in part for unit in contents.unit_hashes]
            whole = CachedPrefix(end.block_hash, tokens, parent, is_private, hashes)
            parent = end.block_hash
            if whole.block_hash not in seen:
                seen.add(whole.block_hash)
                yield part, whole


@dataclass
class _Narrow:
    """A narrow group that a release opens, and what it is given."""

    blocks: SharedBlocks
    width: int
    place: int
    room: int
    carried: dict[int, tuple[int, ...]]  # by wide block: what running sequences have of it here
    found: list[int] = field(default_factory=list)

    def adopt(self, old: SharedBlocks, chain: _Part, handover: Handover) -> None:
        """Have this group find a prefix of the wide one, as far as there is room."""
        parent: bytes | None = None
        for wide, contents in chain:
            parts = _narrow_parts(contents, self.blocks.block_size, parent)
            parent = contents.block_hash
            narrow = self.carried.get(wide)
            if narrow is None:
                if self.blocks.is_indexed(contents.block_hash):
                    continue  # another prefix begins as this one
                num_left = self.room - len(self.found)
                if old.contents_of(wide) is not contents or len(parts) > num_left:
                    return  # what it had may have become a new block of a narrow group
                narrow = tuple(self.blocks.allocate_many(len(parts)))
                handover.moves.append((self.width, (self.place, narrow, wide)))
                self.found += narrow
            for block, part in zip(narrow, parts, strict=True):
                self.blocks.enter(block, part)
            self.blocks.note_found(narrow)


def _adopt_narrow(wide: Lane, targets: Sequence[Lane], change: Change, handover: Handover) -> int:
    old, groups = shared_blocks_of(wide), list[_Narrow]()
    for lane in targets:
        blocks, width, place = (
            shared_blocks_of(lane),
            lane.group.width,
            place_of(change.wide, lane.group),
        )
        several = old.block_size // blocks.block_size
        carried = {
            whole: narrow
            for own, (at, narrow, whole) in handover.moves
            if (own, at) == (width, place) and len(narrow) == several
        }
        groups.append(_Narrow(blocks, width, place, blocks.num_free_blocks // MOST_FILLED, carried))
    for end in old.found_again():
        chain = old.chain_of(end)

        def order(group: _Narrow, chain: _Part = chain) -> tuple[int, int]:
            num_here = sum(
                wide in group.carried or group.blocks.is_indexed(contents.block_hash)
                for wide, contents in chain
            )
            return num_here, (group.room - len(group.found)) * group.blocks.block_size

        max(groups, key=order).adopt(old, chain, handover)
    for group in groups:
        group.blocks.release(group.found)
    return sum(len(group.found) for group in groups)


def _narrow_parts(contents: CachedPrefix, size: int, parent: bytes | None) -> list[CachedPrefix]:
    """What blocks of `size` tokens have of a wide block, which comes after `parent`."""
    units, tokens = contents.unit_hashes, contents.tokens
    each = len(units) * size // len(tokens)  # units of a narrow block
    parts = []
    for number in range(len(tokens) // size):
        hashes = units[number * each : (number + 1) * each]
        own = tokens[number * size : (number + 1) * size]
        rest = contents.is_private, hashes if each > 1 else ()
        parts.append(CachedPrefix(hashes[-1], own, parent, *rest))
        parent = hashes[-1]
    return parts
