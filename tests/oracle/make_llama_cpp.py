"""Write `tests/data/llama_cpp_logprobs.json`: what llama.cpp computes of this project's GGUF files.

It runs in an environment of the tests that has xllamacpp, which the project itself never needs:

    PYTHONPATH=tests:tests/weights python tests/oracle/make_llama_cpp.py

The files are those of `tests/weights/test_gguf_families.py`, with `PLAINER` settings. For each, the
likeliest tokens and their log-probabilities, of a greedy continuation of one prompt.
"""
# pyright: reportMissingImports=false

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).parent.parent / "data" / "llama_cpp_logprobs.json"
NUM_STEPS, NUM_TOP = 4, 5


def compute(path: Path, prompt: list[int]) -> list[dict[str, float]]:
    """Return token ids and log-probabilities of every step, first the one that was taken."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 128, 1, False, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    asked = {"prompt": prompt, "n_predict": NUM_STEPS, "temperature": 0, "n_probs": NUM_TOP}
    asked |= {"ignore_eos": True, "cache_prompt": False}
    found = xllamacpp.Server(params).handle_completions(asked)
    steps = found["choices"][0]["logprobs"]["content"]
    tops = [[step, *step["top_logprobs"]] for step in steps]
    return [{str(top["id"]): round(top["logprob"], 7) for top in each} for each in tops]


def main() -> None:
    """Write the file; each model has a process of its own, as servers do not end."""
    if len(sys.argv) > 1:
        print(json.dumps(compute(Path(sys.argv[1]), json.loads(sys.argv[2]))))
        return
    from test_gguf_families import FAMILIES, PLAINER, PROMPT, write

    steps = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in FAMILIES:
            path = Path(folder) / "model.gguf"
            write(path, case, changes=PLAINER.get(case))
            words = [sys.executable, __file__, str(path), json.dumps(PROMPT)]
            done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True)
            steps[case] = json.loads(done.stdout.splitlines()[-1])
    rows = ",\n".join(f"{json.dumps(case)}: {json.dumps(each)}" for case, each in steps.items())
    version = json.dumps(importlib.metadata.version("xllamacpp"))
    FILE.write_text(f'{{"xllamacpp": {version}, "steps": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    main()
