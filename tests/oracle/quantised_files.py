"""Tiny quantised checkpoints of every format, packed as the formats' owners describe them.

Independent of the code under test: nothing of ShiftJAX is imported. Sources: the readme and
`pack_to_int32` of compressed-tensors, AutoAWQ's gemm packing, AutoGPTQ's `qweight` and `qzeros`,
and OCP MX 1.0 for e2m1 and e8m0. Each packer takes a matrix `[out, in]`, and returns its tensors by
the suffixes of their names, and the numbers that they say, float64.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from oracle import numpy_llama

Tensors = dict[str, np.ndarray]
Packer = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]
E4M3 = ml_dtypes.float8_e4m3fn
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {
    **{"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3"},
    **{"float8_e8m0fnu": "F8_E8M0", "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64"},
}


def save(tensors: Tensors, path: Path) -> None:
    """Write safetensors; the NumPy side of its library knows no 8-bit floats."""
    header, position = {}, 0
    for name, x in tensors.items():
        ends = [position, position + x.nbytes]
        header[name] = {"dtype": DTYPES[str(x.dtype)], "shape": x.shape, "data_offsets": ends}
        position += x.nbytes
    raw = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in tensors.values())
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned numbers along the last dimension in int32, the lowest bits first."""
    per = 32 // bits
    padding = [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % per)]
    wide = np.pad(numbers, padding).astype(np.uint64)
    wide = wide.reshape(*wide.shape[:-1], -1, per) << np.arange(0, 32, bits, dtype=np.uint64)
    return wide.sum(-1).astype(np.uint32).view(np.int32)


def fp8(weight: np.ndarray, scales: str, name: str = "weight_scale", dtype: type = np.float32):
    """Codes, and a scale of a matrix (`scalar`, `tensor`) or of a channel (`flat`, `channel`)."""
    most = np.abs(weight).max(axis=1 if scales in ("flat", "channel") else None, keepdims=True)
    scale = (most / 448).astype(dtype)
    codes = (weight / scale.astype(np.float32)).astype(E4M3)
    shape = {"scalar": (), "tensor": (1,), "flat": (-1,), "channel": (-1, 1)}[scales]
    numbers = codes.astype(np.float64) * scale.astype(np.float64)
    return {"weight": codes, name: scale.reshape(shape)}, numbers


