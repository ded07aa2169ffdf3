"""The allocator of pools whose blocks sequences lose while they run: behind a window. No JAX.

A block that its sequence loses before its contents are known to be finite is *unproven*: cached,
and the first to be given away like any other, but found by nobody until `prove`.
"""

from collections.abc import Iterable, Sequence

from shiftjax.core.blocks import BlockAllocator, CachedPrefix


class WindowBlocks(BlockAllocator):
    """Blocks of several cache groups, each found by the hash of its tokens and its group."""

    def reset(self) -> None:
        """Forget every table and every cached block: the pool's contents are gone."""
        self._unproven: dict[int, CachedPrefix] = {}
        super().reset()

    def find(self, block_hash: bytes, tokens: list[int]) -> int | None:
        """The block that is found under a hash, if it has these tokens; takes no reference."""
        block = self._index.get(block_hash)
        contents = None if block is None else self._contents[block]
        return block if contents is not None and contents.tokens == tokens else None

    def retire(self, block: int, contents: CachedPrefix) -> bool:
        """One table less holds a block, which has these contents; whether it is unproven now."""
        self.release([block])
        if self._ref_counts[block] or self._contents[block] is not None:
            return False
        self._free.pop()  # where `release` has just put it
        self._cached[block] = None
        self._unproven[block] = contents
        return True

    def prove(self, block: int, contents: CachedPrefix) -> None:
        """What `retire` was given turned out to be finite; nothing if the block is taken since."""
        if self._unproven.get(block) is not contents:
            return
        if contents.block_hash in self._index:
            self.drop(block, contents)
            return
        del self._unproven[block]
        self.enter(block, contents)

    def drop(self, block: int, contents: CachedPrefix) -> None:
        """What `retire` was given will not be proven."""
        if self._unproven.get(block) is contents:
            del self._unproven[block], self._cached[block]
            self._free.append(block)

    def clear_cache(self) -> None:
        """Empty the prefix cache; tables keep their blocks."""
        self._unproven.clear()
        super().clear_cache()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """See `BlockAllocator.check`; what is unproven is cached, and found by nobody."""
        super().check(tables)
        if not self._unproven.keys() <= self._cached.keys():
            raise RuntimeError("Blocks that are unproven are not cached.")
        if any(self._contents[block] is not None for block in self._unproven):
            raise RuntimeError("Blocks that are unproven can be found.")

    def _forget(self, block: int) -> None:
        if self._unproven.pop(block, None) is None:
            super()._forget(block)
