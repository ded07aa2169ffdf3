"""GGUF files as llama.cpp writes them, given Hugging Face's names, shapes and row order."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from shiftjax.arch.formats import DTYPES
from shiftjax.gguf_header import GgufError, GgufTensor, read_header
from shiftjax.weights.gguf_config import (
    ROPE_FACTORS,
    fields_of,
    model_name,
    read_config,
    rope_scaling,
)
from shiftjax.weights.gguf_families import (
    as_written,
    family_of,
    is_longrope,
    read_family,
    tensors_of,
)
from shiftjax.weights.source import CheckpointError, TensorInfo, bounds

_PLAIN = {  # stored as they are returned
    Kind.F32: DTYPES["float32"],
    Kind.F16: DTYPES["float16"],
    Kind.BF16: DTYPES["bfloat16"],
}
# What the library expands to float32; NVFP4 has scales in tensors of their own.
_QUANTISED = frozenset(
    (
        *(Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.MXFP4),
        *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
        *(Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S),
        *(Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ4_NL, Kind.IQ4_XS, Kind.TQ1_0, Kind.TQ2_0),
    )
)
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PERMUTED_ARCHITECTURES = ("llama", "mistral")  # llama.cpp calls both llama
_PERMUTED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.(weight|bias)")


class GgufSource:
    """A TensorSource over a GGUF file.

    `metadata` holds every key of the header (`tokenizer.ggml.*`, `tokenizer.chat_template`).
    Quantised tensors are returned as float32. Peak host memory of a read: the requested rows,
    about three times while they are expanded.
    """

    def __init__(self, path: Path, name: str | None = None):
        try:
            header = read_header(path)
        except GgufError as error:
            raise CheckpointError(*error.problems) from error
        self.location = str(path)
        self.metadata = header.metadata
        _refuse_unsupported(path, header.tensors)
        self._bytes = np.asarray(np.memmap(path, np.uint8, "r"))
        self._family, stored = family_of(header), dict(header.tensors)
        factors = stored.pop(ROPE_FACTORS, None)  # a part of the configuration, no weight
        if self._family is None:
            self.config = read_config(path, header, name)
            self._stored = {_rename(name): tensor for name, tensor in stored.items()}
            self._is_permuted = self.config.architecture in _PERMUTED_ARCHITECTURES
        else:
            longrope = {
                parameter: list(map(as_written, self._vector(stored.pop(each))))
                for each in list(stored)
                if (parameter := is_longrope(each))
            }
            config = read_family(path, header, fields_of(path, header), longrope)
            self.config = replace(config, name=name or model_name(path, header))
            architecture = header.metadata["general.architecture"]
            self._stored = tensors_of(self.config, architecture, stored)
            self._is_permuted = self._family.is_permuted
        if factors is not None:
            self.config = rope_scaling(path, self.config, self._vector(factors))
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.shape, _PLAIN.get(tensor.kind, DTYPES["float32"]), str(path))
            for name, tensor in self._stored.items()
        }

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`."""
        rows, *columns = bounds(self.tensors[name], index)
        if self._is_permuted and _PERMUTED.fullmatch(name):
            stored_rows = _stored_rows(np.arange(rows.start, rows.stop), self.config.head_dim)
            return self._expand(self._stored[name], (stored_rows, *columns))
        values = self._expand(self._stored[name], (rows, *columns))
        if self._family is not None and self._family.adds_one and name.endswith("norm.weight"):
            return values - np.ones((), values.dtype)
        return values

    def _vector(self, stored: GgufTensor) -> np.ndarray:
        return self._expand(stored, (slice(0, stored.shape[0]),))

    def _expand(self, stored: GgufTensor, index: tuple[Any, ...]) -> np.ndarray:
        data = self._bytes[stored.offset : stored.offset + stored.num_bytes]
        if stored.kind not in _PLAIN:
            return _dequantise(data, stored, index)
        values = data.view(_PLAIN[stored.kind]).reshape(stored.shape)
        return np.array(values[index], order="C")


def _refuse_unsupported(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    known = ", ".join(kind.name for kind in (*_PLAIN, *sorted(_QUANTISED)))
    problems = [
        f"{path}: tensor {name}: expected one of {known} (vectors unquantised), found "
        f"{tensor.kind.name} of shape {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if tensor.kind not in _PLAIN and (tensor.kind not in _QUANTISED or len(tensor.shape) < 2)
    ]
    if problems:
        raise CheckpointError(*problems)


def _stored_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Where llama.cpp keeps Hugging Face's rows of q and k.

    Rotary embeddings pair element i of a head with i + head_dim/2 in Hugging Face and with its
    neighbour in llama.cpp, whose converter interleaves the two halves of every head:

        Hugging Face row   0  1  2  3 | 4  5  6  7      (head_dim 8)
        llama.cpp row      0  2  4  6 | 1  3  5  7
    """
    head, row = np.divmod(rows, head_dim)
    half, pair = np.divmod(row, head_dim // 2)
    return head * head_dim + 2 * pair + half


def _dequantise(data: np.ndarray, stored: GgufTensor, index: tuple[Any, ...]) -> np.ndarray:
    """Take rows and columns out of a tensor's bytes, expanding only the blocks they need."""
    *rows, columns = index
    block_size, block_bytes = GGML_QUANT_SIZES[stored.kind]
    first, last = columns.start // block_size, -(-columns.stop // block_size)
    blocks = data.reshape(*stored.shape[:-1], -1, block_bytes)[(*rows, slice(first, last))]
    start, width = columns.start - first * block_size, columns.stop - columns.start
    if not blocks.size:
        return np.zeros((*blocks.shape[:-2], width), np.float32)
    values = gguf.dequantize(np.ascontiguousarray(blocks).reshape(len(blocks), -1), stored.kind)
    values = values.reshape(*blocks.shape[:-2], -1)
    return np.ascontiguousarray(values[..., start : start + width])


def _rename(name: str) -> str:
    """Hugging Face's name; unknown names stay, for `check_complete` to report."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _MODEL_NAMES.get(name, name)
