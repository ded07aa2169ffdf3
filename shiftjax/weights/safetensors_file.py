"""One safetensors file, read by the library, which checks the header, and written as a stream.

Layout: header size (8 bytes, little endian), JSON header, then the tensors without a gap.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from shiftjax.arch.formats import DTYPES
from shiftjax.weights.source import CheckpointError, TensorInfo, bounds, is_ignored

_SIZE_BYTES = 8
_DTYPES = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "np") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return what the file holds; raise CheckpointError if its header is not what it must be."""
    with _opened(path) as file:
        names = (name for name in file.offset_keys() if not is_ignored(name))
        entries = {name: file.get_slice(name) for name in names}
        found = {name: (entry.get_dtype(), entry.get_shape()) for name, entry in entries.items()}
    problems = [f"{path}: header names {name} more than once" for name in _repeated(path)]
    problems += [
        f"{path}: tensor {name}: expected dtype {', '.join(_DTYPES)}, found {dtype}"
        for name, (dtype, _) in found.items()
        if dtype not in _DTYPES
    ]
    if problems:
        raise CheckpointError(*problems)
    return {
        name: TensorInfo(tuple(shape), _DTYPES[dtype], str(path))
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
    with _opened(Path(info.file)) as file:
        return np.asarray(file.get_slice(name)[index])


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
