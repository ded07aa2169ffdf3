"""What of a sequence is there already, where layers see only so far back. No JAX.

A prefix of n blocks is found if the groups that see everything have all of it, and every other
group what the token behind it sees. In which tier each block is, is found block by block.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels.window import Window
from shiftjax.arch.cache import first_block
from shiftjax.core.block_tables import BlockTables
from shiftjax.core.blocks import block_tokens
from shiftjax.core.request import SequenceState
from shiftjax.core.tier import Place
from shiftjax.core.window_blocks import WindowBlocks

Windows = Sequence[Window | None]  # of the cache groups


class Found(NamedTuple):
    """What of a sequence is there: for each block that of the device, or where to restore it."""

    num_tokens: int  # that are not computed again
    firsts: list[int]  # the number of the first block that the next token sees, by group
    sources: Sequence[Sequence[int | Place]]  # from there on, by group

    @property
    def blocks(self) -> list[int]:
        """Those on the device."""
        return [each for own in self.sources for each in own if isinstance(each, int)]

    @property
    def num_on_device(self) -> int:
        """How many of the first group's blocks come before the first to restore."""
        places = (n for n, each in enumerate(self.sources[0]) if isinstance(each, Place))
        return next(places, len(self.sources[0]))


class Prefixes:
    """Looks for prefixes in both tiers of one group, which has these tables."""

    def __init__(self, tables: BlockTables, device: WindowBlocks, windows: Windows):
        self._tables, self._device, self._windows = tables, device, windows
        self._size, self._groups = device.block_size, range(len(windows))
        self.nothing = Found(0, [0] * len(windows), [()] * len(windows))

    def first(self, group: int, position: int) -> int:
        """The first block of a group that a token at `position` sees."""
        return first_block(position, self._windows[group], self._size)

    def firsts(self, num_blocks: int) -> list[int]:
        """The first block of each group that the token behind so many blocks sees."""
        return [self.first(group, num_blocks * self._size) for group in self._groups]

    def num_found(
        self, hashes: Sequence[bytes], token_ids: list[int], limit: int, shortage: int
    ) -> int:
        """Blocks of the longest prefix that both tiers have, `limit` at most.

        None where no prefix could make up for a `shortage` of blocks: one look-up then.
        """
        least = -(-shortage // len(self._windows))  # a block saves one of each group at most
        if least > limit:
            return 0
        if self._windows[0] is not None:
            return self.longest(hashes, limit)
        if least > 0 and not self._is_known(hashes, 0, least - 1):
            return 0
        count = len(self._device.match(hashes, token_ids, limit))
        if self._tables.tier.has_prefixes:
            while count < limit and self._source(hashes, token_ids, 0, count) is not None:
                count += 1
        return self.longest(hashes, count)

    def longest(self, hashes: Sequence[bytes], count: int) -> int:
        """The most blocks, up to `count`, behind which each window has all that a token sees.

        Whatever ends between the last block that is missing and `count` needs that block, too.
        """
        while count:
            missing = max(self._last_missing(hashes, group, count) for group in self._groups)
            if missing < 0:
                break
            count = missing
        return count

    def _last_missing(self, hashes: Sequence[bytes], group: int, count: int) -> int:
        """The last block that a token behind `count` blocks sees and that is nowhere; -1: none."""
        if self._windows[group] is None:
            return -1
        numbers = range(count - 1, self.first(group, count * self._size) - 1, -1)
        return next((n for n in numbers if not self._is_known(hashes, group, n)), -1)

    def _is_known(self, hashes: Sequence[bytes], group: int, number: int) -> bool:
        key = key_of(hashes[number], group)
        return self._device.is_indexed(key) or self._tables.tier.knows(key)

    def found(self, hashes: Sequence[bytes], token_ids: list[int], count: int) -> Found:
        """Where the first `count` blocks are, as far as the next token sees them; else nothing."""
        firsts, sources = self.firsts(count), []
        for group, first in enumerate(firsts):
            numbers = range(first, count)
            own = [self._source(hashes, token_ids, group, number) for number in numbers]
            found = [each for each in own if each is not None]
            if len(found) < len(own):  # hashes collide, or a copy to the tier is not proven
                return self.nothing
            sources.append(found)
        return Found(count * self._size, firsts, sources)

    def _source(
        self, hashes: Sequence[bytes], token_ids: list[int], group: int, number: int
    ) -> int | Place | None:
        key, tokens = key_of(hashes[number], group), block_tokens(token_ids, number, self._size)
        block = self._device.find(key, tokens)
        return self._tables.tier.find(key, tokens) if block is None else block

    def swapped(self, sequence: SequenceState, hashes: Sequence[bytes]) -> Found:
        """Where what a sequence has swapped out is: in the second tier, or still on the device.

        Its places are those of the blocks that it held, group after group.
        """
        num_tokens, kept = sequence.num_computed_tokens, sequence.first_blocks
        end, num_full = self._device.blocks_for(num_tokens), num_tokens // self._size
        num_blocks = (len(sequence.places) + sum(kept)) // len(kept)  # when it was swapped out
        firsts, sources, begin = [], [], 0
        for group in self._groups:
            first, own = self.first(group, num_tokens), list[int | Place]()
            for number in range(first, end):
                block = None
                if number < min(num_full, len(hashes)):
                    tokens = block_tokens(sequence.token_ids, number, self._size)
                    block = self._device.find(key_of(hashes[number], group), tokens)
                place = sequence.places[begin + number - kept[group]]
                own.append(place if block is None else block)
            begin += num_blocks - kept[group]
            firsts.append(first)
            sources.append(own)
        return Found(num_tokens, firsts, sources)


def key_of(block_hash: bytes, group: int) -> bytes:
    """What a block of a group is found by: for the first, as in models that have one."""
    return block_hash + bytes((group,)) if group else block_hash
