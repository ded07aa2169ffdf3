"""llama.cpp's own server in this process, through xllamacpp.

python scripts/peers/xllamacpp_worker.py MODEL.gguf [--threads 2] [--adapter LORA.gguf]
"""

# pyright: reportMissingImports=false
import argparse
from concurrent.futures import ThreadPoolExecutor

import xllamacpp
from protocol import Generate, main

OPTIONS = {
    "--slots": (8, "sequences that run together"),
    "--threads": (2, "of the CPU"),
    "--max-model-len": (640, "tokens of a request"),
    "--adapter": ("", "a GGUF file of a low-rank adapter, not merged"),
}


def start(args: argparse.Namespace) -> tuple[dict, Generate]:
    """Load the model."""
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.n_parallel, params.n_ctx = args.slots, args.slots * args.max_model_len
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    if args.adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(args.adapter, 1.0)]
    server = xllamacpp.Server(params)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        asked = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True}
        asked |= {"cache_prompt": False, "return_tokens": True, "n_probs": 1}
        reply = server.handle_completions(asked)
        tokens = [step["id"] for step in reply["choices"][0]["logprobs"]["content"]]
        # Tokens that end within a character, and are the last, have no entry.
        return tokens + [-1] * (reply["usage"]["completion_tokens"] - len(tokens))

    def generate_all(prompts: list[list[int]], max_tokens: list[int]) -> dict:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return {"token_ids": list(pool.map(generate, prompts, max_tokens))}

    return {"engine": "llama.cpp", "version": xllamacpp.__version__}, generate_all


if __name__ == "__main__":
    main(__doc__, OPTIONS, start)
