"""Test data, and GGUF files that hold only a tokenizer."""

import json
from pathlib import Path

import gguf

DATA = Path(__file__).parent.parent / "data"


def read_data(name: str) -> dict:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def write_vocab_gguf(path: Path, model: str, lists: dict, **scalars: str | int | bool) -> Path:
    """Write a GGUF with a tokenizer and no tensors; names are those behind `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", model)
    for name, values in lists.items():
        writer.add_array(f"tokenizer.ggml.{name}", values)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    for name, value in scalars.items():
        adders[type(value)](f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
