"""Cached prefixes come along when groups are bound: those that somebody has found again. No JAX.

A wide block has what several narrow blocks of one narrow group have, one after the other. So a
prefix that a narrow group keeps is moved as a running sequence is, and is found in the wide group
by the hash with which its last narrow block ends. What nobody has found again stays where it is:
most prefixes end with their request, and moving takes time.
"""

from collections.abc import Iterator, Sequence

from shiftjax.core.blocks import CachedPrefix
from shiftjax.core.lane import Lane
from shiftjax.fleet.handover import Handover, place_of, shared_blocks_of
from shiftjax.fleet.shared_blocks import SharedBlocks
from shiftjax.parallel.arrangements import Change

MOST_FILLED = 2  # one part in so many of the free blocks may be filled with prefixes


def adopt(sources: Sequence[Lane], wide: Lane, change: Change, handover: Handover) -> int:
    """Have the wide group of a bind find what its narrow groups have kept; returns its new blocks.

    Sequences have been carried, so the narrow groups hold no blocks any more. Moves are appended to
    those of the hand-over. The prefixes that were used last come first, and fill no more than a
    part of what is free.
    """
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
            whole = CachedPrefix(end.block_hash, tokens, parent, is_private)
            parent = end.block_hash
            if whole.block_hash not in seen:
                seen.add(whole.block_hash)
                yield part, whole
