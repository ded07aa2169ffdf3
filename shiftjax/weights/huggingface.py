"""Hugging Face directories: `config.json` and safetensors, in one file or in indexed shards."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from shiftjax.arch.formats import DTYPES
from shiftjax.weights.hf_config import read_config, read_json, to_json
from shiftjax.weights.hf_names import places_of, stacks_of
from shiftjax.weights.quant_config import read_method, widened_words
from shiftjax.weights.quantised import present
from shiftjax.weights.safetensors_file import read_header, write_file
from shiftjax.weights.source import (
    OF_INPUTS,
    OF_SCALE,
    CheckpointError,
    TensorInfo,
    TensorSource,
    bounds,
    check_finite,
    is_ignored,
    matrix_and_part,
    part_shape,
    row_ranges,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
logger = logging.getLogger(__name__)
ReadHeader = Callable[[Path], dict[str, TensorInfo]]


class HuggingFaceSource:
    """A TensorSource over a directory; every header is read and checked when it is opened.

    Peak host memory: the headers and the scales of codes, and for a read the range it returns,
    times about four of a matrix that is expanded (`weights/packed.py`).
    """

    def __init__(self, directory: Path, name: str | None = None):
        self.location = str(directory)
        self.config = read_config(directory, name)
        method = read_method(directory)
        headers = read_headers(directory, is_quantised=method is not None)
        self._quantised = present(method, self.config, headers)
        for words in widened_words(method, self.config):
            logger.warning(words)
        tensors, self._places = places_of(self.config, self._quantised.tensors)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`."""
        matrix, suffix = matrix_and_part(name)
        info, place = self.tensors[matrix], self._places[matrix]
        stored = f"{place.name}{suffix}"
        is_whole = place.expert is None and info == self._quantised.tensors[place.name]
        if is_whole or suffix == OF_INPUTS:  # the inputs of a stack are one
            return np.ascontiguousarray(self._quantised.read(stored, index))
        shape = part_shape(info.shape, suffix, self.config.codes)
        rows, *rest = bounds(info._replace(shape=shape), index)
        codes = self.config.codes
        if suffix == OF_SCALE and codes is not None and codes.rows_of_scale:
            place = place.of_blocks(matrix, codes.rows_of_scale)
        rows = place.range_of(rows)
        if place.expert is None:
            return np.ascontiguousarray(self._quantised.read(stored, (rows, *rest)))
        own = slice(place.expert, place.expert + 1)
        if not place.is_transposed:
            return self._quantised.read(stored, (own, rows, *rest))[0, :: place.step]
        own = own, *rest, rows
        return np.ascontiguousarray(self._quantised.read(stored, own)[0, ..., :: place.step].T)


def read_headers(directory: Path, *, is_quantised: bool = False) -> dict[str, TensorInfo]:
    """Return the tensors of a directory, in one file or in shards; CheckpointError for others."""
    files, read = _list_files(directory), partial(read_header, is_quantised=is_quantised)
    if SINGLE_FILE in files:
        return read(directory / SINGLE_FILE)
    if INDEX_FILE in files:
        return _read_shards(directory, files, read)
    if any(name.endswith(".safetensors") for name in files):
        raise CheckpointError(
            f"{directory}: expected {SINGLE_FILE}, or shards with {INDEX_FILE}; found neither"
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in files):
        raise CheckpointError(
            f"{directory}: holds pickled weights, which are never loaded because they can run "
            "code; convert them to safetensors first (save_pretrained of transformers does it)"
        )
    raise CheckpointError(f"{directory}: holds no {SINGLE_FILE} and no {INDEX_FILE}")


def _list_files(directory: Path) -> set[str]:
    try:
        return {path.name for path in directory.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}") from error


