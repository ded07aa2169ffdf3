"""`numerics`: log-probabilities by mode, batch and chunk: equal bits, or not.

Random histories, with preemption and prefix hits, are in `test_mode_invisibility.py`.
"""

import itertools
import random
from functools import cache
from pathlib import Path

import engines
import numpy as np
import pytest
from echo_pools import Told
from engines import RandomPolicy, run
from spent import exhaustive, thorough

from shiftjax.build import Built
from shiftjax.core.policies import FixedPolicy
from shiftjax.core.policy import Policy
from shiftjax.core.request import Event, SamplingParams
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups
from shiftjax.phases.resharding import ReshardingState

SP, TP = 4, 2
NUM_TOKENS = 6
# Wide enough that another order of sums changes what some of them are rounded to.
WIDE = {"hidden_size": 256, "vocab_size": 256, "intermediate_size": 1024}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
PROMPTS = [
    [random.Random(i).randrange(3, 199) for _ in range(size)]
    for i, size in enumerate((3, 40, 17, 70, 1, 33, 8, 64))
]
BASE, BETWEEN, SHIFT = map(FixedPolicy, (0, 1, -1))
Found = list[list[tuple[int, float]]]


@cache
def engine(numerics: str, *sizes: int) -> Built:
    return build(numerics, sizes, {}, {})


def build(numerics: str, sizes: tuple[int, ...], model: dict, given: dict) -> Built:
    directory, *_ = engines.checkpoint(**(WIDE | model))
    own = {"token_buckets": list(sizes), "max_num_batched_tokens": sizes[-1], "num_blocks": 300}
    options = own | {"dtype": "bfloat16", "max_num_seqs": 16, "prefix_caching": False}
    degrees = {} if "devices" in given else {"sp": SP, "tp": TP}
    return engines.build_tiny(directory, numerics=numerics, **(degrees | options | given))


def served(built: Built, policy: Policy, prompts: list[list[int]] = PROMPTS) -> Found:
    """Tokens and log-probabilities of each prompt, all of them served together."""
    built.engine.policy = policy
    for lane in built.engine.lanes:  # of a fleet, or of phases, each has its own
        lane.policy = None if lane.policy is None else policy
    events = run(built.engine, prompts, [GREEDY] * len(prompts))
    return [
        [(one.token_id, one.logprob) for event in events[i, 0] for one in event.logprobs]
        for i in range(len(prompts))
    ]


def share_of_equal(one: Found, other: Found) -> float:
    """Of all log-probabilities, those with the same bits."""
    same = [a == b for texts in zip(one, other, strict=True) for a, b in zip(*texts, strict=True)]
    assert len(same) == len(one) * NUM_TOKENS
    return float(np.mean(same))


@pytest.mark.costs(60)
@pytest.mark.parametrize(
    ("numerics", "sizes"),
    [("invariant", (32,)), *thorough(("integer", (32, 128)))],
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
OWN_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
VARIANTS = {
    "codes": ({}, {"quantization": "fp8"}),
    "a cache of codes, and windows": (
        {"model_type": "mistral", "sliding_window": 24},
        {"kv_cache_dtype": "fp8"},
    ),
    "norms of heads, and stages": (OWN_HEADS | {"model_type": "qwen3"}, {"pp": 2, "sp": 2}),
    "late layers": (SWIFT, {}),
    "experts": (engines.MOE | {"shared_expert_intermediate_size": 256}, {}),
    "drafts": ({}, {"speculation": "ngram"}),
    "gathered weights": ({}, {"weights": "gather"}),
}


@pytest.mark.parametrize(
    "variant",
    [*thorough(*list(VARIANTS)[1:5]), *exhaustive("codes", "drafts", "gathered weights")],
)
def test_the_bits_are_the_same_with(variant):
    built = build("invariant", (32,), *VARIANTS[variant])
    base = served(built, BASE)
    assert share_of_equal(base, served(built, RandomPolicy(5))) == 1
    assert share_of_equal(base, [served(built, SHIFT, [one])[0] for one in PROMPTS]) == 1


def of_parity(name: str, numerics: str) -> Built:
    folder = Path(__file__).parent.parent / "data" / "parity" / name
    own = {"token_buckets": [32], "max_num_batched_tokens": 32, "num_blocks": 300}
    own |= {"sp": 2, "tp": 2} if name == "olmo2" else {"sp": SP, "tp": TP}  # of 6 heads and of 8
    options = own | {"dtype": "bfloat16", "max_num_seqs": 16, "prefix_caching": False}
    return engines.build_tiny(folder, numerics=numerics, **options)


@pytest.mark.costs(60)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        ("deepseek_v3", "integer"),
        *exhaustive(("deepseek_v2", "invariant"), ("deepseek_v3", "invariant")),
        ("olmo2", "invariant"),
        *exhaustive(("olmo2", "integer")),
    ],
)
def test_the_bits_are_the_same_with_latents_and_wide_norms(name, numerics):
    """In small models, of which a part has the same bits anyhow."""
    loose = of_parity(name, "fast")
    assert share_of_equal(served(loose, BASE), served(loose, SHIFT)) < 0.9
    built = of_parity(name, numerics)
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
def test_the_bits_are_the_same_in_groups_of_any_width():
    """And of requests that move between them; blocks of wide ones have more tokens than rounds."""
    own = {"devices": 4, "tp": 1, "fleet_widths": (1, 4), "block_size": 32}
    built = build("invariant", (32,), EIGHT, {"fleet": True} | own)
    assert max(each.block_size for each in built.deployment.by_width.values()) == 128
    fleet, units = built.engine.topology.find(Fleet), built.deployment.grid.units
    assert fleet is not None
    policy = fleet.policy = Told()

    def served_in(*widths: int) -> Found:
        """By turns, in steps of four."""
        turns, step = itertools.count(), built.engine.step

        def turn(now: float) -> list[Event]:
            if (nth := next(turns)) % 4 == 0:
                width = widths[nth // 4 % len(widths)]
                policy.wishes = [Wish(equal_groups(units, width), "told", "move")]
            return step(now)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(built.engine, "step", turn)
            return served(built, RandomPolicy(1))

    alone = served_in(1)
    assert fleet.stats.num_moved_sequences == 0
    for widths in (4,), (4, 1):
        assert share_of_equal(alone, served_in(*widths)) == 1
    assert fleet.stats.num_moved_sequences > 8


@pytest.mark.thorough
def test_the_bits_are_the_same_in_phases():
    """Prompts on one device a stage, decodes on four: both add up the numbers of four."""
    model, prompts = EIGHT | {"num_hidden_layers": 4}, [list(range(3 + i, 40)) for i in range(30)]
    own = {"devices": 4, "num_blocks": 40, "host_memory": "300KB", "max_num_seqs": 6}
    phased = build("integer", (16,), model, own | {"phases": "pp4:tp4"})
    found = served(phased, SHIFT, prompts)
    assert phased.engine.stats().find(ReshardingState).num_switches > 2
    static = build("integer", (32,), model, {"sp": 4, "tp": 1})
    assert share_of_equal(found, served(static, BASE, prompts)) == 1