def fp8_blocks(weight: np.ndarray, block: tuple[int, int], name: str = "weight_scale_inv"):
    """Codes and a scale for each block; those at the edges are smaller."""
    starts = [np.arange(0, size, step) for size, step in zip(weight.shape, block, strict=True)]
    most = np.maximum.reduceat(np.abs(weight), starts[0], axis=0)
    scale = np.maximum.reduceat(most, starts[1], axis=1).astype(np.float32) / np.float32(448)
    wide = scale.repeat(block[0], axis=0).repeat(block[1], axis=1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    codes = (weight / wide).astype(E4M3)
    return {"weight": codes, name: scale}, codes.astype(np.float64) * wide


def affine(weight: np.ndarray, bits: int, groups: np.ndarray, *, symmetric: bool):
    """Unsigned codes `[out, in]`, scales and zero points `[out, groups]`: scale (code - zero)."""
    num, top = int(groups.max()) + 1, (1 << bits) - 1
    low = np.stack([np.minimum(weight[:, groups == g].min(1), 0) for g in range(num)], 1)
    high = np.stack([np.maximum(weight[:, groups == g].max(1), 0) for g in range(num)], 1)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    scale = ((high - low) / top).astype(np.float32)
    zero = np.full(scale.shape, 1 << (bits - 1)) if symmetric else np.rint(-low / scale)
    zero = np.clip(zero, 1, top).astype(np.int64)  # v1 of GPTQ stores it less one
    codes = np.rint(weight / scale[:, groups]) + zero[:, groups]
    codes = np.clip(codes, 0, top).astype(np.int64)
    return codes, scale, zero, scale[:, groups].astype(np.float64) * (codes - zero[:, groups])


def grouped(width: int, group: int | None, order: int | None = None) -> np.ndarray:
    """The group of each input; with `order`, a seed, as if sorted by their activations."""
    groups = np.arange(width) // (group or width)
    return groups if order is None else np.random.default_rng(order).permutation(groups)


def int8(weight: np.ndarray, group: int | None = None, *, symmetric: bool = True):
    """compressed-tensors' `int-quantized`."""
    groups = grouped(weight.shape[1], group)
    codes, scale, zero, numbers = affine(weight, 8, groups, symmetric=symmetric)
    tensors = {"weight": (codes - 128).astype(np.int8), "weight_scale": scale}
    if not symmetric:
        tensors["weight_zero_point"] = (zero - 128).astype(np.int8)
    return tensors, numbers


def packed(
    weight: np.ndarray,
    bits: int = 4,
    group: int | None = 16,
    *,
    symmetric: bool = True,
    order: int | None = None,
):
    """compressed-tensors' `pack-quantized`."""
    groups = grouped(weight.shape[1], group, order)
    codes, scale, zero, numbers = affine(weight, bits, groups, symmetric=symmetric)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scale,
        "weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
    if order is not None:
        tensors["weight_g_idx"] = groups.astype(np.int32)
    return tensors, numbers


def gptq(
    weight: np.ndarray,
    bits: int = 4,
    group: int | None = 16,
    *,
    symmetric: bool = False,
    order: int | None = None,
    version: int = 1,
):
    """AutoGPTQ's tensors, inputs first; words along the inputs, zero points along the outputs."""
    groups = grouped(weight.shape[1], group, order)
    codes, scale, zero, numbers = affine(weight, bits, groups, symmetric=symmetric)
    tensors = {
        "qweight": np.ascontiguousarray(words(codes, bits).T),
        "qzeros": words((zero - (2 - version)).T, bits),
        "scales": np.ascontiguousarray(scale.T),
        "g_idx": groups.astype(np.int32),
    }
    return tensors, numbers


def awq(weight: np.ndarray, group: int | None = 16):
    """AutoAWQ's gemm: words along the outputs, whose k-th 4 bits are output `order[k]` of 8."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    groups = grouped(weight.shape[1], group)
    codes, scale, zero, numbers = affine(weight, 4, groups, symmetric=False)

    def interleaved(x: np.ndarray) -> np.ndarray:
        eights = x.T.reshape(x.shape[1], -1, 8)[:, :, order]
        return words(eights.reshape(x.shape[1], -1), 4)

    scales = np.ascontiguousarray(scale.T)
    return {"qweight": interleaved(codes), "qzeros": interleaved(zero), "scales": scales}, numbers


def mxfp4(weight: np.ndarray):
    """GPT-OSS's experts `[experts, out, in]`: what its unquantised files have, `[.., in, out]`."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = weight.astype(np.float64).reshape(*weight.shape[:-1], -1, 32)
    exponent = np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - 2
    units = blocks / 2.0**exponent
    nearest = np.abs(np.abs(units)[..., None] - grid).argmin(-1)
    codes = (nearest + 8 * (units < 0)).astype(np.uint8)
    numbers = np.where(units < 0, -1, 1) * grid[nearest] * 2.0**exponent
    tensors = {
        "blocks": codes[..., ::2] | codes[..., 1::2] << 4,
        "scales": (exponent[..., 0] + 127).astype(np.uint8),
    }
    return tensors, numbers.reshape(weight.shape).swapaxes(1, 2)


def _compressed(format: str, weights: dict, inputs: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _floats(strategy: str, **more: object) -> dict:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}


def _ints(bits: int, group: int | None = None, *, symmetric: bool = True, **more: object) -> dict:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy, **more}


