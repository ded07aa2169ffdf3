"""Scheduler, allocator and engine together, under random traffic: nothing leaks, starves or lies.

The runner audits the KV behind every block table in every step, so that a stale block, a wrong
share or a lost swap fails at the step that would have read it.
"""

import pytest
from echo_kit import (
    runner_of,
)
from hypothesis import event, given, settings
from spent import examples
from traffic_kit import FAST, FAULTS, POISONED, check_served, check_through_faults, engines, traffic

from shiftjax.host_tier.host_stats import HostStats


@pytest.mark.costs(15)
@settings(FAST, max_examples=examples(250))
@given(engines(), traffic())
def test_any_schedule_gives_the_reference_tokens(engine, clients):
    stats = check_served(engine, clients)
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
    for kind, number in check_served(engine, clients).num_preemptions.items():
        event(f"{kind}: {number > 0}")


@settings(FAST, max_examples=examples(120))
@given(
    engines(),
    traffic(most=8),
    FAULTS,
    POISONED,
)
def test_faults_end_their_requests_only(engine, clients, faults, poisoned):
    accepted, listener = check_through_faults(engine, clients, faults, poisoned)
    for name in poisoned & {client.request.request_id for client in accepted}:
        assert listener.outcomes[name, 0].last.finish_reason in ("error", "abort")
        assert not listener.outcomes[name, 0].token_ids
