"""Groups of one engine step on their own: on a virtual clock, so every count is exact."""

import pytest
from echo_kit import ENGINE_SEED, VOCAB_SIZE, Listener, make_request, reference
from time_kit import PacedRunner

from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import make_policy
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.parallel.grid import Group
from shiftjax.sim.devices import Clock

QUICK, SLOW = 5.0, 50.0  # seconds of a step


def make(*seconds: float, overlap: bool = True, max_num_seqs: int = 8, policy=None):
    """An engine with a group for each duration, their runners and the clock."""
    clock = Clock()
    config = SchedulerConfig(64, 4, max_num_seqs, 32)
    runners = [PacedRunner(clock, each) for each in seconds]
    lanes = [Lane(Scheduler(config), runner, Group(0, 2).modes) for runner in runners]
    policy = policy or make_policy("threshold", 8)
    limits = RequestLimits(VOCAB_SIZE, 252, 63 * 4)
    options = {"overlap": overlap, "seed": ENGINE_SEED, "clock": clock, "wait": clock.wait_for_one}
    return Engine(lanes, policy, limits, **options), runners, clock


def ended_steps(overlap: bool, *seconds: float, until: float) -> int:
    """Steps that the first group has ended by then, with a long request in every group."""
    engine, runners, clock = make(*seconds, overlap=overlap)
    for number in range(len(seconds)):
        engine.add_request(make_request(str(number), [1, 2], max_tokens=200, ignore_eos=True))
    while clock.now < until:
        engine.step(clock.now)
    return runners[0].num_ended


@pytest.mark.parametrize("overlap", [True, False])
def test_a_group_does_as_many_steps_beside_a_slow_one_as_alone(overlap):
    alone = ended_steps(overlap, QUICK, until=100 * QUICK)
    assert alone == 100
    assert ended_steps(overlap, QUICK, SLOW, until=100 * QUICK) >= alone - 1


def test_an_idle_group_takes_a_request_while_another_computes():
    engine, (busy, idle), clock = make(SLOW, SLOW)
    engine.add_request(make_request("long", [1, 2], max_tokens=20, ignore_eos=True))
    clock.next_arrival = 120.0
    while clock.now < clock.next_arrival:
        engine.step(clock.now)
    assert clock.now == 120.0 and len(engine.lanes[0].in_flight) == 2  # in the midst of a step
    engine.add_request(make_request("late", [3], max_tokens=2, ignore_eos=True))
    clock.next_arrival = float("inf")
    engine.step(clock.now)
    assert idle.started[0] == 120.0
    assert busy.num_ended == 2


def test_lanes_give_the_tokens_of_the_reference_in_any_company():
    engine, _, clock = make(QUICK, SLOW, 7.0)
    listener = Listener()
    requests = [make_request(str(n), [n + 1, 5], max_tokens=3 + n) for n in range(9)]
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        listener.hear(engine.step(clock.now))
    for number, request in enumerate(requests):
        expected, reason = reference(engine, request, number, 0)
        outcome = listener.outcomes[request.request_id, 0]
        assert (outcome.token_ids, outcome.last.finish_reason) == (expected, reason)
    engine.check()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failure_ends_what_its_own_group_computed(overlap):
    engine, (failing, _), clock = make(QUICK, QUICK, overlap=overlap)
    failing.fails_at = 2
    reasons = {}
    for name in ("a", "b"):
        engine.add_request(make_request(name, [1], max_tokens=6, ignore_eos=True))
    while engine.has_work():
        for event in engine.step(clock.now):
            if event.finish_reason:
                reasons[event.request_id] = event.finish_reason
    assert reasons == {"a": "error", "b": "length"}
    assert engine.stats().num_failed_steps == 1
    engine.check()


def test_the_longest_wait_is_that_of_the_group_that_makes_no_progress():
    engine, _, clock = make(QUICK, SLOW)
    assert engine.waits_since(3.0) == 3.0  # nothing waits
    for name in ("a", "b"):
        engine.add_request(make_request(name, [1], max_tokens=50, ignore_eos=True))
    while clock.now < 9 * QUICK:
        engine.step(clock.now)
    assert engine.waits_since(clock.now) == 0.0  # the slow group's first step still runs
    while clock.now < SLOW + 2 * QUICK:
        engine.step(clock.now)
    assert engine.waits_since(clock.now) == SLOW


def test_steps_that_ended_say_their_mode_their_time_and_their_tokens():
    engine, _, clock = make(QUICK, SLOW)
    engine.add_request(make_request("a", [1] * 12, max_tokens=3, ignore_eos=True))
    engine.add_request(make_request("b", [1], max_tokens=2, ignore_eos=True))
    ended = []
    while engine.has_work():
        engine.step(clock.now)
        ended += [step[:3] for step in engine.ended_steps]
    quick = [("base", QUICK, 12), ("shift", QUICK, 1), ("shift", QUICK, 1)]
    assert sorted(ended) == sorted([*quick, ("shift", SLOW, 1), ("shift", SLOW, 1)])


# ------------------------------------------------------------ what a policy is told


class Listening:
    """SHIFT always; keeps what it was told."""

    def __init__(self):
        self.told = []

    def choose(self, plan, modes, num_waiting, last_mode):
        self.told.append((num_waiting, last_mode))
        return modes[-1]


@pytest.mark.parametrize(("num_requests", "n"), [(3, 1), (1, 3)])  # in front, in the group
def test_a_policy_is_told_how_many_wait_and_the_mode_before(num_requests, n):
    policy = Listening()
    engine, _, clock = make(QUICK, max_num_seqs=1, policy=policy)
    flights = []
    engine.watchers = [lambda lane, flight, seconds, at: flights.append(flight)]
    for number in range(num_requests):
        engine.add_request(make_request(str(number), [1], n=n, max_tokens=1, ignore_eos=True))
    while engine.has_work():
        engine.step(clock.now)
    shift = engine.lanes[0].modes[-1]
    assert policy.told == [(2, None), (1, shift), (0, shift)]
    assert [(flight.num_waiting, flight.last_mode) for flight in flights] == policy.told


def test_decodes_count_towards_the_threshold_like_prompt_tokens():
    engine, _, clock = make(QUICK, max_num_seqs=12)
    request = make_request("a", [1, 2], n=12, max_tokens=5, ignore_eos=True)
    engine.add_request(request)
    while engine.has_work():
        engine.step(clock.now)
    # Prompts of at most 2 + 11 tokens, then 4 steps of 12 decodes; the threshold is 8.
    assert engine.stats().steps_by_mode["base"] >= 4
