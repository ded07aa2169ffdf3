"""Phases under random traffic: the tokens of one configuration, nothing lost, nothing in vain.

Every switch is held to the rule by the exchange, every step by the audited runners.
"""

import pytest
from echo_kit import MAX_MODEL_LEN
from hypothesis import event, given, settings
from hypothesis import strategies as st
from phases_kit import exchange_of, make_phases, runners_of
from spent import examples
from traffic_kit import FAST, check_tokens, play, traffic

from shiftjax.phases.resharding import ReshardingState


@st.composite
def engines(draw):
    """Tiny pools and tiers, which may be smaller than the longest prompt, or than any."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    longest = -(-MAX_MODEL_LEN // block_size)
    max_num_seqs = draw(st.integers(1, 6))
    pools = st.integers(longest // 2, 3 * longest)
    return make_phases(
        dp=(draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        pp=(draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        num_blocks=(1 + draw(pools), 1 + draw(pools)),
        num_host_blocks=draw(st.integers(1, longest)),
        overlap=draw(st.booleans()),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)),
        eos_token_ids=draw(st.sampled_from([(), (0,)])),
        prefix_caching=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        max_preemptions=draw(st.integers(0, 3)),
    )


def extra_steps(clients) -> int:
    """For switches, and steps that move blocks alone: a few for each sequence."""
    return 50 + 10 * sum(client.request.sampling.n for client in clients)


@pytest.mark.costs(15)
@settings(FAST, max_examples=examples(120))
@given(engines(), traffic())
def test_phases_give_the_tokens_of_one_configuration(engine, clients):
    accepted, listener = play(engine, clients, extra_steps(clients))
    check_tokens(engine, accepted, listener, errors=set())
    stats = engine.stats()
    event(f"cycles: {min(3, len(exchange_of(engine).loads) // 2)}")
    event(f"preempted: {any(stats.num_preemptions.values())}")
    event(f"prefix hits: {stats.num_prefix_hit_tokens > 0}")
    assert stats.num_failed_steps == 0
    assert stats.find(ReshardingState).num_switches == len(exchange_of(engine).loads)
    assert (stats.find(ReshardingState).num_parked, stats.find(ReshardingState).num_held_bytes) == (
        0,
        0,
    )


@settings(FAST, max_examples=examples(60))
@given(engines(), traffic(least=8, most=12))
def test_crowds_in_phases(engine, clients):
    accepted, listener = play(engine, clients, extra_steps(clients))
    check_tokens(engine, accepted, listener, errors=set())
    event(f"cycles: {min(4, len(exchange_of(engine).loads) // 2)}")


@pytest.mark.costs(15)
@settings(FAST, max_examples=examples(150))
@given(
    engines(),
    traffic(most=8),
    st.lists(
        st.dictionaries(st.integers(0, 12), st.sampled_from(["run", "fetch"]), max_size=2),
        min_size=4,
        max_size=4,
    ),
    st.sets(st.sampled_from(["r0", "r3"])),
)
def test_faults_in_either_phase_end_their_requests_only(engine, clients, faults, poisoned):
    runners = runners_of(engine)
    for runner, of_runner in zip(runners, faults, strict=False):
        runner.faults, runner.poisoned = of_runner, poisoned
    lost = sum(client.request.sampling.n * (MAX_MODEL_LEN + 2) for client in clients)
    again = sum(map(len, faults)) * lost * 2
    accepted, listener = play(engine, clients, extra_steps(clients) + again)
    failed = set().union(*(runner.failed_requests for runner in runners))
    check_tokens(engine, accepted, listener, errors=failed | poisoned)
    assert sum(runner.num_resets for runner in runners) == engine.stats().num_failed_steps