def _read_shards(directory: Path, files: set[str], read: ReadHeader) -> dict[str, TensorInfo]:
    """Read every shard that the index names; index and shards must agree exactly."""
    index = directory / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be an object from tensor to file")
    weight_map = {name: shard for name, shard in weight_map.items() if not is_ignored(name)}
    shards = sorted(set(map(str, weight_map.values())))
    problems = [
        f"{index}: names the file {shard}, which is not in {directory}"
        for shard in shards
        if shard not in files  # also refuses paths that lead out of the directory
    ]
    if problems:
        raise CheckpointError(*problems)
    headers = _read_all(directory, shards, read)
    problems = list(_disagreements(index, weight_map, headers))
    if problems:
        raise CheckpointError(*problems)
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _read_all(
    directory: Path, shards: list[str], read: ReadHeader
) -> dict[str, dict[str, TensorInfo]]:
    headers, problems = {}, []
    for shard in shards:
        try:
            headers[shard] = read(directory / shard)
        except CheckpointError as error:
            problems.extend(error.problems)
    if problems:
        raise CheckpointError(*problems)
    return headers


def _disagreements(
    index: Path, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, TensorInfo]]
) -> Iterator[str]:
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            yield f"{index}: says that tensor {name} is in {shard}, which does not hold it"
    for shard, header in headers.items():
        for name in header:
            if weight_map.get(name) != shard:
                yield f"{index}: says nothing of tensor {name}, which {shard} holds"


def save_huggingface(
    source: TensorSource,
    directory: Path,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `config.json` and safetensors, in shards and an index if one file is not enough.

    `dtype` None keeps what is stored (float32 for quantised tensors). Every value is checked to
    be finite after the cast. Peak host memory: 64 MiB of rows and their cast copy.
    """
    parts = write_config(source, directory, dtype)
    stacks = stacks_of(source.config, parts)
    tensors = {name: _stacked([parts[part] for part in each]) for name, each in stacks.items()}
    shards = _plan_shards(tensors, max_shard_bytes)
    for file, names in shards.items():
        write_file(
            directory / file,
            {name: tensors[name] for name in names},
            lambda name: _ranges_of(source, stacks[name], tensors[name].dtype),
        )
    if len(shards) > 1:
        total = sum(info.num_bytes for info in tensors.values())
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def write_config(source: TensorSource, directory: Path, dtype: str | None) -> dict[str, TensorInfo]:
    """Write `config.json` beside the tensors in `dtype`, and return what they will be."""
    tensors = dict(source.tensors)
    if dtype is not None:
        tensors = {name: info._replace(dtype=DTYPES[dtype]) for name, info in tensors.items()}
    kinds = {str(info.dtype) for info in tensors.values()}
    config = to_json(source.config, kinds.pop() if len(kinds) == 1 else "float32")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tensors


def cast_ranges(source: TensorSource, name: str, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Read a tensor in pieces of whole rows, cast, checked to be finite."""
    info = source.tensors[name]
    for rows in row_ranges(info):
        with np.errstate(over="ignore"):  # an overflow becomes infinite and is reported below
            piece = source.read(name, rows).astype(dtype, copy=False)
        check_finite(name, piece, info.file)
        yield piece


def _stacked(parts: list[TensorInfo]) -> TensorInfo:
    """Return the tensor that has the rows of all parts."""
    rows = sum(part.shape[0] for part in parts) if parts[0].shape else 1
    return parts[0]._replace(shape=(rows, *parts[0].shape[1:]) if parts[0].shape else ())


def _ranges_of(
    source: TensorSource, names: tuple[str, ...], dtype: np.dtype
) -> Iterator[np.ndarray]:
    for name in names:
        yield from cast_ranges(source, name, dtype)


def in_groups(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[list[str]]:
    """Fill groups of `max_bytes` in order; a tensor that is larger gets a group of its own."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, info in tensors.items():
        if groups[-1] and filled + info.num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += info.num_bytes
    return groups


def _plan_shards(tensors: Mapping[str, TensorInfo], max_bytes: int) -> dict[str, list[str]]:
    shards = in_groups(tensors, max_bytes)
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    count = len(shards)
    return {f"model-{i:05}-of-{count:05}.safetensors": s for i, s in enumerate(shards, 1)}
