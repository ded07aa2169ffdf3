"""One safetensors file, read by the library, which checks the header, and written as a stream.

Layout: header size (8 bytes, little endian), JSON header, then the tensors without a gap.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from shiftjax.arch.formats import DTYPES
from shiftjax.weights.source import CheckpointError, TensorInfo, bounds, is_ignored

_SIZE_BYTES = 8
_DTYPES = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What matrices are quantised to, and the words that such numbers are packed in.
_EIGHT_BITS = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_QUANTISED = _EIGHT_BITS | {
    name: np.dtype(kind)
    for name, kind in (("I8", np.int8), ("U8", np.uint8), ("I32", np.int32), ("I64", np.int64))
}


_UNSAID = ", and config.json has no quantization_config that says what such numbers mean"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "np") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_header(path: Path, *, is_quantised: bool = False) -> dict[str, TensorInfo]:
    """Return what the file holds; raise CheckpointError if its header is not what it must be.

    Number formats are those of `TensorInfo`, or, of a checkpoint that `is_quantised`, others too.
    """
    dtypes = _DTYPES | _QUANTISED if is_quantised else _DTYPES
    with _opened(path) as file:
        names = (name for name in file.offset_keys() if not is_ignored(name))
        entries = {name: file.get_slice(name) for name in names}
        found = {name: (entry.get_dtype(), entry.get_shape()) for name, entry in entries.items()}
    problems = [f"{path}: header names {name} more than once" for name in _repeated(path)]
    problems += [
        f"{path}: tensor {name}: expected dtype {', '.join(dtypes)}, found {dtype}"
        f"{'' if is_quantised or dtype not in _QUANTISED else _UNSAID}"
        for name, (dtype, _) in found.items()
        if dtype not in dtypes
    ]
    if problems:
        raise CheckpointError(*problems)
    return {
        name: TensorInfo(tuple(shape), dtypes[dtype], str(path))
        for name, (dtype, shape) in found.items()
    }


def _repeated(path: Path) -> list[str]:
    """Names that the header has twice: the library takes the last one and says nothing."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(_SIZE_BYTES), "little"))
    counts = Counter(name for name, _ in json.loads(header, object_pairs_hook=list))
    return [name for name, count in counts.items() if count > 1]


def read_range(name: str, info: TensorInfo, index: tuple[slice, ...]) -> np.ndarray:
    """Copy one range of a tensor out of its file; only its pages are touched."""
    index = bounds(info, index)
    if any(part.start == part.stop for part in index):  # which the library refuses
        return np.zeros([part.stop - part.start for part in index], info.dtype)
    if info.dtype in _EIGHT_BITS.values():
        return np.array(_mapped(name, info)[index], order="C")
    with _opened(Path(info.file)) as file:
        return np.asarray(file.get_slice(name)[index])


def _mapped(name: str, info: TensorInfo) -> np.ndarray:
    """A tensor of a format that the library has no NumPy type for, where it lies in the file."""
    with _opened(Path(info.file)), Path(info.file).open("rb") as file:  # its header is checked
        size = int.from_bytes(file.read(_SIZE_BYTES), "little")
        start, _ = json.loads(file.read(size))[name]["data_offsets"]
    raw = np.memmap(info.file, np.uint8, "r", _SIZE_BYTES + size + start, (info.num_bytes,))
    return np.asarray(raw).view(info.dtype).reshape(info.shape)


def write_file(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    pieces: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Write a file whose header follows from `tensors`; `pieces(name)` yields a tensor's rows.

    Peak host memory: one piece.
    """
    # transformers refuses a file that names no framework of its list.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
