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
from protocol import reserve_stdout, serve


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


def main() -> None:
    """Load the model and serve."""
    channel = reserve_stdout()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--draft-tokens", type=int, default=10, help="the most that are copied")
    parser.add_argument("--ngram", type=int, default=2, help="the longest n-gram looked up")
    args = parser.parse_args()
    llama = llama_cpp.Llama(
        args.model,
        n_ctx=args.max_model_len,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        flash_attn=True,
        logits_all=True,  # room for the logits of more than a batch, which drafts need
        draft_model=LlamaPromptLookupDecoding(args.ngram, args.draft_tokens),
        verbose=False,
    )
    description = {"engine": "llama.cpp prompt lookup", "version": llama_cpp.__version__}
    serve(channel, description | vars(args) | {"model": None}, functools.partial(generate, llama))


if __name__ == "__main__":
    main()
