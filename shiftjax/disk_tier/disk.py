"""The chunks in a directory, and who reads and writes them. No JAX.

The thread that steps the engine owns the index and says what is written, read and removed. Two
threads do it, one for each direction, and put what came of it into a queue that `enter` empties.

    extent falls out of host memory --write--> file --read--> extent in host memory

A directory is written by one process at a time, which has its lock; others read what they found
there when they started. When a write fails, nothing more is written.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import numpy as np

from shiftjax.core.tier import Extent, Place
from shiftjax.disk_tier.chunk_file import (
    SUFFIX,
    TEMPORARY,
    BlockShape,
    ChunkError,
    Contents,
    most_bytes,
    read_chunk,
    read_header,
    write_chunk,
)
from shiftjax.disk_tier.chunk_index import Chunk, ChunkIndex, Key
from shiftjax.disk_tier.disk_stats import DiskStats
from shiftjax.host_tier.extents import HostBlocks

MOST_UNWRITTEN = 256 << 20  # bytes that wait for the disk, beside those of host memory
LONGEST_PAUSE = 2e-3  # seconds that a turn waits for a read when nothing else can be done
CLOSE_SECONDS = 10.0  # for what host memory has, at the end
AGE_SECONDS = 1e-3  # that times of files differ by
LOCK = "lock"
logger = logging.getLogger(__name__)
Job = Callable[[], None]


class Payloads(Protocol):
    """What extents hold, wherever a backend has it."""

    def get(self, number: int) -> Any:
        """Return what an extent holds, as it lies in host memory; None: nothing."""
        ...

    def pieces(self, payload: Any) -> Sequence[np.ndarray]:
        """Return it as arrays that do not depend on who wrote it; waits until it is there."""
        ...

    def put(self, number: int, shape: BlockShape, pieces: Sequence[np.ndarray]) -> None:
        """Have an extent hold such arrays, given as bytes. Raises ValueError if they do not fit."""
        ...


class Reader(Protocol):
    """A group that has room in host memory for what is read."""

    def take_in(
        self, contents: Contents, num_bytes: int, fill: Callable[[Extent], None]
    ) -> Extent | None:
        """Return a new extent of so many bytes, found from now on, once it is filled.

        None: there is no room, or others have them all. Raises what `fill` does.
        """
        ...


class DiskPlace(NamedTuple):
    """Where chunks are, how many bytes they may have, and of what model they are."""

    directory: Path
    num_bytes: int
    identity: str
    payloads: Payloads


class Threads(NamedTuple):
    """Who runs jobs, in their order; readers and writers beside each other."""

    write: Callable[[Job], object]
    read: Callable[[Job], object]


class _Origin(NamedTuple):
    """Of an extent that was read."""

    chunk: Chunk
    unused: set[int]  # units


class Disk:
    """Reads and writes the chunks of one model; all groups of an engine share it."""

    def __init__(self, place: DiskPlace, threads: Threads | None = None):
        self.index = ChunkIndex(place.num_bytes)
        self.stats = DiskStats()
        self.num_unread_bytes = self.num_unread_units = self._num_unwritten = 0
        self.watch: Callable[[int, float], None] = lambda num_bytes, seconds: None  # every read
        self._place = place
        self._done: SimpleQueue[Job] = SimpleQueue()
        self._origins: dict[int, _Origin] = {}  # by number of an extent
        self._epoch = 0  # of what may be found
        self._is_off = False  # nothing is written any more
        self._lock: int | None = None
        self._own: list[ThreadPoolExecutor] = []
        if threads is None:
            self._own = [ThreadPoolExecutor(1, f"disk-{name}") for name in ("writes", "reads")]
            threads = Threads(*(each.submit for each in self._own))
        self._threads = threads
        threads.write(self._open)

    # ------------------------------------------------------------------ the engine's thread

    def enter(self) -> None:
        """Take over what the other threads have done."""
        while not self._done.empty():
            self._done.get_nowait()()

    def pause(self) -> None:
        """Wait a moment for a read, if there is one."""
        if self.num_unread_bytes:
            try:
                self._done.get(timeout=LONGEST_PAUSE)()
            except Empty:
                return

    def write(self, extent: Extent, *, age: int | None = None) -> None:
        """Keep what an extent has that is about to leave host memory.

        `age`: all leaves it, and so many extents have been used since this one.
        """
        self._origins.pop(extent.number, None)
        writer, units = extent.writer, list(extent.contents)
        assert isinstance(writer, HostBlocks)
        keys = [(writer.hash_size, each.block_hash) for each in units if each is not None]
        if not (extent.is_proven and keys) or self.index.touch_all(keys):
            return
        payload, num_bytes = self._place.payloads.get(extent.number), extent.num_bytes
        is_many = age is None and self._num_unwritten + num_bytes > MOST_UNWRITTEN
        path = self._place.directory / f"{self._place.identity[:12]}-{uuid4().hex}{SUFFIX}"
        chunk = Chunk(path, most_bytes(len(units), writer.hash_size, num_bytes), ())
        removed = None
        if not (self._is_off or is_many or payload is None):
            removed = self.index.add(chunk)
        if removed is None:
            self.stats.num_lost_writes += 1
            return
        self._unlink(removed)
        self._num_unwritten += num_bytes
        sizes = writer.block_size, writer.hash_size
        contents = Contents(self._place.identity, *sizes, units, [])
        epoch = self._epoch

        def job() -> None:
            written = self._try_to_write(path, contents, payload, age or 0)
            self._done.put(lambda: self._written(chunk, keys, written, num_bytes, epoch))

        self._threads.write(job)

    def read(self, chunk: Chunk, reader: Reader) -> None:
        """Bring a chunk to host memory, unless somebody does."""
        if chunk.is_read:
            return
        chunk.is_read = True
        num_bytes, epoch = chunk.num_bytes, self._epoch
        self.num_unread_bytes += num_bytes
        self.num_unread_units += len(chunk.keys)

        def job() -> None:
            begin = time.perf_counter()
            found: tuple[Contents, Sequence[np.ndarray]] | str
            try:
                found = read_chunk(chunk.path)
                with suppress(OSError):  # where nothing may be written
                    os.utime(chunk.path)  # used: a later process sorts files by it
            except Exception as error:
                found = str(error)
            seconds = time.perf_counter() - begin
            self._done.put(lambda: self._arrived(chunk, reader, found, epoch, num_bytes, seconds))

        self._threads.read(job)

    def used(self, places: Iterable[Place]) -> None:
        """Count blocks that go to devices: hits of the disk where they were read for this."""
        for extent, unit in places:
            origin = self._origins.get(extent.number)
            if origin is not None and unit in origin.unused:
                origin.unused.remove(unit)
                self.stats.num_hit_tokens += extent.writer.hash_size

    def distrust(self, numbers: Iterable[int]) -> None:
        """Remove the chunks that these extents came from: a step that read them has failed."""
        for number in numbers:
            origin = self._origins.pop(number, None)
            if origin is not None:
                self._drop(origin.chunk, "a step that read it has failed")

    def clear(self) -> None:
        """Find nothing any more of what has been written up to now."""
        self._epoch += 1
        self._origins.clear()
        own = [chunk for chunk in self.index.chunks() if chunk.keys]
        for chunk in own:
            self.index.remove(chunk)
        self._unlink(own)

    def close(self, extents: Iterable[Extent] = ()) -> None:
        """Write these extents, the most useful first, while there is time; then nothing more."""
        self.enter()
        if self._own and not self._is_off:
            for age, extent in enumerate(extents):
                self.write(extent, age=age)
            try:
                self._own[0].submit(lambda: None).result(CLOSE_SECONDS)
            except TimeoutError:
                logger.warning("disk cache: there was no time to write all of host memory")
        self._is_off = True
        for each in self._own:
            each.shutdown(wait=False, cancel_futures=True)  # a read may hang
        self.enter()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def told(self) -> DiskStats:
        """Return the counters, and the state of now."""
        self.stats.num_used_bytes = self.index.num_used_bytes
        self.stats.num_bytes = self.index.num_bytes
        self.stats.is_writing = not self._is_off
        return self.stats

    # ------------------------------------------------------------------ what has been done

    def _written(
        self, chunk: Chunk, keys: Sequence[Key], written: int, num_bytes: int, epoch: int
    ) -> None:
        self._num_unwritten -= num_bytes
        if chunk not in self.index:  # it had to go while it was written
            return
        if not written or epoch != self._epoch:
            self.index.remove(chunk)
            self._unlink([chunk] if written else [])
            self.stats.num_lost_writes += not written
            return
        self.index.resize(chunk, written)
        self.index.enter(chunk, keys)
        self.stats.num_written_bytes += written

    def _arrived(
        self,
        chunk: Chunk,
        reader: Reader,
        found: tuple[Contents, Sequence[np.ndarray]] | str,
        epoch: int,
        num_bytes: int,
        seconds: float,
    ) -> None:
        chunk.is_read = False
        self.num_unread_bytes -= num_bytes
        self.num_unread_units -= len(chunk.keys)
        if epoch != self._epoch:
            return
        if isinstance(found, str):
            self._drop(chunk, found)
            return
        self.watch(num_bytes, seconds)
        self.stats.num_read_bytes += num_bytes
        self.index.touch(chunk)
        contents, pieces = found
        shape = contents.shape

        def fill(extent: Extent) -> None:
            self._place.payloads.put(extent.number, shape, pieces)

        try:
            extent = reader.take_in(contents, sum(contents.sizes), fill)
        except ValueError as error:
            self._drop(chunk, str(error))
            return
        if extent is not None:
            self._origins[extent.number] = _Origin(chunk, set(range(len(contents.units))))

    def _drop(self, chunk: Chunk, problem: str) -> None:
        """Use a chunk no more."""
        if chunk in self.index:
            logger.warning("disk cache: %s is not used: %s", chunk.path.name, problem)
            self.stats.num_bad_chunks += 1
            self.index.remove(chunk)
            self._unlink([chunk])

    def _opened(self, found: Sequence[Chunk], num_bad: int, epoch: int) -> None:
        """Enter files, the most recently used one first; what is written by now is younger."""
        self.stats.num_bad_chunks += num_bad
        for chunk in found:
            if (epoch != self._epoch and chunk.keys) or self.index.add(
                chunk, is_oldest=True
            ) is None:
                self._unlink([chunk])

    # ------------------------------------------------------------------ the other threads

    def _unlink(self, chunks: Sequence[Chunk]) -> None:
        paths = [chunk.path for chunk in chunks]
        if paths and not self._is_off:
            self._threads.write(lambda: _unlink_all(paths))

    def _try_to_write(self, path: Path, contents: Contents, payload: Any, age: int) -> int:
        """Write a file and return its bytes; 0: it was not written."""
        if self._is_off:
            return 0
        try:
            written = write_chunk(path, contents, self._place.payloads.pieces(payload))
            if age:  # a later process sorts files by when they were used
                used = time.time() - age * AGE_SECONDS
                os.utime(path, (used, used))
            return written
        except Exception as error:  # a copy to the host that failed, too
            self._turn_off(error)
            return 0

    def _turn_off(self, reason: object) -> None:
        if not self._is_off:
            self._is_off = True
            where = self._place.directory
            logger.warning("disk cache: %s is not written to any more: %s", where, reason)

    def _open(self) -> None:
        """Lock the directory and look at its files."""
        directory, epoch = self._place.directory, 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(directory / LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                self._turn_off("another process does")
            else:
                self._lock = lock
                _unlink_all(directory.glob(f"*{TEMPORARY}"))
        except OSError as error:
            self._turn_off(error)
        found, bad = _look(directory, self._place.identity)
        if not self._is_off:
            _unlink_all(bad)
        self._done.put(lambda: self._opened(found, len(bad), epoch))


def _look(directory: Path, identity: str) -> tuple[list[Chunk], list[Path]]:
    """Return the chunks in a directory, the most recently used one first, and files that are none.

    Those of other models have no keys: they only take room.
    """
    found: list[tuple[float, Chunk]] = []
    bad: list[Path] = []
    try:
        paths = list(directory.glob(f"*{SUFFIX}"))
    except OSError:
        paths = []
    for path in paths:
        try:
            status, contents = path.stat(), read_header(path).contents
        except ChunkError:
            bad.append(path)
            continue
        except OSError:
            continue
        keys = ()
        if contents.identity == identity:
            units = [each for each in contents.units if each is not None]
            keys = tuple((contents.hash_size, each.block_hash) for each in units)
        found.append((status.st_mtime, Chunk(path, status.st_size, keys)))
    found.sort(key=lambda pair: -pair[0])
    return [chunk for _, chunk in found], bad


def _unlink_all(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            continue
