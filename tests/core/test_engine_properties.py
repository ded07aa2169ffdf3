"""Scheduler, allocator and engine together, under random traffic: nothing leaks, starves or lies.

The runner audits the KV behind every block table in every step, so that a stale block, a wrong
share or a lost swap fails at the step that would have read it.
"""

import pytest
from echo_kit import (
    MAX_MODEL_LEN,
    runner_of,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from spent import examples
from traffic_kit import FAST, check_tokens, engines, play, traffic

from shiftjax.host_tier.host_stats import HostStats


@pytest.mark.costs(15)
@settings(FAST, max_examples=examples(250))
@given(engines(), traffic())
def test_any_schedule_gives_the_reference_tokens(engine, clients):
    accepted, listener = play(engine, clients)
    check_tokens(engine, accepted, listener, errors=set())
    stats = engine.stats()
    event(f"preempted: {any(stats.num_preemptions.values())}")
    event(f"prefix hits: {stats.num_prefix_hit_tokens > 0}")
    event(f"on the host: {(host := stats.find(HostStats)) is not None and host.num_hit_tokens > 0}")
    steps = sum(len(runner_of(engine, group).plans) for group in range(len(engine.lanes)))
    assert sum(stats.steps_by_mode.values()) == steps
    assert stats.num_failed_steps == 0


@pytest.mark.costs(15)
@settings(FAST, max_examples=examples(150))
@given(engines(tightness=2, least_seqs=3), traffic(least=8, most=12))
def test_crowds_in_a_small_pool_get_the_reference_tokens(engine, clients):
    accepted, listener = play(engine, clients)
    check_tokens(engine, accepted, listener, errors=set())
    stats = engine.stats()
    for kind, number in stats.num_preemptions.items():
        event(f"{kind}: {number > 0}")


@settings(FAST, max_examples=examples(120))
@given(
    engines(),
    traffic(most=8),
    st.dictionaries(st.integers(0, 30), st.sampled_from(["run", "fetch"]), max_size=3),
    st.sets(st.sampled_from(["r0", "r3"])),
)
def test_faults_end_their_requests_only(engine, clients, faults, poisoned):
    runners = [runner_of(engine, group) for group in range(len(engine.lanes))]
    for runner in runners:
        runner.faults, runner.poisoned = dict(faults), set(poisoned)
    lost = sum(client.request.sampling.n * (MAX_MODEL_LEN + 2) for client in clients)
    accepted, listener = play(engine, clients, extra_steps=lost * len(faults) * len(runners))
    failed = set().union(*(runner.failed_requests for runner in runners))
    check_tokens(engine, accepted, listener, errors=failed | poisoned)
    assert sum(runner.num_resets for runner in runners) == engine.stats().num_failed_steps
    for name in poisoned & {client.request.request_id for client in accepted}:
        assert listener.outcomes[name, 0].last.finish_reason in ("error", "abort")
        assert not listener.outcomes[name, 0].token_ids
