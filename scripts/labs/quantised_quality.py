"""What fp8 changes in a model's answers: perplexity and likeliest tokens on a text, against plain.

    python scripts/labs/quantised_quality.py [MODEL] [--text FILE] [--kv-cache-dtype fp8]

With `--kv-cache-dtype` the formats are tried with such a KV cache, too. Every window of the text is
a prompt of its own, whose log-probabilities are asked for; each line that is printed is JSON. The
text is this project's design unless another is given.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

from shiftjax.core.request import SamplingParams
from shiftjax.llm import LLM

WINDOW = 128  # tokens
FORMATS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "fp8": {"quantization": "fp8"},
}


def judge(model: str, text: str, num_windows: int, options: dict) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability and likeliest token at every place but the first of each window."""
    llm = LLM(model, max_model_len=WINDOW + 1, max_num_seqs=8, **options)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text)[: num_windows * WINDOW]
    prompts = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    found = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    llm.close()
    places = [each for output in found for each in output.prompt_logprobs or () if each]
    return (
        np.array([each.logprob for each in places]),
        np.array([each.top_ids[0] for each in places]),
    )


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description="What fp8 changes in a model's answers.")
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[2] / "docs/design.md")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--kv-cache-dtype", help="of the KV cache, beside that of the model")
    arguments = parser.parse_args()
    text, plain, formats = arguments.text.read_text(), None, dict(FORMATS)
    if kv := arguments.kv_cache_dtype:
        formats |= {f"{n}, KV {kv}": each | {"kv_cache_dtype": kv} for n, each in FORMATS.items()}
    for name, options in formats.items():
        logprobs, likeliest = judge(arguments.model, text, arguments.windows, options)
        row = {"format": name, "tokens": len(logprobs)}
        row["perplexity"] = round(math.exp(-logprobs.mean()), 4)
        if plain is None:
            plain = likeliest
        row["likeliest tokens as plain"] = round(float((likeliest == plain).mean()), 4)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
