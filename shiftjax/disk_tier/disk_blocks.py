"""The host tier with a disk behind it. No JAX."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import batched, takewhile
from typing import Any

from shiftjax.core.blocks import CachedPrefix
from shiftjax.core.request import StepPlan
from shiftjax.core.tier import Extent, Place
from shiftjax.disk_tier.chunk_file import Contents
from shiftjax.disk_tier.disk import Disk
from shiftjax.disk_tier.waits import Waits
from shiftjax.host_tier.extents import HostBlocks, HostMemory
from shiftjax.parallel.grid import Mode

SHARE_READ = 0.5  # of host memory, at most, that reads on their way may fill


class DiskBlocks(HostBlocks):
    """What one group has of host memory, and of the disk that all groups share.

    A waiting sequence has chunks read into host memory, where its admission finds them.
    """

    fetches = True

    def __init__(
        self,
        memory: HostMemory,
        disk: Disk,
        waits: Waits,
        block_size: int,
        block_bytes: int,
        hash_size: int = 0,
    ):
        super().__init__(memory, block_size, block_bytes, hash_size)
        self._disk, self._waits = disk, waits
        memory.leaves = disk.write

    @property
    def has_prefixes(self) -> bool:
        """Return whether anything can be found by its hash."""
        return super().has_prefixes or bool(self._disk.index)

    def knows(self, block_hash: bytes) -> bool:
        """Return whether a block may be found, in host memory or on the disk."""
        return super().knows(block_hash) or self._on_disk(block_hash)

    def awaits(self, owner: Hashable, hashes: Iterable[bytes]) -> bool:
        """Return whether to wait for blocks that are read; begins to read them."""
        self._disk.enter()
        if (waits := self._waits.go_on(owner)) is not None:
            return waits
        if not self._disk.index:
            return False
        keys = [(self.hash_size, each) for each in takewhile(self.knows, hashes)]
        here = [self.memory.index[key].extent for key in keys if key in self.memory.index]
        for extent in reversed(dict.fromkeys(here)):
            self.memory.touch(extent)  # or what is read would push it out
        keys = [key for key in keys if key not in self.memory.index]
        unit_bytes = self.block_bytes * self.hash_size // self.block_size
        most = int(SHARE_READ * self.memory.num_available_bytes) // max(1, unit_bytes)
        return self._waits.begin(owner, keys, self, most)

    def _on_disk(self, block_hash: bytes) -> bool:
        return self._disk.index.get((self.hash_size, block_hash)) is not None

    def take_in(
        self, contents: Contents, num_bytes: int, fill: Callable[[Extent], None]
    ) -> Extent | None:
        """Return a new extent of what was read; None: there is no room, or others have it all."""
        if num_bytes > self.memory.num_available_bytes:
            return None
        num_blocks, block_size = contents.shape
        writer = HostBlocks(self.memory, block_size, num_bytes // num_blocks, contents.hash_size)
        extent = self.memory.add(writer, blocks_of(contents))
        try:
            fill(extent)
        except ValueError:
            self.memory.drop(extent)
            raise
        extent.is_proven = True
        self.memory.unpin(extent)
        return extent if extent in self.memory.extents else None

    def cancel(self, owner: Hashable) -> None:
        """Keep no room for a sequence, and read nothing for it."""
        super().cancel(owner)
        self._waits.forget(owner)

    def restore(self, places: Sequence[Place], blocks: Sequence[int]) -> None:
        """Copy blocks on the host to device blocks."""
        super().restore(places, blocks)
        self._disk.used(places)

    def idle(self) -> None:
        """Wait a moment for what is being read."""
        self._disk.pause()

    def learn_step(self, plan: StepPlan, mode: Mode, seconds: float, is_hidden: bool) -> None:
        """Learn how long prompt tokens take, of steps that are mostly prompts."""
        num_tokens = sum(item.num_tokens for item in plan.chunks)
        if 2 * num_tokens > plan.num_tokens and seconds > 0:  # without a clock it took none
            self._waits.prompts.learn(num_tokens, seconds)

    def reset(self, suspects: Collection[int] = ()) -> None:
        """The pools of the group are lost; a failed step has read `suspects`."""
        super().reset(suspects)
        self._disk.distrust(suspects)

    def clear_cache(self) -> None:
        """Find nothing by its hash any more, in any group."""
        super().clear_cache()
        self._disk.clear()

    def close(self) -> None:
        """Write what host memory has, and end."""
        self._disk.close(reversed(self.memory.idle))

    def check(self) -> None:
        """Check conservation of bytes, in host memory and on the disk."""
        super().check()
        self._disk.index.check()

    def states(self) -> Iterator[Any]:
        """Return what the group has done, and what the disk has."""
        yield from super().states()
        yield self._disk.told()


def blocks_of(contents: Contents) -> list[CachedPrefix | None]:
    """Return blocks by all of their units; None: some unit of it is found by nothing."""
    several = contents.block_size // contents.hash_size
    blocks: list[CachedPrefix | None] = []
    for units in batched(contents.units, several):
        found = [unit for unit in units if unit is not None]
        tokens = [token for unit in found for token in unit.tokens]
        hashes = [unit.block_hash for unit in found]
        is_whole = len(found) == several
        blocks.append(CachedPrefix(hashes[-1], tokens, hashes=hashes) if is_whole else None)
    return blocks
