"""What fp8 changes in a model's answers: perplexity and likeliest tokens on texts, against plain.

    python scripts/labs/quantised_quality.py [MODEL] [--text FILE ...] [--kv-cache-dtype fp8]
    python scripts/labs/quantised_quality.py DIR --block 128        # DIR: safetensors

Formats are the first two of bfloat16, fp8 and float32 unless `--formats` names others. With
`--block` a checkpoint whose matrices have a scale for each square block is one more, with
`--kv-cache-dtype` each with such a KV cache. Every window of a text is a prompt of its own, whose
log-probabilities are asked for. Each line that is printed is JSON; `nats` is by how much a token is
less likely than by the first format, with its standard error over windows. The text is this
project's design unless others are given.
"""

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from shiftjax.core.request import SamplingParams
from shiftjax.llm import LLM

WINDOW = 128  # tokens
FORMATS = {
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"quantization": "fp8"},
    "float32": {"dtype": "float32"},
}
E4M3 = ml_dtypes.float8_e4m3fn
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3"}


def judge(
    model: str, texts: Sequence[str], num_windows: int, options: dict
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability and likeliest token `[windows, places]`, at every place but the first."""
    few = {"max_num_seqs": 64, "token_buckets": (WINDOW,)}  # programs to compile, rows of logits
    llm = LLM(model, max_model_len=WINDOW + 1, **few, **options)
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(text)[: num_windows * WINDOW] for text in texts]
    starts = ((each, start) for each in ids for start in range(0, len(each), WINDOW))
    prompts = [each[start : start + WINDOW] for each, start in starts]
    prompts = [prompt for prompt in prompts if len(prompt) == WINDOW]
    found = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    llm.close()
    windows = [[each for each in output.prompt_logprobs or () if each] for output in found]
    return (
        np.array([[each.logprob for each in window] for window in windows]),
        np.array([[each.top_ids[0] for each in window] for window in windows]),
    )


def in_blocks(model: Path, folder: Path, block: int) -> str:
    """Write a checkpoint like a model's, whose matrices have a scale for each square block."""
    for path in model.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, folder)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, np.ndarray] = {}
    for name, x in load_file(model / "model.safetensors").items():
        if name.removesuffix(".weight").endswith(LINEAR):
            tensors[name], tensors[f"{name}_scale_inv"] = _codes(x.astype(np.float32), block)
        else:
            tensors[name] = x
    _save(tensors, folder / "model.safetensors")
    return str(folder)


def _codes(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = (np.arange(0, size, block) for size in x.shape)
    most = np.maximum.reduceat(np.maximum.reduceat(np.abs(x), rows, axis=0), columns, axis=1)
    scale = most.astype(np.float32) / np.float32(448)
    wide = scale.repeat(block, axis=0).repeat(block, axis=1)[: x.shape[0], : x.shape[1]]
    return (x / wide).astype(E4M3), scale


def _save(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write safetensors; the NumPy side of its library knows no 8-bit floats."""
    header, position = {}, 0
    for name, x in tensors.items():
        ends = [position, position + x.nbytes]
        header[name] = {"dtype": DTYPES[str(x.dtype)], "shape": x.shape, "data_offsets": ends}
        position = ends[1]
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.writelines(np.ascontiguousarray(x).tobytes() for x in tensors.values())


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description="What fp8 changes in a model's answers.")
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    design = Path(__file__).parents[2] / "docs/design.md"
    parser.add_argument("--text", type=Path, nargs="+", default=[design])
    parser.add_argument("--windows", type=int, default=16, help="of each text")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16", "fp8"])
    parser.add_argument(
        "--block", type=int, help="inputs and outputs of a block, of MODEL in codes"
    )
    parser.add_argument("--kv-cache-dtype", help="of the KV cache, beside that of the model")
    arguments = parser.parse_args()
    texts = [path.read_text() for path in arguments.text]
    runs = [(name, arguments.model, FORMATS[name]) for name in arguments.formats]
    with tempfile.TemporaryDirectory() as folder:
        if block := arguments.block:
            made = in_blocks(Path(arguments.model), Path(folder), block)
            runs.append((f"blocks of {block} x {block}", made, {}))
        if kv := arguments.kv_cache_dtype:
            own = {"kv_cache_dtype": kv}
            runs += [(f"{name}, KV {kv}", model, more | own) for name, model, more in runs]
        plain = None
        for name, model, options in runs:
            logprobs, likeliest = judge(model, texts, arguments.windows, options)
            plain = plain or (logprobs, likeliest)
            print(json.dumps(row_of(name, logprobs, likeliest, plain)), flush=True)


def row_of(
    name: str, logprobs: np.ndarray, likeliest: np.ndarray, plain: tuple[np.ndarray, np.ndarray]
) -> dict[str, str | float]:
    """A line of the table."""
    less = (plain[0] - logprobs).mean(axis=1)  # of each window
    return {
        "format": name,
        "tokens": logprobs.size,
        "perplexity": round(math.exp(-logprobs.mean()), 4),
        "nats": round(float(less.mean()), 5),
        "error": round(float(less.std(ddof=1) / math.sqrt(less.size)), 5),
        "likeliest tokens as plain": round(float((likeliest == plain[1]).mean()), 4),
    }


if __name__ == "__main__":
    main()
