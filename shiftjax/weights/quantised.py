"""Quantised checkpoints: their matrices as if they were plain, and the codes of those in e4m3.

A `TensorSource` names `X.weight` whatever a file has in its place, and reads it as float32. Of
matrices in e4m3 with a scale for each output channel, or for blocks of 128 x 128, it also reads
`X.weight` + OF_CODES, the bytes of the file, and `X.weight` + OF_SCALE: so devices have the numbers
that the checkpoint's maker had. So it does of four bits in groups (`packed_codes.py`).

All that is wrong is found when the directory is opened: headers and scales are read for it, nothing
else. Scales are 0.01% to 3% of a checkpoint; those of groups are not kept.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shiftjax.arch.config import Codes, ModelConfig
from shiftjax.arch.formats import DTYPES, FORMATS
from shiftjax.arch.weights import weights_of
from shiftjax.parallel.blocks import BLOCK
from shiftjax.parallel.stored import can_be_codes
from shiftjax.weights.hf_names import stored_name
from shiftjax.weights.packed import LAYOUTS, Layout, Packed, Part, Shape, spread
from shiftjax.weights.packed_codes import read_part
from shiftjax.weights.quant_config import FIELD, Method, Scheme, scheme_of
from shiftjax.weights.safetensors_file import read_range
from shiftjax.weights.source import (
    OF_CODES,
    OF_INPUTS,
    OF_SCALE,
    CheckpointError,
    TensorInfo,
    bounds,
    matrix_and_part,
    part_shape,
    row_ranges,
)

_FLOAT32 = DTYPES["float32"]
_WEIGHT = ".weight"
# Names that other methods have for the same.
_SUFFIXES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
_KNOWN = {s for each in LAYOUTS.values() for s in (each.codes, each.scale, *each.others)}
_PART = re.compile(rf"(.+)\.({'|'.join(sorted((_KNOWN | set(_SUFFIXES)) - {'blocks'}))})")
_MX_PART = re.compile(r"(.+)_(blocks|scales)")
# Of keys and values in the cache, by their canonical name and as others call them.
_KV_SCALE = re.compile(
    r"(model\.layers\.\d+\.self_attn)\.(?:([kv]|kv)_scale|([kv])_proj\.(?:output|\3)_scale)"
)


class Presented(NamedTuple):
    """What a quantised checkpoint holds: `tensors` by names of the table, and the quantised.

    Scales of cached keys and values are `model.layers.I.self_attn.k_scale` and `v_scale`, float32
    `[1]` or `[kv_heads]`, whatever the checkpoint calls them; they may be there or not.
    """

    tensors: dict[str, TensorInfo]  # as `read` returns them
    packed: dict[str, Packed]
    kv_scales: dict[str, np.ndarray]
    codes: Codes | None = None  # of the model

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`."""
        matrix, suffix = matrix_and_part(name)
        if suffix and self.codes and FORMATS[self.codes.format].is_packed:
            return self._read_four_bits(matrix, suffix, index)
        if name.endswith(OF_SCALE):
            scales = self.packed[matrix].scales
            assert scales is not None
            if self.codes and self.codes.rows_of_scale:
                rows = self.codes.rows_of_scale
                num = -(-self.tensors[matrix].shape[0] // rows)
                scales = scales.repeat(BLOCK // rows, axis=0)[:num]
            return np.array(scales[index])
        if name.endswith(OF_INPUTS):
            return _whole(self.packed[name.removesuffix(OF_INPUTS)].parts["input_scale"]).reshape(1)
        index = bounds(self.tensors[matrix], index)
        if name in self.kv_scales:
            return np.array(self.kv_scales[name][index])
        if matrix not in self.packed:
            return read_range(name, self.tensors[name], index)
        packed = self.packed[matrix]
        return (
            packed.parts["weight"].read(*index) if name.endswith(OF_CODES) else packed.read(index)
        )

    def _read_four_bits(self, matrix: str, suffix: str, index: tuple[slice, ...]) -> np.ndarray:
        """The same of codes, their scales, or zero points."""
        info, packed = self.tensors[matrix], self.packed[matrix]
        axis = 1 if packed.scheme.kind == "mxfp4" else -1  # of stacks: experts, inputs, outputs
        shape = part_shape(info.shape, suffix, self.codes, axis)
        return read_part(packed, suffix, bounds(info._replace(shape=shape), index))


def present(
    method: Method | None, config: ModelConfig, stored: Mapping[str, TensorInfo]
) -> Presented:
    """Find the quantised matrices among the tensors of a checkpoint, and check them.

    Raises:
        CheckpointError: tensors are missing, of other formats or shapes than the configuration
            says, or scales are no positive numbers; a line each.
    """
    if method is None:
        return Presented(dict(stored), {}, {})
    rest, kv_scales = _kv_scales(stored)
    modules, plain = _modules(rest)
    presented = Presented(dict(plain), {}, {}, config.codes)
    problems = list(_not_as_said(method, config, plain))
    for name, part in kv_scales.items():
        problems += _wrong_scales(part)
        presented.kv_scales[name] = _whole(part).reshape(-1)
        shape = presented.kv_scales[name].shape
        presented.tensors[name] = TensorInfo(shape, _FLOAT32, part.info.file)
    for module, parts in modules.items():
        scheme, name = method.scheme_of(module), _name(module, parts)
        if scheme is None:
            file = next(iter(parts.values())).info.file
            problems.append(
                f"{file}: tensor {name}: expected plain numbers, because {FIELD} "
                f"leaves {module} out, found {', '.join(sorted(parts))}"
            )
            continue
        try:
            packed = _open(name, scheme, parts)
        except CheckpointError as error:
            problems += error.problems
            continue
        presented.packed[name] = packed
        info = TensorInfo(packed.shape, _FLOAT32, packed.parts[packed.layout.codes].info.file)
        presented.tensors[name] = info
    if problems:
        raise CheckpointError(*problems)
    return presented


def _kv_scales(
    stored: Mapping[str, TensorInfo],
) -> tuple[dict[str, TensorInfo], dict[str, Part]]:
    """All other tensors, and the scales of keys and values by their canonical names."""
    rest, scales = {}, {}
    for name, info in stored.items():
        found = _KV_SCALE.fullmatch(name)
        if found is None:
            rest[name] = info
        else:
            scales |= {f"{found[1]}.{x}_scale": Part(name, info) for x in found[2] or found[3]}
    return rest, scales


def _modules(
    stored: Mapping[str, TensorInfo],
) -> tuple[dict[str, dict[str, Part]], dict[str, TensorInfo]]:
    """Quantised modules, with their tensors by suffix, and the tensors that are plain."""
    modules: dict[str, dict[str, Part]] = {}
    plain = {}
    for name, info in stored.items():
        found = _MX_PART.fullmatch(name) or _PART.fullmatch(name)
        if found is None or (found[2] == "weight" and info.dtype in DTYPES.values()):
            plain[name] = info
        else:
            parts, suffix = modules.setdefault(found[1], {}), _SUFFIXES.get(found[2], found[2])
            if suffix in parts:
                words = f"expected one {suffix}, found {parts[suffix].name}, too"
                raise CheckpointError(f"{info.file}: tensor {name}: {words}")
            parts[suffix] = Part(name, info)
    return modules, plain


def _name(module: str, parts: Mapping[str, Part]) -> str:
    """The name of the matrix itself; stacks of experts have no `.weight`."""
    return module if "blocks" in parts else f"{module}{_WEIGHT}"


def _not_as_said(
    method: Method,
    config: ModelConfig,
    plain: Mapping[str, TensorInfo],
) -> Iterator[str]:
    """Matrices that are to be quantised and are not, and plain ones of no known format."""
    for name, info in plain.items():
        if info.dtype not in DTYPES.values():
            known = ", ".join(DTYPES)
            yield f"{info.file}: tensor {name}: expected {known}, found {info.dtype}"
    matrices = (weight for weight in weights_of(config) if can_be_codes(weight))
    tensors = (
        (stored_name(config, name), scheme_of(method, config, each))
        for each in matrices
        for name in each.tensors
    )
    for name, scheme in dict.fromkeys(tensors):
        module = name.removesuffix(_WEIGHT)
        if method.scheme_of(module) != scheme:
            yield f"{name}: {FIELD} says otherwise of it than of the other experts of its layer"
        elif name in plain and scheme is not None:
            info = plain[name]
            yield (
                f"{info.file}: tensor {name}: expected it quantised, because quantization_config "
                f"({method.name}) does not leave {module} out, found {info.dtype}"
            )


def _open(name: str, scheme: Scheme, parts: Mapping[str, Part]) -> Packed:
    """Check a matrix's tensors, and read its scales."""
    layout = LAYOUTS[scheme.kind]
    needed = {layout.codes, layout.scale, *_needed(layout, scheme)}
    problems = [
        f"{next(iter(parts.values())).info.file}: tensor {name}: has no {suffix} beside it"
        for suffix in sorted(needed - parts.keys())
    ]
    if problems:
        raise CheckpointError(*problems)
    codes = parts[layout.codes]
    if codes.info.dtype != layout.dtype:
        raise CheckpointError(
            f"{codes.info.file}: tensor {codes.name}: expected {layout.dtype}, because "
            f"quantization_config says {scheme.kind}, found {codes.info.dtype}"
        )
    unused = parts.keys() - {layout.codes, layout.scale, *layout.others}
    if not scheme.has_zeros:
        unused |= parts.keys() & {"weight_zero_point"}
    if not scheme.has_input_scale and scheme.kind == "fp8":
        unused |= parts.keys() & {"input_scale"}
    problems = [
        f"{parts[suffix].info.file}: tensor {parts[suffix].name}: is of no use to {scheme.kind}, "
        "as quantization_config calls it"
        for suffix in sorted(unused)
    ]
    if problems:
        raise CheckpointError(*problems)
    shape = layout.shape(scheme, parts)
    problems = list(_wrong_shapes(layout.shapes(scheme, shape), parts))
    if problems:
        raise CheckpointError(*problems)
    scale = parts[layout.scale]
    scales = [scale] if scheme.kind != "mxfp4" else []
    scales += [parts["input_scale"]] if scheme.has_input_scale else []
    problems = [problem for part in scales for problem in _wrong_scales(part)]
    if problems:
        raise CheckpointError(*problems)
    if scheme.kind == "fp8":
        return Packed(scheme, parts, shape, spread(_whole(scale), shape))
    if scheme.kind == "fp8_blocks":
        return Packed(scheme, parts, shape, _whole(scale))
    return Packed(scheme, parts, shape)


def _whole(part: Part) -> np.ndarray:
    return part.read(*(slice(0, size) for size in part.info.shape)).astype(np.float32)


def _wrong_scales(part: Part) -> Iterator[str]:
    """Scales are finite and above 0; they are read in pieces."""
    pieces = row_ranges(part.info) if part.info.shape else [()]
    count = 0
    for piece in pieces:
        values = part.read(*piece).astype(np.float32)
        count += int(np.count_nonzero(~(np.isfinite(values) & (values > 0))))
    if count:
        yield (
            f"{part.info.file}: tensor {part.name}: expected scales above 0, found {count} of "
            f"{max(1, math.prod(part.info.shape))} that are NaN, infinite, 0 or negative"
        )


def _needed(layout: Layout, scheme: Scheme) -> set[str]:
    zeros = {"qzeros", "weight_zero_point"} if scheme.has_zeros else set()
    inputs = {"input_scale"} if scheme.has_input_scale else set()
    return set(layout.others) & (zeros | inputs | {"weight_shape"})


def _wrong_shapes(
    expected: Mapping[str, tuple[Shape, ...]], parts: Mapping[str, Part]
) -> Iterator[str]:
    for suffix, shapes in expected.items():
        if suffix in parts and parts[suffix].info.shape not in shapes:
            known = " or ".join(str(list(shape)) for shape in shapes)
            name, info = parts[suffix]
            found = list(info.shape)
            yield f"{info.file}: tensor {name}: expected shape {known}, found {found}"