def with_inputs(pack: Packer, scale: float = 0.01) -> Packer:
    """With a scale of the matrix's inputs beside it, too small for some of them."""

    def packer(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        tensors, numbers = pack(weight)
        return tensors | {"input_scale": np.array(scale, np.float32)}, numbers

    return packer


def with_bound(pack: Packer) -> Packer:
    """With FBGEMM's bound of the scales of inputs beside it."""

    def packer(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        tensors, numbers = pack(weight)
        return tensors | {"input_scale_ub": np.full(1, 1200, np.float32)}, numbers

    return packer


_TOKEN = _floats("token", dynamic=True)
_GPTQ = {"quant_method": "gptq", "sym": False, "lm_head": False}
_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
# name: quantization_config, packer
NATIVE: dict[str, tuple[dict, Packer]] = {
    "compressed-tensors-channel": (
        _compressed("float-quantized", _floats("channel"), _TOKEN),
        partial(fp8, scales="channel", dtype=ml_dtypes.bfloat16),
    ),
    "compressed-tensors-tensor": (
        _compressed("float-quantized", _floats("tensor"), _TOKEN),
        partial(fp8, scales="tensor"),
    ),
    "fp8": (
        _FP8 | {"modules_to_not_convert": ["lm_head"]},
        partial(fp8, scales="scalar", name="weight_scale_inv"),
    ),
    "fp8-channel": (_FP8, partial(fp8, scales="flat")),
    "fbgemm": (
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head"],
        },
        with_bound(partial(fp8, scales="channel")),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        with_inputs(partial(fp8, scales="scalar")),
    ),
    "compressed-tensors-static": (
        _compressed("float-quantized", _floats("tensor"), _floats("tensor", dynamic=False)),
        with_inputs(partial(fp8, scales="tensor")),
    ),
    "fp8-static": (
        _FP8 | {"activation_scheme": "static"},
        with_inputs(partial(fp8, scales="scalar")),
    ),
}
SQUARES: dict[str, tuple[dict, Packer]] = {
    "fp8-squares": (
        _FP8 | {"weight_block_size": [128, 128]},
        partial(fp8_blocks, block=(128, 128)),
    ),
    "compressed-tensors-squares": (
        _compressed(
            "float-quantized",
            _floats("block", block_structure=[128, 128]),
            _floats("group", dynamic=True, group_size=128),
        ),
        partial(fp8_blocks, block=(128, 128), name="weight_scale"),
    ),
}
BLOCKS: dict[str, tuple[dict, Packer]] = {
    "fp8-blocks": (_FP8 | {"weight_block_size": [32, 32]}, partial(fp8_blocks, block=(32, 32))),
    "compressed-tensors-block": (
        _compressed(
            "float-quantized",
            _floats("block", block_structure=[16, 64]),
            _floats("group", dynamic=True, group_size=64),
        ),
        partial(fp8_blocks, block=(16, 64), name="weight_scale"),
    ),
}
PLAIN: dict[str, tuple[dict, Packer]] = {
    "weight-only-fp8": (
        _compressed("float-quantized", _floats("channel")),
        partial(fp8, scales="channel"),
    ),
    "w8a8": (_compressed("int-quantized", _ints(8), _ints(8)), int8),
    "int8-groups": (
        _compressed("int-quantized", _ints(8, 24, symmetric=False)),
        partial(int8, group=24, symmetric=False),
    ),
    "w4a16": (_compressed("pack-quantized", _ints(4, 16)), packed),
    "w4a16-zeros": (
        _compressed("pack-quantized", _ints(4, 16, symmetric=False)),
        partial(packed, symmetric=False),
    ),
    "w4a16-ordered": (
        _compressed("pack-quantized", _ints(4, 16, actorder="group")),
        partial(packed, order=3),
    ),
    "w8a16": (_compressed("pack-quantized", _ints(8)), partial(packed, bits=8, group=None)),
    "gptq": (_GPTQ | {"bits": 4, "group_size": 16, "desc_act": False}, gptq),
    "gptq-ordered": (
        _GPTQ | {"bits": 4, "group_size": 16, "desc_act": True},
        partial(gptq, order=5),
    ),
    "gptq-2": (_GPTQ | {"bits": 2, "group_size": 16}, partial(gptq, bits=2)),
    "gptq-8": (_GPTQ | {"bits": 8, "group_size": -1}, partial(gptq, bits=8, group=None)),
    "gptq-v2": (
        _GPTQ | {"bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
        partial(gptq, version=2),
    ),
    "awq": (_AWQ | {"group_size": 16}, awq),
    "awq-channel": (_AWQ | {"group_size": -1}, partial(awq, group=None)),
}
FORMATS = NATIVE | SQUARES | BLOCKS | PLAIN


def write(
    directory: Path,
    format: str,
    keep: Callable[[str], bool] = lambda _: False,
    edit: Callable[[dict, Tensors], object] = lambda *_: None,
    **overrides: object,
) -> tuple[dict, Tensors, Tensors]:
    """Write a tiny model in a format; return its config, its tensors and the numbers they say.

    `keep` says which matrices stay plain, by the names of their modules. `edit` may change the
    config and the tensors before they are written.
    """
    config, plain = numpy_llama.random_checkpoint(directory, seed=7, **overrides)
    method, packer = FORMATS[format]
    config["quantization_config"] = json.loads(json.dumps(method))
    stored, numbers = {}, {}
    for name, x in plain.items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or not module.endswith(LINEAR) or keep(module):
            stored[name] = numbers[name] = x
            continue
        parts, numbers[name] = packer(x)
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    edit(config, stored)
    (directory / "config.json").write_text(json.dumps(config))
    save(stored, directory / "model.safetensors")
    return config, stored, numbers
