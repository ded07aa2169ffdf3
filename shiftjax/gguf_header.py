"""The header of a GGUF file, read with every count, length and offset checked against the file.

The `gguf` library's reader trusts what a file says and builds several objects per vocabulary
entry; this parser checks first and takes a tenth of the time. Dequantisation is the library's.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_SCALARS = {  # value type: struct code
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
_DEFAULT_ALIGNMENT = 32
_LEAST_TENSOR_BYTES = 32  # an empty name, one dimension
_LEAST_VALUE_BYTES = 13  # an empty key, one byte


class GgufTensor(NamedTuple):
    """One stored tensor; `shape` has rows first, as NumPy has it."""

    shape: tuple[int, ...]
    kind: "GGMLQuantizationType"
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufHeader(NamedTuple):
    """Everything in front of the tensors' data."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class GgufError(ValueError):
    """A file that is no GGUF, or contradicts itself: one line per problem, each naming the file."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class _Malformed(Exception):
    """What is wrong, without the name of the file; becomes a GgufError."""


class _Cursor:
    """Reads values one after the other and refuses to leave the file."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.position = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise _Malformed(
                f"{what} needs {num_bytes} bytes at byte {self.position}, the file ends after "
                f"{len(self.data)}; it was truncated or a length is wrong"
            )
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def numbers(self, code: str, count: int, what: str) -> list[Any]:
        raw = self.take(count * struct.calcsize(f"<{code}"), what)
        return list(struct.unpack(f"<{count}{code}", raw))

    def string(self, what: str) -> str:
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise _Malformed(f"{what} is not UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        raise _Malformed(f"{what} has the unknown value type {kind}")

    def array(self, what: str) -> list[Any]:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], count, what)
        if kind != _STRING:
            raise _Malformed(f"{what} is an array of value type {kind}, expected plain values")
        # A string takes 8 bytes at least, so a count that lies ends in `take`, not in memory.
        return [self.string(what) for _ in range(count)]


def read_header(path: Path) -> GgufHeader:
    """Parse and check; raise GgufError naming the file and what is wrong in it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except OSError as error:
        raise GgufError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # mmap refuses an empty file
        raise GgufError(f"{path}: expected a GGUF file, found 0 bytes") from error
    except _Malformed as error:
        raise GgufError(*(f"{path}: {line}" for line in str(error).splitlines())) from error


def _parse(cursor: _Cursor) -> GgufHeader:
    magic, version = cursor.take(4, "magic"), cursor.number("I", "version")
    if magic != _MAGIC:
        raise _Malformed(f"expected a GGUF file, found {magic!r} at its start")
    if version not in _VERSIONS:
        raise _Malformed(f"expected GGUF version 2 or 3 (little endian), found {version}")
    num_tensors, num_values = cursor.numbers("Q", 2, "counts")
    if num_tensors * _LEAST_TENSOR_BYTES + num_values * _LEAST_VALUE_BYTES > len(cursor.data):
        raise _Malformed(
            f"header says {num_tensors} tensors and {num_values} metadata keys, too many for "
            f"{len(cursor.data)} bytes; it was truncated or a count is wrong"
        )
    metadata: dict[str, Any] = {}
    for number in range(num_values):
        key = cursor.string(f"key {number + 1} of {num_values}")
        if key in metadata:
            raise _Malformed(f"metadata key {key} appears twice")
        metadata[key] = cursor.value(cursor.number("I", key), key)
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for number in range(num_tensors):
        name = cursor.string(f"tensor name {number + 1} of {num_tensors}")
        if name in infos:
            raise _Malformed(f"tensor {name} appears twice")
        infos[name] = _tensor_info(cursor, name)
    return GgufHeader(metadata, _place(infos, _data_start(cursor, metadata), len(cursor.data)))


def _tensor_info(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], int, int]:
    num_dims = cursor.number("I", name)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _Malformed(f"tensor {name}: expected 1 to {_MAX_DIMS} dimensions, found {num_dims}")
    shape = tuple(reversed(cursor.numbers("Q", num_dims, name)))
    return shape, cursor.number("I", name), cursor.number("Q", name)


def _data_start(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Malformed(f"general.alignment must be a power of two, found {alignment!r}")
    return -(-cursor.position // alignment) * alignment


def _place(
    infos: dict[str, tuple[tuple[int, ...], int, int]], start: int, size: int
) -> dict[str, GgufTensor]:
    """Turn relative offsets into checked ranges of the file that do not overlap."""
    tensors, problems = {}, []
    for name, (shape, raw_kind, offset) in infos.items():
        try:
            tensors[name] = _tensor(shape, raw_kind, start + offset, size)
        except _Malformed as error:
            problems.append(f"tensor {name}: {error}")
    position, before = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < position:
            problems.append(
                f"tensor {name}: starts at byte {tensor.offset} inside {before}, which ends at "
                f"{position}"
            )
        position, before = tensor.offset + tensor.num_bytes, f"tensor {name}"
    if problems:
        raise _Malformed("\n".join(problems))
    return tensors


def _tensor(shape: tuple[int, ...], raw_kind: int, offset: int, size: int) -> GgufTensor:
    # Here, because the names of this module are needed where there are no such files, too.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(raw_kind)
    except ValueError as error:
        raise _Malformed(f"unknown tensor type {raw_kind}") from error
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise _Malformed(f"rows of {shape[-1]} are no multiple of {kind.name}'s {block_size}")
    num_bytes = math.prod(shape) // block_size * block_bytes
    if not num_bytes:
        raise _Malformed(f"shape {list(shape)} is empty")
    if offset + num_bytes > size:
        raise _Malformed(
            f"{kind.name} of shape {list(shape)} needs bytes {offset} to {offset + num_bytes}, "
            f"the file has {size}; it was truncated or an offset is wrong"
        )
    return GgufTensor(shape, kind, offset, num_bytes)
