"""What a waiting sequence will be given from the host is on its way before it is admitted.

Runners keep what was prefetched until it is restored, and look at what each step attends to.
"""

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

from shiftjax.host_tier.extents import MOST_AHEAD
from shiftjax.host_tier.host_stats import HostStats

STEMS = [[stem] * 5 + list(range(12)) + [stem] * 7 for stem in range(6)]  # 24 tokens, 6 blocks


def warm_engine(**options):
    """On the device fits one stem and what it generates; the host has all the others."""
    engine = make_engine(num_blocks=9, num_host_blocks=60, **options)
    for stem, prompt in enumerate(STEMS):
        generate(engine, make_request(f"warm{stem}", prompt, max_tokens=2, seed=1))
    return engine


def prefetched(engine) -> list[set[int]]:
    return [set(plan.prefetches) for plan in runner_of(engine).plans]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prefix_on_the_host_travels_while_others_have_the_devices(overlap):
    engine = warm_engine(overlap=overlap)
    assert engine.stats().find(HostStats).num_prefetches == 0  # nobody waited
    requests = [make_request(f"r{n}", STEMS[n], max_tokens=6, seed=n) for n in range(3)]
    outcomes = generate(engine, *requests)
    number = engine._num_requests - len(requests)
    for place, request in enumerate(requests):
        got = outcomes[request.request_id, 0]
        assert got.token_ids == reference(engine, request, number + place, 0)[0]
        assert got.last.metrics.num_cached_tokens == 20
    host = engine.stats().find(HostStats)
    assert 0 < host.num_prefetch_hits <= host.num_prefetches
    restored = {extent for plan in runner_of(engine).plans for extent, _ in plan.restores}
    assert set().union(*prefetched(engine)) <= restored  # none for nothing
    assert not prefetched(engine)[-1] and not runner_of(engine).ahead


def test_what_was_swapped_out_travels_before_it_comes_back():
    engine = make_engine(
        num_blocks=11, num_host_blocks=60, preemption="swap", prefix_caching=False, watermark=0.0
    )
    requests = [make_request(f"r{n}", STEMS[n][:12], max_tokens=16, seed=n) for n in range(3)]
    outcomes = generate(engine, *requests)
    for place, request in enumerate(requests):
        assert outcomes[f"r{place}", 0].token_ids == reference(engine, request, place, 0)[0]
    stats = engine.stats()
    assert stats.num_preemptions["swap"] > 0
    assert stats.find(HostStats).num_prefetch_hits > 0


def test_what_nobody_waits_for_any_more_is_forgotten():
    engine, listener = warm_engine(), Listener()
    engine.add_request(make_request("runs", STEMS[5], max_tokens=8, seed=1, ignore_eos=True))
    engine.add_request(make_request("waits", STEMS[0], max_tokens=2))
    for turn in range(3):
        listener.hear(engine.step(float(turn)))
    runner = runner_of(engine)
    assert runner.plans[-1].prefetches and runner.ahead
    listener.hear(engine.abort("waits"))
    run_to_end(engine, listener)
    assert not runner.plans[-1].prefetches and not runner.ahead
    assert engine.stats().find(HostStats).num_prefetch_hits == 0


def test_the_first_that_wait_come_first_and_few_are_on_the_devices():
    engine, listener = warm_engine(), Listener()
    engine.add_request(make_request("runs", [12] * 20, max_tokens=9, seed=1, ignore_eos=True))
    for stem in (2, 3, 1):
        engine.add_request(make_request(f"waits{stem}", STEMS[stem], max_tokens=2))
    listener.hear(engine.step(0.0))
    listener.hear(engine.step(1.0))
    plan, memory = runner_of(engine).plans[-1], engine.lanes[0].scheduler.tables.tier.memory
    assert len(plan.prefetches) == MOST_AHEAD
    tokens = {
        extent.number: [content.tokens for content in extent.contents if content]
        for extent in memory.extents
    }
    seen = [block for number in plan.prefetches for block in tokens[number]]
    assert seen[:5] == [STEMS[2][4 * block : 4 * block + 4] for block in range(5)]
    run_to_end(engine, listener)


def test_a_failed_step_leaves_nothing_on_the_devices_and_changes_no_token():
    engine, listener = warm_engine(), Listener()
    runner = runner_of(engine)
    first, second = (make_request(f"r{n}", STEMS[n], max_tokens=6, seed=n) for n in range(2))
    engine.add_request(first)
    engine.add_request(second)
    number = engine._num_requests - 1
    runner.faults = {len(runner.plans) + 2: "fetch"}
    run_to_end(engine, listener)
    assert listener.outcomes["r0", 0].last.finish_reason == "error"
    assert listener.outcomes["r1", 0].token_ids == reference(engine, second, number, 0)[0]
    assert (
        engine.stats().find(HostStats).num_prefetches
        > engine.stats().find(HostStats).num_prefetch_hits
        == 0
    )


def test_only_what_the_devices_lack_travels():
    """A prefix is evicted from its end, so its beginning is still there."""
    engine = make_engine(num_blocks=9, num_host_blocks=60)
    generate(engine, make_request("a", STEMS[0], max_tokens=1, seed=1))
    generate(engine, make_request("b", STEMS[1][:12], max_tokens=1))
    for name, prompt, most in (("c", STEMS[1][:13], 3), ("d", STEMS[0], 1)):
        engine.add_request(make_request(name, prompt, max_tokens=most, ignore_eos=True))
    run_to_end(engine, listener := Listener())
    assert listener.outcomes["d", 0].last.metrics.num_cached_tokens == 20
    host = engine.stats().find(HostStats)
    assert host.num_prefetches == host.num_prefetch_hits > 0
    assert host.num_hit_tokens < 20
