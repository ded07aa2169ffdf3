"""Closed loops: who asks when, and what the replay of one keeps whatever the engine does."""

from dataclasses import replace
from itertools import pairwise

import pytest

from shiftjax.options import ConfigError
from shiftjax.sim.closed_loop import ClosedLoop, closed_loop
from shiftjax.sim.experiments import choose_deployments, sweep, target_from, trace_from
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import Replay, replay
from shiftjax.sim.trace import TraceRequest, requests_at

TARGET = target_from({"model": "llama-8b", "machine": "h100x8", "dtype": "fp8"})
TARGET = replace(TARGET, engine=TARGET.engine.offline)  # whose front end takes no time
TP2 = deploy(TARGET, "tp2,policy=base,dp=4")
SLACK = 1e-9  # of sums of seconds: what ends at once ends within it


def of_users(users: int, count: int, **more) -> ClosedLoop:
    return closed_loop(requests_at([0.0] * count, 500, 40, 0.5, seed=1), users, **more)


def running_at(run: Replay, moment: float) -> int:
    """Requests that have come and are not answered, just after a moment."""
    after = moment + SLACK
    return sum(r.arrival <= after < r.arrival + r.completion for r in run.requests)


@pytest.mark.parametrize("users", [1, 7, 32])
def test_every_user_has_one_request_at_a_time_and_asks_as_soon_as_it_is_answered(users):
    run = replay(of_users(users, 120), TARGET, TP2)
    arrivals = [r.arrival for r in run.requests]
    assert len(arrivals) == 120 and run.num_refused == 0
    assert arrivals[:users] == [0.0] * users
    moments = sorted(set(arrivals))
    *before, last = (running_at(run, at) for at in moments)
    assert before == [users] * (len(moments) - 1)
    ends = sorted(r.arrival + r.completion for r in run.requests)
    # With the last requests more may end at once than there still are.
    ended = sum(abs(end - moments[-1]) <= SLACK for end in ends)
    assert last == users - ended + arrivals.count(moments[-1])
    assert sorted(arrivals[users:]) == pytest.approx(ends[: 120 - users])


def test_users_are_throughput_times_seconds_of_a_round():
    """Little's law, with the time to think: N = X (R + Z)."""
    run = replay(of_users(16, 640, think_seconds=0.5), TARGET, TP2)
    rounds = [r.completion for r in run.requests]
    last = max(r.arrival for r in run.requests)  # after it users leave
    mean = sum(rounds) / len(rounds)
    assert len(rounds) / last * (mean + 0.5) == pytest.approx(16, rel=0.1)
    assert mean < 0.3  # so that thinking counts for more than answers


def test_a_slow_engine_is_asked_less_often():
    """An open load asks as often as it likes; here requests come no faster than they end."""
    loop = of_users(64, 192)
    quick, slow = (replay(loop, TARGET, deploy(TARGET, name)) for name in ("tp8", "tp1,dp=1"))
    for run in (quick, slow):
        assert max(running_at(run, r.arrival) for r in run.requests) == 64
    assert slow.requests[-1].arrival > 1.5 * quick.requests[-1].arrival


def test_a_user_who_is_refused_asks_again():
    one = TraceRequest(0.0, 100, 5)
    too_long = TraceRequest(0.0, TP2.max_model_len, 5)
    run = replay(closed_loop([one, too_long, too_long, one], 1), TARGET, TP2)
    assert (len(run.requests), run.num_refused) == (2, 2)
    first, second = run.requests
    assert second.arrival == pytest.approx(first.completion)


def test_thinking_is_drawn_by_the_seed():
    runs = [
        replay(of_users(4, 40, think_seconds=2.0, seed=seed), TARGET, TP2) for seed in (3, 3, 4)
    ]
    first, again, other = ([r.arrival for r in run.requests] for run in runs)
    assert first == again != other
    assert all(before <= after for before, after in pairwise(first))
    assert min(first) > 0  # they think before their first request, too


def test_rates_multiply_the_users():
    points = sweep(of_users(8, 80), TARGET, [TP2], [1, 2.5])
    assert [(point.row()["users"], point.rate) for point in points] == [(8, None), (20, None)]
    first, second = (point.row() for point in points)
    assert second["tokens_per_second"] > 1.5 * first["tokens_per_second"]
    assert "rate" not in first


def test_a_trace_and_a_synthetic_load_become_loops(tmp_path):
    lengths = {"prompt_tokens": 100, "output_tokens": 5}
    made = trace_from({"kind": "closed", "users": 3, **lengths})
    assert isinstance(made, ClosedLoop) and (len(made), made.users) == (30, 3)
    made = trace_from({"kind": "closed", "users": 3, "requests": 7, "think_seconds": 2, **lengths})
    assert isinstance(made, ClosedLoop) and (len(made), made.think_seconds) == (7, 2)
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_seconds": 0, "prompt_tokens": 10, "output_tokens": 2}\n'
        '{"arrival_seconds": 9, "prompt_tokens": 20, "output_tokens": 3, "prefix_ids": [1]}\n'
    )
    loop = trace_from({"file": str(path), "users": 2})
    assert isinstance(loop, ClosedLoop) and loop.users == 2
    assert [(r.arrival_seconds, r.num_prompt_tokens) for r in loop] == [(0.0, 10), (0.0, 20)]
    assert loop[1].prefix_ids == (1,)


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"users": 0}, "users must be a whole number from 1 on, got 0"),
        ({"users": 2.5}, "users must be a whole number from 1 on, got 2.5"),
        ({"users": 2, "think_seconds": -1}, "think_seconds must be 0 or more, and finite, got -1"),
        ({"users": 2, "requests": 0}, "1 to 10,000,000 requests, not 0"),
        ({"users": 2, "rate": 3}, "unknown argument of closed 'rate'"),
        ({}, "closed needs users"),
    ],
)
def test_wrong_loops_are_refused(options, fragment):
    with pytest.raises(ConfigError, match=fragment):
        trace_from({"kind": "closed", "prompt_tokens": 9, "output_tokens": 9} | options)


def test_an_oracle_of_a_loop_is_refused():
    oracle = choose_deployments(TARGET, ["oracle"])
    with pytest.raises(ConfigError, match="when users ask depends on the deployment"):
        sweep(of_users(2, 4), TARGET, oracle, [1])
