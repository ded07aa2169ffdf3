"""Whatever mode, order, preemption or cache a token comes through, it is the same token.

Logits are not the same to the last bit, but greedy tokens and draws with noise per token change
only where two tokens are as close as that: with these models, nowhere.
"""

import random

import numpy as np
import pytest
from engines import RandomPolicy, checkpoint, make, run, tokens
from harness import forward
from oracle import numpy_llama
from spent import exhaustive, thorough

from shiftjax.core.policies import FixedPolicy
from shiftjax.core.request import Event, SamplingParams
from shiftjax.parallel.grid import Group

MESHES = [(2, 2), (4, 2), (3, 2), (2, 4)]
# Steps of two sizes where the devices are a power of two and where not; of one elsewhere.
SIZES = {(2, 2): [8, 32], (3, 2): [8, 32]}
OUTPUT_TOKENS = 12
ALIGNED = {"hidden_size": 64, "vocab_size": 256, "intermediate_size": 128}  # for views of 2 bytes
CROWDED = 42  # blocks: fewer than the sequences that want to run need


def prompts_with_shared_prefixes(seed: int, count: int = 10) -> list[list[int]]:
    rng = random.Random(seed)
    stems = [[rng.randrange(3, 199) for _ in range(25)] for _ in range(2)]
    return [
        rng.choice(stems)[: rng.randrange(1, 25)]
        + [rng.randrange(3, 199) for _ in range(rng.randrange(1, 30))]
        for _ in range(count)
    ]


@pytest.fixture(
    scope="module",
    params=[MESHES[0], *thorough(((3, 2),)), *exhaustive(((4, 2),), ((2, 4),))],
    ids=lambda mesh: f"sp{mesh[0]}tp{mesh[1]}",
)
def crowded(request):
    """An engine whose pool holds fewer sequences than want to run, so that it preempts."""
    directory, config, tensors = checkpoint()
    sizes = SIZES.get(request.param, [32])
    built = make(directory, *request.param, whole=True, num_blocks=CROWDED, token_buckets=sizes)
    return built, config, tensors


def greedy(n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, n=n)


@pytest.mark.costs(20)
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_tokens_equal_the_oracle_under_random_modes(crowded, seed):
    built, config, tensors = crowded
    built.engine.policy = RandomPolicy(seed)
    prompts = prompts_with_shared_prefixes(seed)
    before = built.engine.stats()
    events = run(built.engine, prompts, [greedy()] * len(prompts), abort_at={6: 3})
    after = built.engine.stats()
    for i, prompt in enumerate(prompts):
        got = tokens(events[i, 0])
        expected = numpy_llama.greedy(config, tensors, prompt, OUTPUT_TOKENS)
        assert got == (expected if i != 3 else expected[: len(got)])
    assert events[3, 0][-1].finish_reason == "abort"
    # The run must have met what it claims to survive.
    assert after.num_preemptions["recompute"] > before.num_preemptions["recompute"]
    assert after.num_prefix_hit_tokens > before.num_prefix_hit_tokens
    assert min(after.mode_switches.values()) > 0
    assert after.kv_usage == 0


def test_sampled_tokens_are_those_of_the_request_alone(crowded):
    """Under every parameter, preemption and random modes: the tokens, and nearly the logprobs."""
    built, _, _ = crowded
    prompts = prompts_with_shared_prefixes(2, 6)
    params = [
        SamplingParams(
            temperature=1.1,
            top_p=0.9,
            top_k=50 if i % 2 else 0,
            frequency_penalty=0.3 * (i % 3),
            repetition_penalty=1.2,
            seed=i,
            n=1 + i % 2,
            max_tokens=OUTPUT_TOKENS,
            min_tokens=5,
            logprobs=2,
        )
        for i in range(len(prompts))
    ]
    built.engine.policy = FixedPolicy(-1)
    alone = {}
    for i, prompt in enumerate(prompts):
        events = run(built.engine, [prompt], [params[i]])
        alone |= {(i, index): event for (_, index), event in events.items()}
    built.engine.policy = RandomPolicy(3)
    together = run(built.engine, prompts, params)
    assert together.keys() == alone.keys()
    for key, events in together.items():
        assert tokens(events) == tokens(alone[key])
        got = [entry.logprob for e in events for entry in e.logprobs]
        want = [entry.logprob for e in alone[key] for entry in e.logprobs]
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.costs(60)
@pytest.mark.parametrize(
    ("sp", "tp", "numerics"),
    [
        (4, 2, "invariant"),
        *thorough((8, 1, "integer")),
        *exhaustive((2, 2, "invariant"), (1, 8, "integer")),
    ],
)
def test_in_bfloat16_bits_are_those_of_the_request_alone(sp, tp, numerics):
    """With strict `numerics`: sampled and greedy, preempted, from the prefix cache, in chunks."""
    directory, *_ = checkpoint(**ALIGNED)
    own = {"dtype": "bfloat16", "numerics": numerics, "token_buckets": [64]}
    built = make(directory, sp, tp, whole=True, num_blocks=CROWDED, **own)
    prompts = prompts_with_shared_prefixes(1)
    params = [
        SamplingParams(temperature=i % 2, top_p=0.9, seed=i, max_tokens=OUTPUT_TOKENS, logprobs=0)
        for i in range(len(prompts))
    ]

    def logprobs(events: list[Event]) -> list[tuple[int, float]]:
        return [(one.token_id, one.logprob) for event in events for one in event.logprobs]

    built.engine.policy = FixedPolicy(-1)
    alone = []
    for prompt, own in zip(prompts, params, strict=True):
        built.engine.flush_prefix_cache()
        alone.append(logprobs(run(built.engine, [prompt], [own])[0, 0]))
    built.engine.policy, before = RandomPolicy(3), built.engine.stats()
    together = run(built.engine, prompts, params)
    after = built.engine.stats()
    assert [logprobs(together[i, 0]) for i in range(len(prompts))] == alone
    assert after.num_preemptions["recompute"] > before.num_preemptions["recompute"]
    assert after.num_prefix_hit_tokens > before.num_prefix_hit_tokens


