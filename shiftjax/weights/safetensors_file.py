"""One safetensors file: header checked before use, ranges read from a memory map, streamed writes.

Layout: header size (8 bytes, little endian), JSON header, then the tensors without a gap.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from shiftjax.weights.source import CheckpointError, TensorInfo, bounds

MAX_HEADER_BYTES = 100 << 20
_SIZE_BYTES = 8
_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class StoredTensor(NamedTuple):
    """Where a tensor's bytes are."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # bytes from the start of the file


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check the header; raise CheckpointError naming every problem."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = _header_bytes(path, file.read(_SIZE_BYTES), size)
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    data_start = _SIZE_BYTES + header_bytes
    tensors, problems = {}, []
    for name, entry in _parse_json(path, raw).items():
        if name == "__metadata__":
            continue
        problem = _entry_problem(entry)
        if problem:
            problems.append(f"{path}: tensor {name}: {problem}")
        else:
            start = data_start + entry["data_offsets"][0]
            tensors[name] = StoredTensor(tuple(entry["shape"]), _DTYPES[entry["dtype"]], start)
    problems = problems or _layout_problems(path, tensors, data_start, size)
    if problems:
        raise CheckpointError(*problems)
    return tensors


def _header_bytes(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < _SIZE_BYTES:
        raise CheckpointError(f"{path}: expected a safetensors file, found {size} bytes in all")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header says it has {header_bytes} bytes, at most {MAX_HEADER_BYTES} "
            "are accepted; is this a safetensors file?"
        )
    if header_bytes > size - _SIZE_BYTES:
        raise CheckpointError(
            f"{path}: header says it has {header_bytes} bytes, the file ends after {size}; "
            "it was truncated"
        )
    return header_bytes


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError(f"{path}: header names {', '.join(twice)} more than once")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header must be a JSON object")
    return header


def _entry_problem(entry: Any) -> str | None:
    """Say what is wrong with one tensor's header entry, looked at on its own."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return "header entry must have dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        return f"expected dtype {', '.join(_DTYPES)}, found {dtype}"
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        return f"shape {shape} and data_offsets {offsets} must be lists of counts"
    expected, found = math.prod(shape) * _DTYPES[dtype].itemsize, offsets[1] - offsets[0]
    if expected != found:
        return f"expected {expected} bytes for shape {shape} of {dtype}, found {found}"
    return None


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _layout_problems(
    path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int
) -> list[str]:
    """Tensors must cover the data exactly: no overlap, no gap, nothing beyond the end."""
    problems, position = [], data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap"
            problems.append(
                f"{path}: tensor {name}: expected to start at byte {position}, found "
                f"{tensor.offset}; it {what}"
            )
        position = tensor.offset + math.prod(tensor.shape) * tensor.dtype.itemsize
        if position > size:
            problems.append(
                f"{path}: tensor {name}: ends at byte {position}, the file has {size}; "
                "it was truncated"
            )
    if not problems and position != size:
        problems.append(f"{path}: tensors end at byte {position}, the file has {size}")
    return problems


def read_range(path: Path, stored: StoredTensor, index: tuple[slice, ...]) -> np.ndarray:
    """Copy one range out of the file; only its pages are touched."""
    index = bounds(TensorInfo(stored.shape, stored.dtype, str(path)), index)
    if 0 in stored.shape:
        return np.zeros([part.stop - part.start for part in index], stored.dtype)
    # Mapped as bytes: NumPy cannot map a dtype that it did not define itself at every offset.
    num_bytes = math.prod(stored.shape) * stored.dtype.itemsize
    data = np.memmap(path, np.uint8, "r", offset=stored.offset, shape=(num_bytes,))
    return np.array(data.view(stored.dtype).reshape(stored.shape)[index], order="C", ndmin=0)


def write_file(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    pieces: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Write a file whose header follows from `tensors`; `pieces(name)` yields a tensor's rows.

    Peak host memory: one piece.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    position = 0
    for name, info in tensors.items():
        header[name] = {
            "dtype": _DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [position, position + info.num_bytes],
        }
        position += info.num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _SIZE_BYTES)  # keeps the data aligned for memory maps
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(_SIZE_BYTES, "little"))
        file.write(raw)
        for name in tensors:
            for piece in pieces(name):
                file.write(np.ascontiguousarray(piece).view(np.uint8).data)
