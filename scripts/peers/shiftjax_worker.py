"""ShiftJAX on one device, as a user would call it.

python scripts/peers/shiftjax_worker.py MODEL_DIRECTORY [--options '{"max_num_seqs": 64}']
"""

import argparse
import json

import jax
from protocol import reserve_stdout, serve

import shiftjax
from shiftjax import LLM, SamplingParams

OPTIONS = {
    "dtype": "bfloat16",
    "sp": 1,
    "tp": 1,
    "devices": 1,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "max_model_len": 640,
    "prefix_caching": False,
}


def generate(llm: LLM, prompts: list[list[int]], max_tokens: list[int]) -> dict:
    """Run all requests at once."""
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
    outputs = llm.generate(prompts, sampling)
    return {"token_ids": [list(output.outputs[0].token_ids) for output in outputs]}


def main() -> None:
    """Load the model, compile its steps, and serve."""
    channel = reserve_stdout()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("--options", type=json.loads, default={}, help="arguments of LLM, as JSON")
    args = parser.parse_args()
    options = OPTIONS | args.options
    llm = LLM(args.model, **options)
    description = {"engine": "shiftjax", "version": shiftjax.__version__, "jax": jax.__version__}
    serve(channel, description | options, lambda *request: generate(llm, *request))


if __name__ == "__main__":
    main()
