"""What every checkpoint format offers to the loader, and the checks that hold for all of them."""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from shiftjax.arch.config import Codes, ModelConfig
from shiftjax.arch.formats import FORMATS
from shiftjax.arch.weights import EMBEDDING, LM_HEAD, expected_tensors
from shiftjax.parallel.blocks import BLOCK
from shiftjax.weights.errors import CheckpointError

# Buffers that old versions of transformers saved although they follow from the configuration, and
# the layer that BERT was trained with and that embeddings don't use.
_IGNORED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|embeddings\.position_ids|pooler\.dense\.(weight|bias)"
)
# Scales of the keys and values in the cache, which a deployment may use or not.
_KV_SCALE = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_scale")
_ORIGINAL = re.compile(r"model\.layers\.(\d+)\.self_attn\.[qkv]_proj\.(?:weight|bias)")
_RANGE_BYTES = 64 << 20
NAMED_ROWS = 2  # of a tensor, in the name of a checkpoint
# After the name of a matrix that a checkpoint has as codes: what `read` has of it, too.
OF_CODES, OF_SCALE, OF_INPUTS = ":codes", ":scale", ":input_scale"  # no tensor ends so
OF_ZEROS = ":zeros"
_SUFFIXES = OF_CODES, OF_SCALE, OF_INPUTS, OF_ZEROS
logger = logging.getLogger(__name__)


class TensorInfo(NamedTuple):
    """One tensor as `TensorSource.read` returns it."""

    shape: tuple[int, ...]
    dtype: np.dtype  # float32, bfloat16 or float16 as stored; quantised tensors are float32
    file: str  # where it is stored, for messages

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor once read."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@runtime_checkable
class TensorSource(Protocol):
    """A checkpoint whose tensors have Hugging Face names and shapes (projections `[out, in]`)."""

    @property
    def location(self) -> str:
        """Where the checkpoint is, for messages."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model that the checkpoint says it is."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint, read or not."""
        ...

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return the range `index` of a tensor as a new C-contiguous array.

        Dimensions that `index` leaves out are read whole. Steps other than 1 and ranges outside
        the tensor raise ValueError. Of a matrix that is stored as codes (`config.has_codes`) its
        name + OF_CODES are these, e4m3 of the same shape, its name + OF_SCALE their units, float32
        `[out]` or of blocks `[out / codes.rows_of_scale, in / BLOCK]`, and its name + OF_INPUTS
        those of its inputs, `[1]`, if there are any. Of codes of four bits these are uint8
        `[out, in / 2]`, `[out, groups]`, and with OF_ZEROS zero points of groups
        (`packed_codes.py`). Peak host memory: the range, times about four while a quantised
        tensor is expanded; nothing else stays resident (files are memory-mapped).
        """
        ...


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name scales the keys or the values of a layer's KV cache."""
    return _KV_SCALE.fullmatch(name) is not None


def matrix_and_part(name: str) -> tuple[str, str]:
    """Return the name of a tensor, and what of it is meant: OF_CODES ..., or nothing."""
    suffix = next((each for each in _SUFFIXES if name.endswith(each)), "")
    return name.removesuffix(suffix), suffix


