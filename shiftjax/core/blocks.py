"""Which block of the KV pool belongs to whom: reference counts and the prefix cache. No JAX.

Every block but the null block 0 is in exactly one of three states::

    free     no table holds it, contents worthless              _free (a stack)
    cached   no table holds it, contents revivable by hash      _cached (least recently used first)
    used     `ref_count` tables hold it; it may be in the hash index too
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

DIGEST_BYTES = 16


def root_hash(
    model: str, kv: str, adapter: str | None, salt: str | None, version: int = 0
) -> bytes:
    """The parent of every first block: KV is shared only below the same root.

    `kv` says what numbers KV is kept in: the same tokens have other blocks in other formats.
    `version` is that of the weights; 0: those of the start.
    """
    identity = model, kv, adapter, salt
    told = repr((*identity, version) if version else identity).encode()
    return hashlib.blake2b(told, digest_size=DIGEST_BYTES).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: list[int], block_size: int) -> None:
    """Append the chained hash of every full block of `token_ids` that has none yet."""
    parent, first, end = hashes[-1] if hashes else root, len(hashes), len(token_ids) // block_size
    if first == end:
        return
    new = array("i", token_ids[first * block_size : end * block_size])  # at once: blocks are many
    data, num_bytes = new.tobytes(), block_size * new.itemsize
    for begin in range(0, len(data), num_bytes):
        block = parent + data[begin : begin + num_bytes]
        parent = hashlib.blake2b(block, digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)


def block_tokens(token_ids: list[int], block: int, block_size: int) -> list[int]:
    """The tokens of the block with this number in a sequence."""
    return token_ids[block * block_size : (block + 1) * block_size]


@dataclass(slots=True)
class CachedPrefix:
    """Contents of a block in the hash index; never changed."""

    block_hash: bytes
    tokens: list[int]
    parent: bytes | None = None  # the hash of the block before; None: it begins a sequence
    is_private: bool = False  # no observer hears of it
    hashes: Sequence[bytes] = ()  # of all of its tokens that are hashed apart; (): one, its own

    @property
    def unit_hashes(self) -> Sequence[bytes]:
        """Those of its units, its own at last."""
        return self.hashes or (self.block_hash,)


class CacheObserver(Protocol):
    """Who hears of every change of the hash index, but of private blocks."""

    def stored(self, contents: CachedPrefix) -> None:
        """A block is found from now on."""
        ...

    def removed(self, block_hash: bytes) -> None:
        """A block is found no more."""
        ...

    def cleared(self) -> None:
        """None is found any more."""
        ...


class BlockAllocator:
    """Hands out the blocks `1 .. num_blocks - 1`; block 0 takes the padding's reads and writes.

    Every operation is O(1) per block. Freed blocks with a hash stay revivable until they are
    needed, the least recently used going first.
    """

    observer: CacheObserver | None = None

    @property
    def relatives(self) -> "Sequence[BlockAllocator]":
        """Those of groups that share the pool."""
        return ()

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"A pool needs at least 2 blocks (one is the null block) of at least 1 token, "
                f"not {num_blocks} of {block_size}."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Forget every table and every cached block: the pool's contents are gone."""
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * self.num_blocks
        self._contents: list[CachedPrefix | None] = [None] * self.num_blocks
        self._index: dict[bytes, int] = {}
        if self.observer is not None:
            self.observer.cleared()

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that tables hold."""
        return self.num_usable_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no table holds and whose contents can be revived."""
        return len(self.revivable)

    @property
    def revivable(self) -> Collection[int]:
        """The same blocks, the first to go first."""
        return self._cached.keys()

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """One block, referenced once. Check `num_free_blocks` first: none left is an error."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise RuntimeError("The KV pool has no free block; the scheduler must preempt first.")
        self._ref_counts[block] = 1
        return block

    @property
    def next_evicted(self) -> int | None:
        """The cached block that the next `allocate` takes; None: it takes one that is free."""
        is_evicting = self._cached and self.num_free_blocks == len(self._cached)
        return next(iter(self._cached)) if is_evicting else None

    def cached(self) -> list[tuple[int, CachedPrefix]]:
        """Blocks that no table holds, with what they are found by: the first to go come first."""
        found = ((block, self._contents[block]) for block in self.revivable)
        return [(block, contents) for block, contents in found if contents is not None]

    def contents_of(self, block: int) -> CachedPrefix | None:
        """What a block is found by; None: by nothing."""
        return self._contents[block]

    def is_indexed(self, block_hash: bytes) -> bool:
        """Whether some block is found under this hash."""
        return block_hash in self._index

    def blocks_of(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that are found under these hashes, until one is not."""
        found = takewhile(lambda block: block is not None, map(self._index.get, hashes))
        return [block for block in found if block is not None]

    def match(self, hashes: Sequence[bytes], token_ids: list[int], limit: int) -> list[int]:
        """The longest cached prefix, at most `limit` blocks; takes no reference.

        The tokens are compared as well, so that a collision of hashes is a miss.
        """
        blocks: list[int] = []
        for number, block_hash in enumerate(hashes[:limit]):
            block = self._index.get(block_hash)
            if block is None:
                break
            contents = self._contents[block]
            tokens = block_tokens(token_ids, number, self.block_size)
            if contents is None or contents.tokens != tokens:
                break
            blocks.append(block)
        return blocks

    def note_found(self, blocks: Iterable[int]) -> None:
        """Somebody has found these blocks by their hashes; for who shares the pool with others."""

    def num_revived(self, blocks: Iterable[int]) -> int:
        """How many of these `retain` would take from `num_free_blocks`."""
        return sum(not self._ref_counts[block] for block in blocks)

    def retain(self, blocks: Iterable[int]) -> None:
        """One more table holds these blocks, each cached or used."""
        for block in blocks:
            if not self._ref_counts[block]:
                del self._cached[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One table less holds these blocks, given in the order of the table.

        Later blocks become the first to go: a prefix is worth nothing without its beginning.
        """
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise RuntimeError(f"Block {block} was released more often than it was retained.")
            self._ref_counts[block] = count
            if not count:
                self._return(block)

    def keep(self, blocks: Sequence[int], seconds: float, session: str | None) -> None:
        """Keep the blocks of a prefix for a time; here nothing is kept."""

    def discard(self, blocks: Sequence[int], session: str | None, num_found: int) -> None:
        """Blocks from `num_found` on, and those that `session` keeps, are of no use any more."""

    def expire(self, now: float) -> None:
        """Called before every plan: keep nothing whose time has passed."""

    def states(self) -> Iterable[Any]:
        """Return counters that can be added to those of other groups."""
        return ()

    def register(
        self,
        block: int,
        block_hash: bytes,
        tokens: list[int],
        parent: bytes | None = None,
        is_private: bool = False,
        hashes: Sequence[bytes] = (),
    ) -> None:
        """Enter a used block, whose KV has been computed, into the prefix cache.

        Of two blocks with the same contents the first stays the one that is found. Where `parent`
        is not found, nothing after it would be: such a block is not entered.
        """
        if parent is None or parent in self._index:
            self.enter(block, CachedPrefix(block_hash, tokens, parent, is_private, hashes))

    def enter(self, block: int, contents: CachedPrefix) -> None:
        """Have a block that is not free found from now on, whether what comes before it is or not.

        Of two blocks with the same contents the first stays the one that is found.
        """
        if contents.block_hash in self._index or self._contents[block] is not None:
            return
        self._index[contents.block_hash] = block
        self._contents[block] = contents
        if self.observer is not None and not contents.is_private:
            self.observer.stored(contents)

    def shown(self) -> list[CachedPrefix]:
        """What an observer knows of. Quick, and nobody changes it later."""
        found = (self._contents[block] for block in self._index.values())
        return [each for each in found if each is not None and not each.is_private]

    def clear_cache(self) -> None:
        """Empty the prefix cache; tables keep their blocks."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._clear_index()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Conservation, against all tables that exist. Raises `RuntimeError` at the first breach.

        Free, cached and used are a partition of the blocks; a reference count is the number of
        tables that hold the block; index and contents agree.
        """
        held = Counter(block for table in tables for block in table)
        used = {block for block, count in enumerate(self._ref_counts) if count}
        everything = [*self._free, *self.revivable, *used]
        if sorted(everything) != list(range(1, self.num_blocks)):
            counts = len(self._free), self.num_cached_blocks, len(used)
            raise RuntimeError(
                "{} free, {} cached and {} used blocks".format(*counts)
                + f" are not a partition of 1..{self.num_blocks - 1}."
            )
        for block, count in enumerate(self._ref_counts):
            if count != held[block]:
                raise RuntimeError(
                    f"Block {block} counts {count} references, {held[block]} tables hold it."
                )
        indexed = {block: block_hash for block_hash, block in self._index.items()}
        known = {b: contents.block_hash for b, contents in enumerate(self._contents) if contents}
        if indexed != known or not known.keys() <= used | set(self.revivable):
            raise RuntimeError("The hash index does not agree with the contents of the blocks.")

    def _return(self, block: int) -> None:
        if self._contents[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _clear_index(self) -> None:
        self._index.clear()
        self._contents = [None] * self.num_blocks
        if self.observer is not None:
            self.observer.cleared()

    def _forget(self, block: int) -> None:
        contents = self._contents[block]
        if contents is not None:
            del self._index[contents.block_hash]
            self._contents[block] = None
            if self.observer is not None and not contents.is_private:
                self.observer.removed(contents.block_hash)
