"""A chunk: the KV blocks of an extent as one file. Written whole or not at all. No JAX.

    magic | bytes of header, of payload | CRC-32 of both | header (JSON) | payload

The header says whose blocks these are (`identity`) and by which hashes and tokens they are found.
A file gets its name by a rename when all of it is written, so a process that is killed leaves a
temporary name. Nothing is synchronised to the device: what a power failure leaves half-written is
found by its size or its checksums.
"""

import json
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from shiftjax.core.blocks import CachedPrefix

SUFFIX, TEMPORARY = ".kv", ".tmp"
_MAGIC = b"SJKV0001"
_START = struct.Struct("<8sIQII")
_MOST_HEADER = 1 << 26


class ChunkError(Exception):
    """A file is no chunk, or not what was written."""


class BlockShape(NamedTuple):
    """Of an extent."""

    num_blocks: int
    block_size: int  # tokens


class Contents(NamedTuple):
    """What a chunk says of its blocks."""

    identity: str  # of the model, its weights and the format of their KV
    block_size: int  # tokens
    hash_size: int  # tokens of a unit, of which a block has some whole number
    units: list[CachedPrefix | None]  # None: found by nothing
    sizes: list[int]  # bytes of the pieces of the payload

    @property
    def shape(self) -> BlockShape:
        """Of the extent."""
        return BlockShape(len(self.units) * self.hash_size // self.block_size, self.block_size)


class Header(NamedTuple):
    """The beginning of a file."""

    contents: Contents
    payload_bytes: int
    payload_sum: int


def most_bytes(num_units: int, hash_size: int, payload_bytes: int) -> int:
    """Return the most bytes that the file of such a chunk can have."""
    return payload_bytes + 512 + num_units * (64 + 12 * hash_size)


def write_chunk(path: Path, contents: Contents, pieces: Sequence[np.ndarray]) -> int:
    """Write a file and return its bytes. Raises OSError, and leaves nothing then."""
    views = [memoryview(np.ascontiguousarray(each).view(np.uint8).reshape(-1)) for each in pieces]
    header = json.dumps(_plain(contents._replace(sizes=[len(view) for view in views]))).encode()
    total = 0
    for view in views:
        total = zlib.crc32(view, total)
    num_bytes = sum(map(len, views))
    start = _START.pack(_MAGIC, len(header), num_bytes, zlib.crc32(header), total)
    temporary = path.with_suffix(TEMPORARY)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            for part in (start, header, *views):
                _write_all(file, part)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return len(start) + len(header) + num_bytes


def read_header(path: Path) -> Header:
    """Return how a file begins. Raises OSError, or ChunkError for one that is not whole."""
    with path.open("rb") as file:
        return _header_of(file)


def read_chunk(path: Path) -> tuple[Contents, list[np.ndarray]]:
    """Return a chunk with the bytes of its pieces. Raises OSError and ChunkError."""
    with path.open("rb", buffering=0) as file:
        contents, num_bytes, expected = _header_of(file)
        payload = np.empty(num_bytes, np.uint8)
        if _read_into(file, memoryview(payload)) != num_bytes:
            raise ChunkError("it is shorter than it says")
    if zlib.crc32(payload) != expected:
        raise ChunkError("its payload has another checksum")
    ends = np.cumsum(contents.sizes).tolist()
    if not ends or ends[-1] != num_bytes:
        raise ChunkError("its pieces are not its payload")
    return contents, np.split(payload, ends[:-1])


def _header_of(file: BinaryIO) -> Header:
    start = file.read(_START.size)
    if len(start) != _START.size:
        raise ChunkError("it is empty or cut off")
    magic, length, num_bytes, header_sum, payload_sum = _START.unpack(start)
    if magic != _MAGIC or length > _MOST_HEADER:
        raise ChunkError("it is of another kind")
    header = file.read(length)
    if len(header) != length or zlib.crc32(header) != header_sum:
        raise ChunkError("its header has another checksum")
    if os.fstat(file.fileno()).st_size != _START.size + length + num_bytes:
        raise ChunkError("it has another size than it says")
    try:
        return Header(_of_plain(json.loads(header)), num_bytes, payload_sum)
    except (KeyError, TypeError, ValueError) as error:
        raise ChunkError("its header lacks something") from error


def _plain(contents: Contents) -> dict[str, Any]:
    units = [
        None if each is None else (each.block_hash.hex(), each.tokens) for each in contents.units
    ]
    return contents._asdict() | {"units": units}


def _of_plain(plain: dict[str, Any]) -> Contents:
    units = [None if each is None else _unit_of(*each) for each in plain["units"]]
    return Contents(**plain)._replace(units=units)


def _unit_of(name: str, tokens: list[int]) -> CachedPrefix:
    return CachedPrefix(bytes.fromhex(name), tokens)


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _read_into(file: BinaryIO, target: memoryview) -> int:
    done = 0
    while done < len(target) and (count := file.readinto(target[done:])):  # pyright: ignore
        done += count
    return done
