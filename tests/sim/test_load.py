"""Loads that plans are made for: lengths, arrivals at one of several servers, and shares."""

import itertools
import statistics

import pytest

from shiftjax.options import ConfigError
from shiftjax.sim.estimate import Workload
from shiftjax.sim.load import LEAST_REQUESTS, MOST_REQUESTS, Limits, even_load, load_of
from shiftjax.sim.trace import TraceRequest, poisson

LIMITS, EACH = Limits(1.0, 0.05), Workload(500, 30)


def cv(values: list[float]) -> float:
    return statistics.pstdev(values) / statistics.mean(values)


def gaps(requests) -> list[float]:
    times = [request.arrival_seconds for request in requests]
    return [b - a for a, b in itertools.pairwise(times)]


def test_lengths_that_differ_are_those_of_the_load():
    alike, spread = (even_load(EACH, LIMITS, cv).of_one(9.0, 3, 0) for cv in (0.0, 1.0))
    assert len(spread) == len(alike) and {r.num_prompt_tokens for r in alike} == {500}
    assert 0.7 < cv([r.num_prompt_tokens for r in spread]) < 1.4
    assert statistics.mean(r.num_prompt_tokens for r in spread) == pytest.approx(500, rel=0.2)


def test_servers_take_requests_in_turn():
    """Of n servers, one has every n-th of the arrivals, whose gaps are sums of n."""
    load = even_load(EACH, LIMITS)
    alone, of_nine = (load.of_one(rate, servers, 0) for rate, servers in ((4.0, 1), (36.0, 9)))
    for requests in (alone, of_nine):
        assert len(requests) / requests[-1].arrival_seconds == pytest.approx(4.0, rel=0.15)
    assert cv(gaps(alone)) == pytest.approx(1.0, abs=0.15)
    assert cv(gaps(of_nine)) == pytest.approx(1 / 3, abs=0.06)


def test_seeds_draw_other_requests_at_other_moments():
    load = even_load(EACH, LIMITS, 1.0)
    first, again, other = (load.of_one(4.0, 2, seed) for seed in (0, 0, 1))
    assert first == again
    assert gaps(first)[:20] != gaps(other)[:20]
    assert [r.num_prompt_tokens for r in first][:20] != [r.num_prompt_tokens for r in other][:20]


def test_a_replay_lasts_some_lives_of_a_request():
    """At 100 requests/s, 250 of them would end before the first has its answer."""
    long = Limits(1.0, 0.1)
    few = even_load(EACH, LIMITS).of_one(1.0, 1, 0)
    assert len(few) == pytest.approx(LEAST_REQUESTS, rel=0.2)
    load = even_load(Workload(500, 100), long)
    assert load.of_one(15.0, 1, 0)[-1].arrival_seconds == pytest.approx(3 * (1 + 10), rel=0.1)
    assert len(load.of_one(100.0, 1, 0)) == pytest.approx(MOST_REQUESTS, rel=0.1)


def test_a_tail_ends_where_the_model_does():
    requests = even_load(EACH, LIMITS, 3.0, longest=800).of_one(4.0, 1, 0)
    lengths = [r.num_prompt_tokens + r.num_output_tokens for r in requests]
    assert max(lengths) == 800 and min(r.num_prompt_tokens for r in requests) >= 1
    plain = even_load(EACH, LIMITS, 3.0).of_one(4.0, 1, 0)
    assert [r for r in requests if r in plain] == [
        r for r in plain if r.num_prompt_tokens + r.num_output_tokens <= 800
    ]


def test_servers_take_the_requests_of_a_trace_in_turn():
    requests = poisson(4.0, 50.0, 100, 10, seed=1)
    load = load_of(requests)
    assert load.mean == Workload(100, 10) and load.new_share == 1.0
    own = len(requests) / requests[-1].arrival_seconds
    assert load.rate == pytest.approx(own)
    for seed in (0, 1):
        same = [r.arrival_seconds for r in load.of_one(own, 2, seed)]
        assert same == pytest.approx([r.arrival_seconds for r in requests[seed::2]])
    twice = load.of_one(2 * own, 1, 0)
    assert twice[-1].arrival_seconds == pytest.approx(requests[-1].arrival_seconds / 2)


def test_what_is_known_of_a_trace_is_not_computed_again():
    blocks = [(1, 2), (1, 2), (1, 3), (4, 5)]
    requests = [TraceRequest(float(n), 1024, 1, ids) for n, ids in enumerate(blocks)]
    assert load_of(requests).new_share == 5 / 8


def test_a_trace_without_a_rate_or_with_too_long_prompts_is_refused():
    with pytest.raises(ConfigError, match="come at once"):
        load_of([TraceRequest(0.0, 1, 1)] * 3)
    trace = [TraceRequest(0.0, 90, 10), TraceRequest(1.0, 95, 10), TraceRequest(2.0, 80, 90)]
    assert load_of(trace, longest=170).mean == Workload(88, 37)
    with pytest.raises(ConfigError, match=r"2 of 3 requests .* more than 100 tokens.* up to 170"):
        load_of(trace, longest=100)
