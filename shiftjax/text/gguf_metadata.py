"""GGUF key-value metadata without the tensors: one pass over the bytes, tens of milliseconds.

`gguf.GGUFReader` makes several NumPy views for every array element, which takes seconds for the
hundred thousand strings of a vocabulary.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from shiftjax.text.errors import TokenizerError

# Value types of the GGUF specification, version 3: struct codes of the scalars.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)  # version 1 had 32-bit lengths


class _Cursor:
    """A position in the file; every read moves it on and is checked against the file's end."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.offset = 0

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{count}{code}")
        return values

    def string(self) -> str:
        (length,) = self.scalars("Q")
        raw = self.data[self.offset : self.offset + length]
        if len(raw) != length:
            raise struct.error("string past the end of the file")
        self.offset += length
        return raw.decode("utf-8")

    def value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            (item_type,), (count,) = self.scalars("I"), self.scalars("Q")
            if item_type in _SCALARS:
                self._require(count * struct.calcsize(_SCALARS[item_type]))
                return list(self.scalars(_SCALARS[item_type], count))
            self._require(count)
            return [self.value(item_type) for _ in range(count)]
        if value_type not in _SCALARS:
            raise struct.error(f"unknown value type {value_type}")
        return self.scalars(_SCALARS[value_type])[0]

    def _require(self, num_bytes: int) -> None:
        """Refuse a length that the file cannot hold, before anything is allocated for it."""
        if num_bytes > len(self.data) - self.offset:
            raise struct.error("array past the end of the file")


def _read_header(cursor: _Cursor, path: Path) -> int:
    """Check magic and version; return the number of key-value pairs."""
    if bytes(cursor.data[:4]) != b"GGUF":
        raise TokenizerError(f"{path} is not a GGUF file (it does not start with 'GGUF').")
    cursor.offset = 4
    (version,) = cursor.scalars("I")
    if version not in _VERSIONS:
        raise TokenizerError(
            f"{path}: GGUF version {version:#x} is not supported (little-endian 2 and 3 are)."
        )
    _, num_pairs = cursor.scalars("Q", 2)
    return num_pairs


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Return the key-value pairs of a GGUF file: numbers, booleans, strings and lists of these.

    Raises `TokenizerError` for a file that cannot be read, is no GGUF, or is cut short.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            pairs = {}
            for _ in range(_read_header(cursor, path)):
                key = cursor.string()
                pairs[key] = cursor.value(cursor.scalars("I")[0])
            return pairs
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}.") from error
    except (struct.error, ValueError, RecursionError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{path} is damaged or cut short: {error}.") from error
