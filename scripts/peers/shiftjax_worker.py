"""ShiftJAX on one device, as a user would call it.

python scripts/peers/shiftjax_worker.py MODEL_DIRECTORY [--options '{"max_num_seqs": 64}']
"""

import argparse
import json
from functools import partial

import jax
from protocol import Generate, main

import shiftjax
from shiftjax import LLM, SamplingParams

OPTIONS = {"sp": 1, "tp": 1, "devices": 1, "dtype": "bfloat16", "prefix_caching": False}
OPTIONS |= {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_model_len": 640}


def generate(llm: LLM, adapters: int, prompts: list[list[int]], max_tokens: list[int]) -> dict:
    """Run all requests at once, with adapters in turn."""
    names = [f"a{number % adapters}" if adapters else None for number in range(len(prompts))]
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
    outputs = llm.generate(prompts, sampling, adapter=names)
    return {"token_ids": [list(output.outputs[0].token_ids) for output in outputs]}


def start(args: argparse.Namespace) -> tuple[dict, Generate]:
    """Load the model and compile its steps."""
    options = OPTIONS | json.loads(args.options)
    llm = LLM(args.model, **options)
    description = {"engine": "shiftjax", "version": shiftjax.__version__, "jax": jax.__version__}
    return description | {"options": options}, partial(generate, llm, args.adapters)


if __name__ == "__main__":
    words = {"--options": ("{}", "more arguments of LLM, as JSON")}
    main(__doc__, words | {"--adapters": (0, "so many, a0 and on, are used in turn")}, start)
