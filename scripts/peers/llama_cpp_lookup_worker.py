"""llama.cpp with prompt lookup of llama-cpp-python's own: `Llama(draft_model=...)`, one stream.

`LlamaPromptLookupDecoding` copies what followed the first earlier place where the last tokens stood
(two of them, else one), and `Llama.generate` verifies the copy in one call and rolls back what is
wrong. It is the n-gram speculation that the package has; that of llama-server is not in it. The
package has no batches here: requests run one after the other. A drafting `Llama` computes the
logits of every prompt token, so its prefill is slower than the plain worker's.

    python scripts/peers/llama_cpp_lookup_worker.py MODEL.gguf [--draft-tokens 10]
"""

# pyright: reportMissingImports=false
import argparse
import functools
import time
from itertools import islice

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Generate, main


def generate(llama, prompts: list[list[int]], max_tokens: list[int]) -> dict:
    """Run the requests one after the other."""
    outputs: list[list[int]] = []
    tpots: list[float | None] = []
    for prompt, limit in zip(prompts, max_tokens, strict=True):
        llama.reset()  # else it keeps what this prompt and the last one begin with
        tokens = llama.generate(prompt, temp=0.0)
        output, start = [next(tokens)], time.perf_counter()
        output += islice(tokens, limit - 1)
        tpots.append((time.perf_counter() - start) / (limit - 1) if limit > 1 else None)
        outputs.append(output)
    return {"token_ids": outputs, "tpot_seconds": tpots}


OPTIONS = {
    "--threads": (2, "of the CPU"),
    "--max-model-len": (1024, "tokens of a request"),
    "--draft-tokens": (10, "the most that are copied"),
    "--ngram": (2, "the longest n-gram looked up"),
}


def start(args: argparse.Namespace) -> tuple[dict, Generate]:
    """Load the model; `logits_all` makes room for the logits that drafts need."""
    drafter = LlamaPromptLookupDecoding(args.ngram, args.draft_tokens)
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    options = {"n_ctx": args.max_model_len, "flash_attn": True, "verbose": False} | threads
    llama = llama_cpp.Llama(args.model, logits_all=True, draft_model=drafter, **options)
    description = {"engine": "llama.cpp prompt lookup", "version": llama_cpp.__version__}
    return description, functools.partial(generate, llama)


if __name__ == "__main__":
    main(__doc__, OPTIONS, start)
