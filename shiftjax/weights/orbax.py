"""Orbax checkpoints keyed by Hugging Face's names, in a directory that explains itself.

DIRECTORY/config.json       the model, as Hugging Face writes it (`hf_config`)
DIRECTORY/tokenizer.json    and the other tokenizer files, where there were any
DIRECTORY/orbax/            the Orbax checkpoint: one flat dict, name -> array
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import tensorstore as ts

from shiftjax.arch.formats import DTYPES
from shiftjax.weights.hf_config import read_config
from shiftjax.weights.huggingface import cast_ranges, in_groups, write_config
from shiftjax.weights.source import CheckpointError, TensorInfo, TensorSource, bounds
from shiftjax.weights.typed_fields import read_json

CHECKPOINT = "orbax"
_STATE = "state"  # where Orbax keeps a checkpoint's arrays
_CHUNK_BYTES = 4 << 20  # rows that are read together
_GROUP_BYTES = 512 << 20


class OrbaxSource:
    """A TensorSource over such a directory; reads touch only the stored chunks of the range.

    Orbax says what the checkpoint holds; TensorStore, its storage layer, reads the ranges. Peak
    host memory of a read: the range plus the chunks (4 MiB of rows each) in flight.
    """

    def __init__(self, directory: Path, name: str | None = None):
        self.location = str(directory)
        self.config = read_config(directory, name)
        self._path = (directory / CHECKPOINT).resolve()
        self.tensors: Mapping[str, TensorInfo] = _read_metadata(self._path)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`; a damaged chunk raises CheckpointError."""
        info = self.tensors[name]
        index = bounds(info, index)
        spec = {
            "driver": "zarr3",
            "fill_missing_data_reads": False,  # a lost chunk is an error, never zeros
            "kvstore": {**_storage(self._path), "path": f"{name}/"},
        }
        try:
            array = ts.open(spec, read=True, open=True).result()
            return np.ascontiguousarray(array[index].read().result())
        except (ValueError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"{info.file}: tensor {name}: cannot be read, the checkpoint is damaged: {reason}"
            ) from error


def _storage(path: Path) -> dict[str, Any]:
    """TensorStore's name of the key-value store in which Orbax keeps the arrays."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path / _STATE}/"}}


def _read_metadata(path: Path) -> dict[str, TensorInfo]:
    if not (path / "_CHECKPOINT_METADATA").is_file():
        raise CheckpointError(f"{path}: expected a finished Orbax checkpoint, found none")
    read_json(path / "_CHECKPOINT_METADATA")  # Orbax would ignore that it is damaged
    try:
        # A damaged manifest fails here once, and not in one of Orbax's threads per tensor.
        ts.KvStore.open(_storage(path)).result().read("manifest").result()
        entries = ocp.metadata(str(path)).metadata
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: its Orbax metadata cannot be read: {reason}") from error
    if not isinstance(entries, dict):  # also where Orbax logged an error and returned None
        raise CheckpointError(f"{path}: its Orbax metadata names no flat dict of arrays")
    tensors, problems = {}, []
    for name, entry in entries.items():
        dtype, shape = getattr(entry, "dtype", None), getattr(entry, "shape", None)
        if dtype not in DTYPES.values() or shape is None:
            problems.append(
                f"{path}: tensor {name}: expected {', '.join(DTYPES)}, found {dtype or entry}"
            )
        else:
            tensors[name] = TensorInfo(tuple(shape), np.dtype(dtype), str(path))
    if problems:
        raise CheckpointError(*problems)
    return tensors


def save_orbax(source: TensorSource, directory: Path, dtype: str | None = None) -> None:
    """Write `config.json` and the checkpoint; `dtype` None keeps what is stored.

    Tensors are saved in groups of about 512 MiB through Orbax's partial saves. Peak host memory:
    twice the larger of one group and the largest tensor. Values are checked to be finite.
    """
    tensors = write_config(source, directory, dtype)
    path = str((directory / CHECKPOINT).resolve())
    with _saving_context():
        for names in in_groups(tensors, _GROUP_BYTES):
            group = {
                name: np.concatenate(list(cast_ranges(source, name, tensors[name].dtype)))
                for name in names
            }
            ocp.partial.save(path, group)
        ocp.partial.finalize(path)


def _saving_context() -> ocp.Context:
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.array.saving.use_compression = False  # trained weights hardly shrink, loading slows
    return context