@pytest.mark.thorough
def test_fewer_than_one_seeded_request_in_200_changes_in_a_batch():
    directory, _, _ = checkpoint()
    sizes = SIZES[2, 2]
    built = make(
        directory, 2, 2, whole=True, num_blocks=CROWDED, token_buckets=sizes
    )  # compiled above
    rng = random.Random(8)
    prompts = [[rng.randrange(3, 199) for _ in range(rng.randrange(1, 20))] for _ in range(500)]
    params = [SamplingParams(seed=i, max_tokens=3, ignore_eos=True) for i in range(len(prompts))]
    built.engine.policy = FixedPolicy(-1)
    alone = [run(built.engine, [prompts[i]], [params[i]])[0, 0] for i in range(len(prompts))]
    built.engine.policy = RandomPolicy(9)
    together = run(built.engine, prompts, params)
    changed = sum(tokens(together[i, 0]) != tokens(alone[i]) for i in range(len(prompts)))
    assert changed <= len(prompts) // 200


@pytest.mark.parametrize(
    ("sp", "tp"),
    [MESHES[0], *thorough(*MESHES[1:])],
)
def test_all_modes_write_the_same_cache(sp, tp):
    """KV invariance for arbitrary (SP, TP): the papers' claim, over the contents of the pool."""
    directory, _, _ = checkpoint()
    prompt = list(range(3, 40))
    modes = Group(0, sp).modes
    base, *others = (forward(directory, prompt, sp, tp, mode, "alias")[-1] for mode in modes)
    blocks = slice(1, 1 + len(prompt) // 8)  # full blocks; block 0 takes the padding
    for other in others:
        for layer, pools in enumerate(zip(base, other, strict=True)):
            for in_base, in_other in zip(*pools, strict=True):
                a, b = np.asarray(in_base)[blocks], np.asarray(in_other)[blocks]
                assert np.abs(a).max() > 0.1
                np.testing.assert_allclose(a, b, atol=2e-5, err_msg=f"layer {layer}")


@pytest.mark.costs(10)
@pytest.mark.parametrize("overlap", [True, False])
def test_swapped_sequences_come_back_as_they_were(overlap):
    directory, config, tensors = checkpoint()
    options = {"preemption": "swap", "host_memory": "8MB", "overlap": overlap}
    built = make(directory, 2, 2, num_blocks=CROWDED, prefix_caching=False, **options)
    built.engine.policy = RandomPolicy(5)
    prompts = prompts_with_shared_prefixes(4, 8)
    events = run(built.engine, prompts, [greedy()] * len(prompts))
    assert built.engine.stats().num_preemptions["swap"] > 0
    for i, prompt in enumerate(prompts):
        expected = numpy_llama.greedy(config, tensors, prompt, OUTPUT_TOKENS)
        assert tokens(events[i, 0]) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["slice", "replicate"])
def test_other_weight_strategies_give_the_same_tokens(strategy):
    directory, config, tensors = checkpoint()
    built = make(directory, 3, 2, num_blocks=CROWDED, controls={"shift_weights": strategy})
    built.engine.policy = RandomPolicy(6)
    prompts = prompts_with_shared_prefixes(5, 4)
    events = run(built.engine, prompts, [greedy()] * len(prompts))
    for i, prompt in enumerate(prompts):
        expected = numpy_llama.greedy(config, tensors, prompt, OUTPUT_TOKENS)
        assert tokens(events[i, 0]) == expected


@pytest.mark.costs(10)
def test_groups_share_one_queue():
    """dp: independent groups of devices, each request on one of them."""
    directory, config, tensors = checkpoint()
    built = make(directory, 2, 1, dp=3, token_buckets=[32])
    prompts = prompts_with_shared_prefixes(7, 9)
    events = run(built.engine, prompts, [greedy()] * len(prompts))
    for i, prompt in enumerate(prompts):
        expected = numpy_llama.greedy(config, tensors, prompt, OUTPUT_TOKENS)
        assert tokens(events[i, 0]) == expected
    devices = {d for runner in built.runners for d in runner.step.mesh.devices.flat}
    assert len(devices) == 6
