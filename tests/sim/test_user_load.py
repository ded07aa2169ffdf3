"""Users as the load of a plan: who asks what, what is out of reach, and both directions."""

import math
from typing import Any

import pytest
from test_servers import field_of, target

from shiftjax.options import ConfigError
from shiftjax.sim.advice import least_devices
from shiftjax.sim.advice_words import in_words
from shiftjax.sim.closed_loop import ClosedLoop
from shiftjax.sim.estimate import Workload
from shiftjax.sim.load import LEAST_REQUESTS, SEEDS, Limits
from shiftjax.sim.most_load import most_load
from shiftjax.sim.replay import replay
from shiftjax.sim.trace import TraceRequest
from shiftjax.sim.trials import Measured, Trials, measure, measure_at
from shiftjax.sim.user_load import ROUNDS, even_users, users_of
from shiftjax.targets import NO_TARGETS

LIMITS, EACH = Limits(1.0, 0.06), Workload(500, 30)
LOAD = even_users(EACH, 0.0)
SMALL: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}


def servers(load=LOAD, num_devices=4):
    field = field_of(target("l4x8", num_devices=num_devices), LIMITS, load, **SMALL)
    return {each.deployment.name: each for each in field.servers}


def test_servers_have_users_of_their_own_and_the_fullest_is_replayed():
    found = [LOAD.of_one(100, servers, 0) for servers in (1, 3, 200)]
    assert [each.users for each in found if isinstance(each, ClosedLoop)] == [100, 34, 1]
    assert [len(each) for each in found] == [ROUNDS * 100, LEAST_REQUESTS, LEAST_REQUESTS]
    assert LOAD.each(0.1 + 0.2, 1) == 1.0 and LOAD.each(1.1 + 2.2 - 0.3, 1) == 3.0


def test_a_seed_draws_lengths_and_thoughts():
    first, again, other = (even_users(EACH, 2.0, 1.0).of_one(8, 1, seed) for seed in (0, 0, 1))
    assert first == again and list(first) != list(other)
    assert isinstance(other, ClosedLoop) and (other.think_seconds, other.seed) == (2.0, 1)
    longest = max(r.num_prompt_tokens + r.num_output_tokens for r in first)
    cut = even_users(EACH, 0.0, 1.0, longest=900).of_one(8, 1, 0)
    assert longest > 900 >= max(r.num_prompt_tokens + r.num_output_tokens for r in cut)


