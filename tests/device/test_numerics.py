"""`numerics`: log-probabilities by mode, batch and chunk: equal bits, or not.

Random histories, with preemption and prefix hits, are in `test_mode_invisibility.py`.
"""

import random
from functools import cache

import engines
import numpy as np
import pytest
from engines import RandomPolicy, run
from spent import thorough

from shiftjax.build import Built
from shiftjax.core.policies import FixedPolicy
from shiftjax.core.policy import Policy
from shiftjax.core.request import SamplingParams

SP, TP = 4, 2
NUM_TOKENS = 6
# Wide enough that another order of sums changes what some of them are rounded to.
WIDE = {"hidden_size": 256, "vocab_size": 256, "intermediate_size": 1024}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
PROMPTS = [
    [random.Random(i).randrange(3, 199) for _ in range(size)]
    for i, size in enumerate((3, 40, 17, 70, 1, 33, 8, 64))
]
BASE, BETWEEN, SHIFT = map(FixedPolicy, (0, 1, 2))
Found = list[list[tuple[int, float]]]


@cache
def engine(numerics: str, *sizes: int) -> Built:
    return build(numerics, sizes, {}, {})


def build(numerics: str, sizes: tuple[int, ...], model: dict, given: dict) -> Built:
    directory, *_ = engines.checkpoint(**(WIDE | model))
    own = {"token_buckets": list(sizes), "max_num_batched_tokens": sizes[-1], "num_blocks": 300}
    options = own | {"dtype": "bfloat16", "max_num_seqs": 16, "prefix_caching": False}
    return engines.make(directory, SP, TP, numerics=numerics, **(options | given))


def served(built: Built, policy: Policy, prompts: list[list[int]] = PROMPTS) -> Found:
    """Tokens and log-probabilities of each prompt, all of them served together."""
    built.engine.policy = policy
    events = run(built.engine, prompts, [GREEDY] * len(prompts))
    return [
        [(one.token_id, one.logprob) for event in events[i, 0] for one in event.logprobs]
        for i in range(len(prompts))
    ]


def share_of_equal(one: Found, other: Found) -> float:
    """Of all log-probabilities, those with the same bits."""
    same = [a == b for texts in zip(one, other, strict=True) for a, b in zip(*texts, strict=True)]
    assert len(same) == len(PROMPTS) * NUM_TOKENS
    return float(np.mean(same))


@pytest.mark.costs(60)
@pytest.mark.parametrize(
    ("numerics", "sizes"),
    [("invariant", (32,)), *thorough(("invariant", (32, 128)), ("integer", (32, 128)))],
)
def test_the_bits_are_the_same(numerics, sizes):
    """Prompts of up to 70 tokens come whole and in chunks, beside others and alone."""
    built = engine(numerics, *sizes)
    base = served(built, BASE)
    for policy in BETWEEN, SHIFT, RandomPolicy(3):
        assert share_of_equal(base, served(built, policy)) == 1
    assert share_of_equal(base, [served(built, SHIFT, [one])[0] for one in PROMPTS]) == 1


EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4}
SWIFT = EIGHT | {"model_type": "llama_swiftkv", "num_key_value_layers": 1}
VARIANTS = {
    "codes": ({}, {"quantization": "fp8"}),
    "a cache of codes": ({}, {"kv_cache_dtype": "fp8"}),
    "norms of heads": ({"model_type": "qwen3"}, {}),
    "heads of their own": ({"num_attention_heads": 8, "num_key_value_heads": 8}, {}),
    "late layers": (SWIFT, {}),
    "experts": (engines.MOE | {"shared_expert_intermediate_size": 256}, {}),
    "drafts": ({}, {"speculation": "ngram"}),
    "gathered weights": ({}, {"weights": "gather"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bits_are_the_same_with(variant):
    built = build("invariant", (32,), *VARIANTS[variant])
    base = served(built, BASE)
    assert share_of_equal(base, served(built, RandomPolicy(5))) == 1
    assert share_of_equal(base, [served(built, SHIFT, [one])[0] for one in PROMPTS]) == 1


@pytest.mark.thorough
def test_without_them_the_bits_differ():
    """That the tests above can fail."""
    built = engine("fast", 32)
    base = served(built, BASE)
    assert share_of_equal(base, served(built, SHIFT)) < 0.1
    assert share_of_equal(base, [served(built, SHIFT, [one])[0] for one in PROMPTS]) < 0.1


@pytest.mark.thorough
def test_float32_sums_are_nearly_the_same():
    built = engine("float32", 32)
    base, shift = served(built, BASE), served(built, SHIFT)
    assert share_of_equal(base, shift) > 0.9
