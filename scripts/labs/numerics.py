"""What of a text depends on the mode, by the setting `numerics`: base against shift, bit by bit.

    python scripts/bench.py numerics --model smollm2-135m --layers 30 --sp 4 --tp 2 --tokens 24

Serves the same prompts in base, in shift, and some in shift one by one; every second one is
sampled. A row is a setting and what base is compared with. Log-probabilities are compared as far as
the tokens before them are equal: the share of equal bits, and the mean and the largest difference.
CPU seconds are those of serving all prompts together, of all virtual devices.
"""

import argparse
import re
import time
from collections.abc import Generator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from shiftjax.arch.numerics import NUMERICS
from shiftjax.build import Built, build
from shiftjax.config import EngineConfig
from shiftjax.core.policies import FixedPolicy
from shiftjax.core.request import Request, SamplingParams
from shiftjax.settings import make_virtual_devices
from shiftjax.weights.locate import open_source, resolve_model

OPTIONS = {
    "--model": "smollm2-135m",
    "--layers": (0, "of the model, from the first on; 0: all"),
    "--sp": 4,
    "--tp": 2,
    "--dtype": "bfloat16",
    "--prompts": 16,
    "--tokens": 24,
    "--step": (64, "tokens of a step"),
    "--numerics": ("all", "or one of " + ", ".join(NUMERICS)),
}
MOST_ALONE = 4  # prompts
Texts = list[list[tuple[int, float]]]  # token ids and log-probabilities


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, None]:
    """Yield a row for each setting and what base is compared with."""
    make_virtual_devices(config_of(args, "fast"))
    rng = np.random.default_rng(0)
    sizes = rng.integers(4, 100, args.prompts)
    prompts = [rng.integers(1000, 9000, size).tolist() for size in sizes]
    for numerics in NUMERICS if args.numerics == "all" else (args.numerics,):
        built = engine(args, numerics)
        base, base_cpu = served(built, 0, [prompts], args.tokens)
        shift, shift_cpu = served(built, -1, [prompts], args.tokens)
        alone, _ = served(built, -1, [[prompt] for prompt in prompts[:MOST_ALONE]], args.tokens)
        cpu = {"base CPU s": round(base_cpu, 1), "shift CPU s": round(shift_cpu, 1)}
        for name, other in (("shift", shift), ("shift, alone", alone)):
            yield {"numerics": numerics, "base against": name} | compared(base, other) | cpu


def config_of(args: argparse.Namespace, numerics: str) -> EngineConfig:
    """Return the settings of an engine with one size of steps."""
    sizes = {"max_num_batched_tokens": args.step, "token_buckets": [args.step], "num_blocks": 400}
    sizes |= {"sp": args.sp, "tp": args.tp, "dtype": args.dtype, "max_model_len": 256}
    return EngineConfig.from_options(
        model=args.model, numerics=numerics, prefix_caching=False, max_num_seqs=16, **sizes
    )


def engine(args: argparse.Namespace, numerics: str) -> Built:
    """An engine on the first layers of the model."""
    source: Any = open_source(resolve_model(args.model))
    if args.layers:
        source.config = replace(source.config, num_layers=args.layers)
        behind = re.compile(r"model\.layers\.(\d+)\.")
        source.tensors = {
            name: tensor
            for name, tensor in source.tensors.items()
            if not (found := behind.match(name)) or int(found[1]) < args.layers
        }
    return build(config_of(args, numerics), source, lambda *_: None, None)


def served(
    built: Built, place: int, batches: list[list[list[int]]], num_tokens: int
) -> tuple[Texts, float]:
    """Return the texts of prompts in the mode at a place, and the CPU seconds that they took."""
    built.engine.policy, started = FixedPolicy(place), time.process_time()
    texts, numbers = [], count(built.engine._num_requests)
    for prompts in batches:
        found: dict[str, list[tuple[int, float]]] = {}
        for prompt in prompts:
            seed, name = len(texts) + len(found), f"r{next(numbers)}"
            params = SamplingParams(
                temperature=seed % 2, seed=seed, max_tokens=num_tokens, ignore_eos=True, logprobs=0
            )
            built.engine.add_request(Request(name, prompt, params))
            found[name] = []
        while built.engine.has_work():
            for event in built.engine.step(time.monotonic()):
                if event.error:
                    raise RuntimeError(event.error)
                found[event.request_id] += [(e.token_id, e.logprob) for e in event.logprobs or ()]
        texts += found.values()
    return texts, time.process_time() - started


def compared(one: Texts, other: Texts) -> dict[str, Any]:
    """Return how many texts are equal, and how far their log-probabilities are."""
    differences, texts = [], list(zip(one, other, strict=False))
    for pair in texts:
        for (token, mine), (theirs, yours) in zip(*pair, strict=True):
            if token != theirs:
                break
            differences.append(abs(mine - yours))
    is_equal = [[t for t, _ in a] == [t for t, _ in b] for a, b in texts]
    return {
        "greedy texts equal": f"{sum(is_equal[::2])} of {len(is_equal[::2])}",
        "sampled": f"{sum(is_equal[1::2])} of {len(is_equal[1::2])}",
        "equal bits": f"{np.mean(np.array(differences) == 0):.1%}",
        "mean difference": float(f"{np.mean(differences):.2g}"),
        "largest": float(f"{np.max(differences):.2g}"),
    }