def test_users_ask_what_a_trace_has_however_it_came():
    trace = [TraceRequest(0.0, 100 + n, 10, (n // 2,)) for n in range(40)]
    load = users_of(trace, 1.5)
    assert load.mean == Workload(120, 10) and load.new_share < 1
    of_second = load.of_one(6, 2, 1)
    assert [r.num_prompt_tokens for r in of_second] == list(range(101, 140, 2))
    assert isinstance(of_second, ClosedLoop) and of_second.users == 3
    assert "users think for 1.5 s on average" in load.in_words
    with pytest.raises(ConfigError, match="40 of 40 requests of this trace have more than 100"):
        users_of(trace, 0.0, longest=100)


def test_the_first_answers_to_all_users_are_left_out():
    """All of them ask at once, which they never do again."""
    server, trials = servers()["sp4"], Trials(LOAD, LIMITS, 0.0, 9)
    run = replay(LOAD.of_one(100, 1, 0), server.target, server.deployment)
    whole, later = measure(run, LIMITS), measure_at(trials, server, 1, 100, 0)
    assert later == measure(run, LIMITS, 100) and later.ttft < whole.ttft
    rest = [
        r for r in run.requests[100:] if r.ttft <= LIMITS.ttft and (r.tpot or 0.0) <= LIMITS.tpot
    ]
    assert later.inside == len(rest) / 300
    assert later.tokens_per_second == whole.tokens_per_second


@pytest.mark.parametrize("think", [0.0, 4.0])
@pytest.mark.parametrize("name", ["sp4", "tp2"])
def test_no_number_of_users_that_a_replay_keeps_is_out_of_reach(name, think):
    load = even_users(EACH, think)
    server, trials = servers(load)[name], Trials(load, LIMITS, 0.0, 9)
    most = server.most_load
    assert not trials.first(server, 1, 1.05 * most + 1).meets
    assert any(trials.first(server, 1, most * x).meets for x in (0.8, 0.6, 0.4))


def test_a_closed_form_of_users_follows_littles_law():
    server = servers(even_users(EACH, 3.0))["sp4"]
    first, later = server.closed.under(24.0)
    rate = 24 / (3.0 + first + 30 * later)
    assert server.closed.times(rate) == pytest.approx((first, later), rel=1e-3)
    few, many = (server.ratio(users, LIMITS) for users in (2.0, 60.0))
    assert few < many < math.inf


class Known(Trials):
    """A server keeps the limits for 22 users, with targets for 26; seed 1 is worse."""

    def _measured(self, server, num_servers, rate, seed):
        self.num_replays += 1
        own = self.load.each(rate, num_servers)
        most = 22 if server.deployment.targets == NO_TARGETS else 26
        tpot = self.limits.tpot * own / most * (1.05 if seed == 1 else 1.0)
        return Measured(0.1, tpot, 1.0, 1.0, 1, 0)


def test_the_most_users_are_whole_and_kept_with_all_seeds():
    trials = Known(LOAD, LIMITS, 0.05, 200)
    field = field_of(target("l4x8"), LIMITS, LOAD, **SMALL)
    only = [s._replace(most_load=40.0) for s in field.servers if s.deployment.name == "tp2"]
    advice = most_load(field._replace(servers=only), trials, 4, SMALL)
    best = advice.best
    assert best is not None and len(best.measured) == SEEDS
    assert best.rate == 24 and best.num_servers == 2 and best.changed  # of 26, with all seeds
    lines = in_words(advice, {}).splitlines()
    assert "carry 48 users (throughput +-" in lines[0]
    assert "on average, all alike; users ask again at once" in lines[1]
    assert all(each.rate == round(each.rate) for each in trials.all)
    assert best.row({})["users_each"] == 24


def test_the_least_devices_for_users():
    """24 to a server with targets: four have room for 95, where 20 without would need five."""
    trials = Known(LOAD, LIMITS, 0.05, 100)
    field = field_of(target("l4x8", num_devices=2), LIMITS, LOAD, **SMALL)
    only = [s._replace(most_load=40.0) for s in field.servers if s.deployment.name == "tp2"]
    advice = least_devices(field._replace(servers=only), trials, 95, {}, SMALL)
    best = advice.best
    assert best is not None and best.num_servers == 4 and best.rate == 24
    words = in_words(advice, {})
    assert "For 95 users, of which 90% get" in words and "Predicted for each at 24 users" in words


def test_no_more_servers_than_users_are_tried():
    trials = Known(LOAD, Limits(0.05, 0.06), 0.05, 500)  # no first token comes so soon
    field = field_of(target("l4x8"), LIMITS, LOAD, **SMALL)
    advice = least_devices(field, trials, 5, {}, SMALL)
    assert advice.best is None and advice.is_complete and trials.all
    assert max(each.num_servers for each in trials.all) <= 10


@pytest.mark.costs(25)
def test_a_server_of_a_plan_keeps_its_limits_for_its_users():
    """By replays of its own, without the first round; with half as many again it does not."""
    trials = Trials(LOAD, LIMITS, 0.05, 40)
    field = field_of(target("l4x8", num_devices=2), LIMITS, LOAD, **SMALL)
    best = most_load(field, trials, 2, SMALL).best
    assert best is not None

    def inside(users: int, seed: int) -> float:
        run = replay(LOAD.of_one(users, 1, seed), best.target, best.deployment)
        later = run.requests[users:]
        return sum(r.ttft <= 1.0 and (r.tpot or 0.0) <= 0.06 for r in later) / len(later)

    own = round(best.rate)
    assert min(inside(own, seed) for seed in range(SEEDS)) >= 0.85  # 90% keep each limit
    assert inside(round(1.5 * own), 0) < 0.85
