"""Files of records, a line each, that grow at their end, and are whole after any kill. No JAX."""

import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path


def private(path: str, flags: int) -> int:
    """The `opener` of files that nobody else may read."""
    return os.open(path, flags, 0o600)


def append(file: FileIO, record: bytes) -> None:
    """Write all of a record, or nothing where the disk is full. Raises OSError."""
    end, rest = os.fstat(file.fileno()).st_size, record
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with suppress(OSError):  # a device or a pipe keeps what it has
            file.truncate(end)
        raise


def whole_records(path: Path) -> Iterator[bytes]:
    """The records of a file, after a last one that is cut has been removed. Raises OSError."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            yield line
    os.truncate(path, end)