def part_shape(
    shape: tuple[int, ...], suffix: str, codes: Codes | None, axis: int = -1
) -> tuple[int, ...]:
    """Return the shape of a part of a matrix of this shape, whose inputs are dimension `axis`."""
    if suffix == OF_INPUTS:
        return (1,)
    if codes is None or not FORMATS[codes.format].is_packed:
        if suffix != OF_SCALE:
            return shape
        rows = codes.rows_of_scale if codes else 0
        return (-(-shape[0] // rows), -(-shape[1] // BLOCK)) if rows else shape[:1]
    inputs, axis = shape[axis], axis % len(shape)
    size = inputs
    if suffix == OF_CODES:
        size = inputs // 2
    elif suffix:
        size = inputs // (codes.group or inputs)
    return *shape[:axis], size, *shape[axis + 1 :]


def is_ignored(name: str) -> bool:
    """Whether a checkpoint may hold a tensor of this name that no model has."""
    return _IGNORED.fullmatch(name) is not None


def bounds(info: TensorInfo, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """Complete `index` to one slice with start and stop per dimension."""
    if len(index) > len(info.shape):
        raise ValueError(f"index has {len(index)} dimensions, the tensor {len(info.shape)}")
    padded = index + (slice(None),) * (len(info.shape) - len(index))
    ranges = []
    for part, size in zip(padded, info.shape, strict=True):
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(f"index {part} is no range of a dimension of {size} with step 1")
        ranges.append(slice(start, stop))
    return tuple(ranges)


def row_ranges(info: TensorInfo, most_bytes: int = _RANGE_BYTES) -> Iterator[tuple[slice, ...]]:
    """Cut a tensor into ranges of whole rows of at most `most_bytes` (one row at least)."""
    if not info.shape:
        yield ()
        return
    rows = info.shape[0]
    step = max(1, most_bytes * rows // max(1, info.num_bytes))
    for start in range(0, rows, step):
        yield (slice(start, min(rows, start + step)),)


def check_complete(source: TensorSource) -> None:
    """Raise CheckpointError unless the source holds exactly the tensors of its model.

    Four kinds of extra tensors are accepted. What `is_ignored` is recomputed or not needed. An
    `lm_head.weight` beside tied embeddings is not used, and must therefore equal the embedding
    element by element (read here in pieces of 64 MiB). The q, k and v of the model that SwiftKV was
    made of are left in late layers by some; this is logged, once. Scales of a quantised KV cache
    are there for a deployment that has one.
    """
    expected = expected_tensors(source.config)
    tied_head = source.config.tie_word_embeddings and LM_HEAD in source.tensors
    if tied_head:
        expected = {**expected, LM_HEAD: expected[EMBEDDING]}
    unused = {name for name in source.tensors if _is_of_original(name, source.config)}
    optional = unused | {name for name in source.tensors if is_kv_scale(name)}
    tensors = {name: info for name, info in source.tensors.items() if name not in optional}
    what = f"a {source.config.name} of {source.config.num_layers} layers"
    problems = list(differences(tensors, expected, source.location, what))
    if problems:
        raise CheckpointError(*problems)
    if tied_head:
        _check_tied_head(source)
    if unused:
        early = source.config.num_early_layers
        words = "%s: %d tensors are not used: late layers (from %d on) have q, k, v of their own"
        logger.info(words, source.location, len(unused), early)


def _is_of_original(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is a projection that a late layer of SwiftKV has in another form."""
    found = _ORIGINAL.fullmatch(name)
    return found is not None and config.num_early_layers <= int(found[1]) < config.num_layers


def differences(
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, ...]],
    location: str,
    what: str,
) -> Iterator[str]:
    """A line for every tensor that is missing, unexpected in `what`, or of another shape.

    Experts have thousands of tensors: one line tells of all that are missing.
    """
    missing = [name for name in expected if name not in tensors]
    of_experts = [name for name in missing if ".experts." in name]
    more = f", nor {len(of_experts) - 1} others of experts" if len(of_experts) > 1 else ""
    for name in missing:
        if name not in of_experts[1:]:
            others = more if name in of_experts else ""
            shape = _show(expected[name])
            yield f"{location}: tensor {name}: expected shape {shape}, found nothing{others}"
    for name, info in tensors.items():
        found = f"found shape {_show(info.shape)}"
        if name not in expected and not is_ignored(name):
            yield f"{info.file}: tensor {name}: expected no such tensor in {what}, {found}"
    for name, shape in expected.items():
        if name in tensors and tensors[name].shape != shape:
            info = tensors[name]
            yield (
                f"{info.file}: tensor {name}: expected shape {_show(shape)}, "
                f"found {_show(info.shape)}"
            )


def _check_tied_head(source: TensorSource) -> None:
    info = source.tensors[LM_HEAD]
    for rows in row_ranges(info):
        if not np.array_equal(source.read(LM_HEAD, rows), source.read(EMBEDDING, rows)):
            raise CheckpointError(
                f"{info.file}: tensor {LM_HEAD}: expected a copy of {EMBEDDING} because the "
                f"configuration says tie_word_embeddings, found other values in rows "
                f"{rows[0].start} to {rows[0].stop}"
            )


def check_finite(name: str, array: np.ndarray, file: str) -> None:
    """Raise CheckpointError if the array, a tensor or a part of one, holds NaN or infinity."""
    count = array.size - int(np.count_nonzero(np.isfinite(array)))
    if count:
        raise CheckpointError(
            f"{file}: tensor {name}: expected finite values, found {count} NaN or infinite "
            f"of {array.size}"
        )


def _show(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def identify(source: TensorSource) -> str:
    """A name for the weights of a checkpoint, by which hosts see whether they have the same.

    It covers the model, names, shapes and types of all tensors, and a few rows of each.
    """
    told = blake2b(repr(replace(source.config, name="")).encode(), digest_size=12)
    for name, info in sorted(source.tensors.items()):
        told.update(f"{name} {info.shape} {info.dtype}".encode())
        rows = (slice(0, min(NAMED_ROWS, info.shape[0])),) if info.shape else ()
        told.update(source.read(name, rows).tobytes())
    return told.hexdigest()
