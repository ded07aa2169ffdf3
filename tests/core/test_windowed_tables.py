"""Blocks by cache group, freed behind windows: nothing leaks, and nothing that is seen is lost."""

import pytest
from echo_kit import (
    Listener,
    generate,
    make_engine,
    make_request,
    reference,
    run_to_end,
    runner_of,
)
from hypothesis import event, given, settings
from spent import examples
from traffic_kit import (
    FAST,
    FAULTS,
    POISONED,
    WINDOWS,
    check_served,
    check_through_faults,
    engines,
    traffic,
)

from pallas_kernels.window import Chunk
from shiftjax.arch.cache import blocks_kept
from shiftjax.host_tier.host_stats import HostStats


@pytest.mark.costs(15)
@settings(FAST, max_examples=examples(250))
@given(engines(windows=WINDOWS), traffic())
def test_any_schedule_gives_the_reference_tokens(engine, clients):
    stats = check_served(engine, clients)
    event(f"preempted: {any(stats.num_preemptions.values())}")
    event(f"prefix hits: {stats.num_prefix_hit_tokens > 0}")
    event(f"on the host: {(host := stats.find(HostStats)) is not None and host.num_hit_tokens > 0}")


@pytest.mark.costs(15)
@settings(FAST, max_examples=examples(150))
@given(engines(tightness=2, least_seqs=3, windows=WINDOWS), traffic(least=8, most=12))
def test_crowds_in_a_small_pool_get_the_reference_tokens(engine, clients):
    for kind, number in check_served(engine, clients).num_preemptions.items():
        event(f"{kind}: {number > 0}")


@settings(FAST, max_examples=examples(120))
@given(
    engines(windows=WINDOWS),
    traffic(most=8),
    FAULTS,
    POISONED,
)
def test_faults_end_their_requests_only(engine, clients, faults, poisoned):
    check_through_faults(engine, clients, faults, poisoned)


PROMPT = [n % 12 + 1 for n in range(40)]
SMALL = {"block_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 8}


def one_of(windows=(None, 4), **options):
    return make_engine(windows=windows, **(SMALL | {"num_blocks": 101} | options))


@pytest.mark.parametrize("windows", [(None, 4), (4,), (None, Chunk(8), Chunk(8))])
def test_a_sequence_holds_what_the_formula_says(windows):
    engine = one_of(windows, overlap=False)
    engine.add_request(make_request("a", PROMPT, max_tokens=8, ignore_eos=True))
    scheduler, most = engine.lanes[0].scheduler, {}
    while engine.has_work():
        engine.step(0.0)
        for sequence in scheduler.running:
            is_prompt = not sequence.num_output_tokens
            used = scheduler.num_used_blocks
            most[is_prompt] = max(used, most.get(is_prompt, 0))
    step = SMALL["max_num_batched_tokens"]
    assert most[True] <= sum(blocks_kept(40, window, 2, step) for window in windows)
    assert most[False] <= sum(blocks_kept(47, window, 2, 8) for window in windows)
    last = sum(blocks_kept(47, window, 2) for window in windows)
    assert last < sum(blocks_kept(47, window, 2, 8) for window in windows)


def test_prompts_of_several_steps_are_found_up_to_any_of_their_blocks():
    engine = one_of()
    generate(engine, make_request("a", PROMPT, max_tokens=2))
    for length, cached in ((21, 20), (30, 28), (40, 38)):
        prompt = PROMPT[:length] + [0] * (length < 40)
        outcomes = generate(engine, make_request(f"b{length}", prompt, max_tokens=2))
        found = outcomes[f"b{length}", 0].last.metrics.num_cached_tokens
        assert found == cached + 2 * (length == 30)


def test_nothing_is_found_before_it_is_known_to_be_finite():
    engine = one_of(windows=(4,), overlap=False)
    runner_of(engine).poisoned = {"a"}
    listener = Listener()
    engine.add_request(make_request("a", PROMPT, max_tokens=2))
    for _ in range(4):
        listener.hear(engine.step(0.0))
    request = make_request("b", PROMPT, max_tokens=2)
    engine.add_request(request)
    run_to_end(engine, listener)
    assert listener.outcomes["a", 0].last.error_code == "non_finite"
    assert not engine.lanes[0].scheduler.tables.device._unproven  # the rest is proven, or free
    outcome = listener.outcomes["b", 0]
    assert outcome.token_ids == reference(engine, request, 1, 0)[0]
    assert outcome.last.metrics.num_cached_tokens == 0


def test_observers_hear_of_the_first_group_alone():
    heard: list[bytes] = []

    class Observer:
        def stored(self, contents):
            heard.append(contents.block_hash)

        def removed(self, block_hash):
            heard.append(block_hash)

        def cleared(self):
            pass

    engine = one_of()
    engine.lanes[0].scheduler.tables.device.observer = Observer()
    generate(engine, make_request("a", PROMPT, max_tokens=2))
    assert len(heard) == 20 and {len(each) for each in heard} == {16}


def test_who_has_to_run_undisturbed_is_given_all_that_it_may_need():
    """Nobody may be preempted; tokens that are not verified yet keep blocks that none will see."""
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 6, "max_preemptions": 0}
    engine = one_of((None, 9), num_blocks=66, watermark=0.0, **options)
    prompts = [[(n + i) % 12 + 1 for i in range(7)] for n in (0, 1)]
    requests = [
        make_request(f"r{n}", prompt, n=4, max_tokens=30, ignore_eos=True)
        for n, prompt in enumerate(prompts)
    ]
    outcomes = generate(engine, *requests)
    assert {each.last.metrics.num_preemptions for each in outcomes.values()} == {0}


def test_who_comes_back_from_the_host_has_the_blocks_of_each_group():
    options = {"num_blocks": 41, "preemption": "swap", "num_host_blocks": 200}
    engine = one_of((None, 4, 4), watermark=0.0, prefix_caching=False, **options)
    requests = [
        make_request(f"r{n}", PROMPT[n : n + 12], max_tokens=30, ignore_eos=True) for n in (0, 1)
    ]
    outcomes = generate(engine, *requests)
    for number, request in enumerate(requests):
        expected, _ = reference(engine, request, number, 0)
        assert outcomes[request.request_id, 0].token_ids == expected
    assert engine.stats().num_preemptions["swap"] > 0
