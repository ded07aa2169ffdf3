"""A fleet on devices: whatever groups come and go, requests get what they would get without."""

import itertools
from collections import Counter

import jax
import pytest
from echo_pools import Told
from engines import checkpoint, make, tokens
from fleet_histories import STATES, Named, assert_same, play, requests_of
from oracle import numpy_llama
from spent import exhaustive

from shiftjax.build import Built
from shiftjax.core.lookahead import Lookahead
from shiftjax.core.request import Request, SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.drafts.speculation import DraftStats
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups
from shiftjax.parallel.grid import Group

pytestmark = pytest.mark.thorough

SHAPES = {  # name: tensors, units and tp, widths
    "3-heads": ({}, 8, 1, (1, 2, 8)),
    "4-heads-tp2-swiftkv": (
        {
            "model_type": "llama_swiftkv",
            "num_hidden_layers": 2,
            "num_key_value_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        4,
        2,
        (1, 2, 4),
    ),
    "8-heads-window": (
        {
            "model_type": "mistral",
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "sliding_window": 24,
        },
        8,
        1,
        (1, 4, 8),
    ),
    "2-heads-split": (
        {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
        8,
        1,
        (1, 2, 8),
    ),
}
DRAFTING = "3-heads"  # the shape whose engine drafts, too


@pytest.fixture(
    scope="module",
    params=["3-heads", *exhaustive("4-heads-tp2-swiftkv", "8-heads-window", "2-heads-split")],
)
def shape(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def built(shape) -> Built:
    """A unit's pool holds one long sequence or two short ones, so that some are preempted."""
    overrides, units, tp, widths = SHAPES[shape]
    directory, *_ = checkpoint(**overrides)
    controls = {"max_draft_rows": 12, "fixed_drafts": True}
    drafts = {"speculation": "suffix", "controls": controls}
    return make(
        directory,
        None,
        tp,
        whole=True,
        fleet=True,
        devices=units * tp,
        fleet_widths=widths,
        fleet_policy="context",
        num_blocks=30,
        preemption="swap",
        host_memory="8MB",
        shift_threshold=16,  # so the larger bucket is compiled in both modes
        kv_split="position" if shape.endswith("split") else "replicate",
        **(drafts if shape == DRAFTING else {}),
    )


@pytest.fixture(scope="module")
def never_switched(built) -> Named:
    """What requests get from groups that stay, without drafts."""
    moved = built.engine.topology.find(Fleet).stats.num_moved_sequences
    schedulers = [lane.scheduler for lane in built.engine.lanes]
    speculations = [scheduler.lookahead for scheduler in schedulers]
    for scheduler in schedulers:
        scheduler.lookahead = Lookahead()
    wanted, _ = play(built, requests_of(1), None)
    for scheduler, speculation in zip(schedulers, speculations, strict=True):
        scheduler.lookahead = speculation
    assert built.engine.topology.find(Fleet).stats.num_moved_sequences == moved
    return wanted


def test_the_oracle_agrees_with_a_run_that_never_switched(shape, never_switched):
    _, config, tensors = checkpoint(**SHAPES[shape][0])
    greedy = [r for r in requests_of(1) if r.sampling.is_greedy]
    assert len(greedy) == 8
    for request in greedy:
        prompt, most = list(request.prompt_token_ids), request.sampling.max_tokens
        expected = numpy_llama.greedy(config, tensors, prompt, most)
        assert tokens(never_switched[request.request_id, 0]) == expected


def test_tokens_are_those_of_a_run_that_never_switched(shape, built, never_switched):
    engine, fleet = built.engine, built.engine.topology.find(Fleet)
    moved, counter, seen = fleet.stats.num_moved_sequences, CompileCounter(), Counter()
    before = engine.stats().num_preemptions
    counter.start()
    for seed, preemption in enumerate(("swap", "recompute") * 5, 1):
        found, happened = play(built, requests_of(1), seed, preemption)
        assert found.keys() == never_switched.keys()
        assert_same(found, never_switched)
        seen += happened
        after = engine.stats()
        is_preempted = all(after.num_preemptions[kind] > before[kind] for kind in before)
        if seed > 2 and seen["cut"] and is_preempted:  # what happens depends on who is ready when
            break
    counter.stop()
    assert fleet.stats.num_moved_sequences - moved > 20
    faults = (fleet.stats.failed_changes.total(), after.num_failed_steps, counter.count)
    assert faults == (0, 0, 0), faults
    assert seen["cut"] > 0
    assert is_preempted, (before, after)
    if shape == DRAFTING:
        assert (
            min(after.find(DraftStats).tokens["suffix", end] for end in ("accepted", "rejected"))
            > 0
        )


def test_an_abort_in_any_state_harms_nobody_else(built, never_switched):
    seen = Counter()
    for seed in range(4, 8):
        found, happened = play(built, requests_of(1), seed, "swap", STATES)
        assert_same(found, never_switched)
        seen += happened
    assert seen.keys() >= STATES


def test_a_prefix_is_found_in_the_group_that_a_request_has_moved_to(shape, built):
    _, config, tensors = checkpoint(**SHAPES[shape][0])
    engine, policy, widths = built.engine, Told(), built.deployment.widths
    units, prompt = built.deployment.grid.units, [(7 * i) % 190 + 3 for i in range(70)]
    engine.topology.find(Fleet).policy = policy
    engine.flush_prefix_cache()
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    first = Request("first", prompt, greedy)
    second = Request("second", [*prompt[:66], 5, 6], greedy)
    found: Named = {}

    turns = itertools.count(1)

    def turns_until(is_over) -> None:
        while not is_over():
            for event in engine.step(float(next(turns))):
                found.setdefault((event.request_id, event.index), []).append(event)
            engine.check()

    policy.wishes = [Wish(equal_groups(units, widths[0]), "told", "move")]
    turns_until(lambda: not policy.wishes and len(engine.topology.find(Fleet).arrangement) > 1)
    engine.add_request(first)
    turns_until(lambda: len(found.get(("first", 0), ())) > 3)
    policy.wishes = [Wish(equal_groups(units, widths[-1]), "told", "move")]
    turns_until(lambda: len(engine.topology.find(Fleet).arrangement) == 1)
    wide = engine.topology.find(Fleet).lanes[Group(0, units)].scheduler
    assert wide.num_used_blocks and not wide.running[0].num_registered_blocks
    hits = wide.tables.num_prefix_hit_tokens
    turns_until(lambda: wide.running[0].num_registered_blocks)
    engine.add_request(second)
    turns_until(lambda: not engine.has_work())
    assert wide.tables.num_prefix_hit_tokens == hits + 66 // wide.config.block_size * (
        wide.config.block_size
    )
    for request in (first, second):
        expected = numpy_llama.greedy(config, tensors, list(request.prompt_token_ids), 30)
        assert tokens(found[request.request_id, 0]) == expected, request.request_id


def test_weights_stay_where_they_are_and_memory_does_not_grow(built):
    engine, fleet = built.engine, built.engine.topology.find(Fleet)
    policy, units = Told(), built.deployment.grid.units
    fleet.policy = policy

    def addresses() -> list[int]:
        return [
            shard.data.unsafe_buffer_pointer()
            for runner in built.runners
            for arrays in runner.memory._by_use.values()
            for array in arrays
            for shard in array.addressable_shards
        ]

    before = addresses()
    engine.add_request(
        Request("a", [5, 6, 7, 8], SamplingParams(max_tokens=100, ignore_eos=True, temperature=0))
    )
    counts = []
    for turn in range(60):
        wide = built.deployment.widths[turn % len(built.deployment.widths)]
        policy.wishes = [Wish(equal_groups(units, wide), "told", "move")]
        engine.step(float(turn))
        if turn >= 20:
            counts.append(len(jax.live_arrays()))
    engine.abort("a")
    while engine.has_work():
        engine.step(100.0)
    assert addresses() == before
    assert max(counts[20:]) <= max(counts[:20])
