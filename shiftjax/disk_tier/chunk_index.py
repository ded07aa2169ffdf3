"""Which chunks there are, by what their blocks are found, within a budget of bytes. No JAX.

Only the thread that steps the engine touches it.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Key = tuple[int, bytes]  # tokens of a unit, its hash


@dataclass(eq=False, slots=True)
class Chunk:
    """A file, and by what its blocks are found."""

    path: Path
    num_bytes: int  # of the file; of one that is being written, what it may have at most
    keys: Collection[Key]  # none: of another model, or nothing of it is found yet
    is_read: bool = False  # by somebody, now


class ChunkIndex:
    """Chunks of at most `num_bytes`; the least recently used one goes first."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self.num_used_bytes = 0
        self._chunks: OrderedDict[Chunk, None] = OrderedDict()  # least recently used first
        self._places: dict[Key, Chunk] = {}

    def __contains__(self, chunk: Chunk) -> bool:
        """Return whether a chunk has not been removed."""
        return chunk in self._chunks

    def __len__(self) -> int:
        """Return how many blocks can be found."""
        return len(self._places)

    def get(self, key: Key) -> Chunk | None:
        """Return the chunk that has a block."""
        return self._places.get(key)

    def add(self, chunk: Chunk, *, is_oldest: bool = False) -> list[Chunk] | None:
        """Add a chunk; returns what had to go, or None where there is no room: it is not added.

        Of chunks with the same block the one that was added last is found.
        """
        removed: list[Chunk] = []
        while self.num_used_bytes + chunk.num_bytes > self.num_bytes:
            oldest = next(iter(self._chunks), None)
            if oldest is None or is_oldest:
                return None
            self.remove(oldest)
            removed.append(oldest)
        self._chunks[chunk] = None
        if is_oldest:
            self._chunks.move_to_end(chunk, last=False)
        self.num_used_bytes += chunk.num_bytes
        self.enter(chunk, chunk.keys)
        return removed

    def enter(self, chunk: Chunk, keys: Collection[Key]) -> None:
        """Have blocks of a chunk found from now on."""
        chunk.keys = keys
        self._places.update(dict.fromkeys(keys, chunk))

    def resize(self, chunk: Chunk, num_bytes: int) -> None:
        """A chunk has turned out to have no more than so many bytes."""
        self.num_used_bytes += num_bytes - chunk.num_bytes
        chunk.num_bytes = num_bytes

    def touch(self, chunk: Chunk) -> None:
        """A chunk is the most recently used one now."""
        if chunk in self._chunks:
            self._chunks.move_to_end(chunk)

    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk."""
        del self._chunks[chunk]
        self.num_used_bytes -= chunk.num_bytes
        for key in chunk.keys:
            if self._places.get(key) is chunk:
                del self._places[key]

    def chunks(self) -> Iterator[Chunk]:
        """Yield all chunks, the least recently used one first."""
        yield from list(self._chunks)

    def touch_all(self, keys: Sequence[Key]) -> bool:
        """Return whether all of these blocks are here; then they have been used now."""
        chunks = [self._places.get(key) for key in keys]
        found = [chunk for chunk in chunks if chunk is not None]
        if len(found) < len(keys):
            return False
        for chunk in dict.fromkeys(found):
            self.touch(chunk)
        return True

    def check(self) -> None:
        """Check that counts agree with chunks. Raises RuntimeError at the first breach."""
        used = sum(chunk.num_bytes for chunk in self._chunks)
        if used != self.num_used_bytes or used > self.num_bytes:
            known = f"{self.num_used_bytes} of {self.num_bytes}"
            raise RuntimeError(f"The disk has chunks of {used} bytes, not {known}.")
        for key, chunk in self._places.items():
            if chunk not in self._chunks or key not in chunk.keys:
                raise RuntimeError("The index of the disk leads to a chunk that is gone.")
