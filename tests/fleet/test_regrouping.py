"""Groups come and go under running requests; nobody's tokens, and nobody's blocks, are lost."""

import random
from dataclasses import replace

import pytest
from echo_kit import (
    Listener,
    assert_quiescent,
    make_request,
    run_to_end,
)
from echo_pools import EchoMover, Told
from fleet_kit import assert_as_alone, make_fleet, random_arrangement, random_requests
from guesses_kit import Guesses, let_draft
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spent import examples

from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.speculation import DraftStats, Prices, Speculation
from shiftjax.fleet import handover
from shiftjax.fleet.fleet_policy import NeedPolicy, Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import (
    equal_groups,
    possible_widths,
)
from shiftjax.parallel.grid import Group

UNITS = 8
WIDTHS = possible_widths(UNITS)


def play(
    engine, requests, rng: random.Random, *, kinds=("move",), aborts=False, num_failures=0
) -> Listener:
    """Requests come, groups change, in any order, until all is done."""
    policy = engine.topology.find(Fleet).policy
    listener, todo, turn = Listener(), list(requests), 0
    while todo or engine.has_work():
        for _ in range(rng.randrange(3)):
            if todo:
                engine.add_request(todo.pop(0))
        if rng.random() < 0.3:
            policy.wishes = [Wish(random_arrangement(rng), "told", rng.choice(kinds))]
        if aborts and rng.random() < 0.1:
            name = str(rng.randrange(len(requests)))
            if name not in listener.ended:
                listener.hear(engine.abort(name))
        listener.hear(engine.step(float(turn)))
        engine.check()
        turn += 1
        assert turn < 4000, engine.stats()
    assert engine.stats().num_failed_steps == num_failures
    return listener


@pytest.mark.costs(30)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    num_blocks=st.sampled_from([26, 40, 120]),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    by_position=st.booleans(),
)
def test_nobody_notices_a_move(
    seed, num_kv_heads, num_blocks, overlap, prefix_caching, by_position
):
    rng = random.Random(seed)
    aborts = rng.random() < 0.5
    engine = make_fleet(
        num_kv_heads=num_kv_heads,
        num_blocks=num_blocks,
        by_position=by_position,
        overlap=overlap,
        prefix_caching=prefix_caching,
    )
    requests = random_requests(rng, 14)
    listener = play(engine, requests, rng, aborts=aborts)
    assert_as_alone(engine, requests, listener)
    assert_quiescent(engine)


@pytest.mark.costs(25)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    preemption=st.sampled_from(["recompute", "swap"]),
    aborts=st.booleans(),
)
def test_nobody_notices_any_kind_of_switching(seed, preemption, aborts):
    rng = random.Random(seed)
    engine = make_fleet(
        num_blocks=40,
        fleet={"switch": "soft", "max_pause_seconds": 6.0},
        preemption=preemption,
        num_host_blocks=rng.choice([2, 10, 60]),
    )
    requests = random_requests(rng, 14)
    kinds = ("move", "soft", "hard", "sequential")
    listener = play(engine, requests, rng, kinds=kinds, aborts=aborts)
    assert_as_alone(engine, requests, listener)
    assert_quiescent(engine)


@pytest.mark.costs(20)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    preemption=st.sampled_from(["recompute", "swap"]),
    quality=st.sampled_from([None, 0, 5, 10]),
    switch=st.sampled_from(["move", "soft", "hard", "sequential"]),
    fault=st.sampled_from([0, 0, 1, 3, 8]),
)
def test_nobody_notices_what_is_tight(seed, preemption, quality, switch, fault):
    """Small steps and pools, drafts of any quality, moves that fail, prompts that are scored."""
    rng = random.Random(seed)
    engine = make_fleet(
        num_kv_heads=rng.choice([1, 2, 4, 8]),
        by_position=rng.random() < 0.5,
        num_blocks=rng.choice([13, 26]),
        max_num_seqs=rng.choice([2, 4]),
        max_num_batched_tokens=rng.choice([8, 16]),
        max_proposed_rows=12,
        watermark=0.0,
        preemption=preemption,
        num_host_blocks=rng.choice([2, 10, 60]),
        policy=Told(NeedPolicy(WIDTHS)),
        fleet={"switch": switch, "max_pause_seconds": 3.0},
    )
    if quality is not None:
        let_draft(engine, Guesses(quality, most=4))
    engine.topology.find(Fleet).mover.faults = {fault}
    requests = [
        each
        for each in random_requests(rng, 14, prompt_logprobs=rng.choice([None, 0]))
        if len(each.prompt_token_ids) + each.sampling.max_tokens <= engine.limits.num_kv_tokens
    ]
    kinds = ("move", "soft", "hard", "sequential", None)
    listener = play(engine, requests, rng, kinds=kinds, aborts=True)
    assert_as_alone(engine, requests, listener)
    assert_quiescent(engine)


def test_what_runs_is_moved_and_not_computed_again():
    engine = make_fleet()
    listener = Listener()
    requests = [make_request(str(i), [1, 2, 3, i % 13], max_tokens=30) for i in range(6)]
    for request in requests:
        engine.add_request(request)
    for turn in range(6):
        listener.hear(engine.step(float(turn)))
    engine.topology.find(Fleet).policy.wishes = [Wish(equal_groups(UNITS, UNITS), "told")]
    for turn in range(6, 12):
        listener.hear(engine.step(float(turn)))
        engine.check()
    (last,) = engine.topology.find(Fleet).history
    assert (last.arrangement, last.num_sequences, last.num_recomputed) == ((Group(0, 8),), 6, 0)
    run_to_end(engine, listener)
    assert_as_alone(engine, requests, listener)
    assert engine.stats().num_preemptions == {"recompute": 0, "swap": 0}
    assert engine.stats().num_failed_steps == 0  # else the audit has found a move that is wrong


@pytest.mark.parametrize("is_bind", [True, False])
def test_what_was_moved_is_found_by_the_next_turn_of_a_conversation(is_bind):
    units, whole = equal_groups(UNITS, 1), equal_groups(UNITS, UNITS)
    before, after = (units, whole) if is_bind else (whole, units)
    engine = make_fleet(block_size=2, num_kv_heads=8, arrangement=before)
    request = make_request("a", list(range(12)), max_tokens=24, ignore_eos=True)
    listener = Listener()
    engine.add_request(request)
    for turn in range(4):
        listener.hear(engine.step(float(turn)))
    engine.topology.find(Fleet).policy.wishes = [Wish(after, "told")]
    run_to_end(engine, listener)
    assert engine.topology.find(Fleet).history[-1].num_sequences == 1
    said = listener.outcomes["a", 0].token_ids
    engine.add_request(make_request("b", [*range(12), *said, 1], max_tokens=1))
    run_to_end(engine, Listener())
    assert engine.stats().num_prefix_hit_tokens == (32 if is_bind else 34)  # in whole blocks


def test_continuations_that_share_blocks_share_them_after_a_move():
    engine = make_fleet(block_size=2, num_kv_heads=8)
    request = make_request("a", [1, 2, 3] * 8, n=3, max_tokens=20, ignore_eos=True)
    engine.add_request(request)
    listener = Listener()
    for turn in range(5):
        listener.hear(engine.step(float(turn)))
    engine.topology.find(Fleet).policy.wishes = [Wish(equal_groups(UNITS, UNITS), "told")]
    for turn in range(5, 9):
        listener.hear(engine.step(float(turn)))
    tables = [
        s.block_table for s in engine.topology.find(Fleet).lanes[Group(0, 8)].scheduler.running
    ]
    assert len(tables) == 3 and len({table[0] for table in tables}) == 1
    engine.topology.find(Fleet).policy.wishes = [Wish(equal_groups(UNITS, 2), "told")]
    run_to_end(engine, listener)
    assert_as_alone(engine, [request], listener)


def test_drafts_know_prompts_from_outputs_after_a_move():
    """Continuations share the index of their prompt, and a corpus has outputs from their begin."""
    engine = make_fleet(num_blocks=120, max_proposed_rows=12)
    for lane in engine.lanes:
        prices = Prices((32,), engine.policy, lane.modes, None)
        drafting = Drafting(DraftOptions(speculation="suffix", fixed_drafts=True))
        lane.scheduler.lookahead = Speculation(drafting, prices, max_rows=12)
    request = make_request("a", [1, 2, 3, 4] * 3, n=3, max_tokens=30, ignore_eos=True)
    engine.add_request(request)
    listener = Listener()
    for turn in range(12):
        listener.hear(engine.step(float(turn)))
    engine.topology.find(Fleet).policy.wishes = [Wish(equal_groups(UNITS, UNITS), "told")]
    run_to_end(engine, listener)
    assert engine.topology.find(Fleet).stats.num_moved_sequences == 3
    assert_as_alone(engine, [request], listener)
    stats = engine.stats().find(DraftStats)
    assert stats.num_corpus_tokens == 3 * 30 and stats.num_drafts > 0


def test_a_request_that_fits_no_unit_is_served_by_a_wider_group():
    """And a unit's pool is what it was before, when it has ended."""
    policy = NeedPolicy(WIDTHS)
    engine = make_fleet(num_kv_heads=8, num_blocks=12, policy=policy, max_model_len=160)
    long = make_request("long", [1] * 60, max_tokens=20, ignore_eos=True)
    short = [make_request(str(i), [2, 3, i], max_tokens=12) for i in range(3)]
    listener = Listener()
    for request in (*short, long):
        engine.add_request(request)
    run_to_end(engine, listener)
    assert_as_alone(engine, [*short, long], listener)
    assert {width for width, *_ in engine.topology.find(Fleet).stats.binds} == {4}
    engine.add_request(make_request("next", [1], max_tokens=2))
    run_to_end(engine, listener)
    assert engine.topology.find(Fleet).arrangement == equal_groups(UNITS, 1)


@pytest.mark.parametrize("switch", ["move", "soft", "hard", "sequential"])
def test_a_request_without_a_limit_is_served_wider_when_it_comes_to_need_it(monkeypatch, switch):
    """Whatever the kind of switching: it would wait for ever for others to give way."""
    monkeypatch.setattr("shiftjax.fleet.needs.GROWTH_TOKENS", 4)
    engine = make_fleet(
        num_kv_heads=8,
        num_blocks=12,
        policy=NeedPolicy(WIDTHS),
        max_model_len=100,
        fleet={"switch": switch, "max_pause_seconds": 4.0},
    )
    request = make_request("a", [1] * 5, max_tokens=None, ignore_eos=True)
    listener = Listener()
    engine.add_request(request)
    run_to_end(engine, listener)
    assert_as_alone(engine, [request], listener)
    widths = [
        max(g.width for g in turn.arrangement) for turn in engine.topology.find(Fleet).history
    ]
    assert widths == [2, 4, 8] and engine.stats().num_preemptions["recompute"] == 0


def test_what_pauses_goes_on_as_soon_as_the_wide_group_has_nothing_to_do():
    policy = NeedPolicy(WIDTHS, frozenset([-1]), bind_width=8)
    engine = make_fleet(policy=policy, fleet={"switch": "hard", "max_pause_seconds": 1e6})
    requests = [make_request(str(i), [1, i], max_tokens=20, ignore_eos=True) for i in range(5)]
    requests.append(make_request("first", [5, 5], max_tokens=9, priority=-1, ignore_eos=True))
    listener = Listener()
    for request in requests[:-1]:
        engine.add_request(request)
    for turn in range(3):
        listener.hear(engine.step(float(turn)))
    engine.add_request(requests[-1])
    assert run_to_end(engine, listener) < 60
    assert_as_alone(engine, requests, listener)
    reasons = [(turn.kind, turn.reason) for turn in engine.topology.find(Fleet).history]
    assert reasons == [("hard", "need"), ("move", "done")]
    assert engine.topology.find(Fleet).stats.paused_seconds > 0


def test_others_go_on_while_a_request_waits_for_groups_to_give_way():
    """It waits for the four units that it will have; the rest take what comes after it."""
    policy = NeedPolicy(WIDTHS, frozenset([-1]), bind_width=4)
    engine = make_fleet(policy=policy, fleet={"switch": "sequential", "max_pause_seconds": 1e6})
    old = [make_request(str(i), [1, i], max_tokens=30, ignore_eos=True) for i in range(8)]
    wide = make_request("wide", [5, 5], max_tokens=9, priority=-1, ignore_eos=True)
    late = make_request("late", [7], max_tokens=4, ignore_eos=True)
    listener = Listener()
    for request in old:
        engine.add_request(request)
    for turn in range(3):
        listener.hear(engine.step(float(turn)))
    engine.add_request(wide)
    listener.hear(engine.step(3.0))
    engine.add_request(late)
    for turn in range(4, 12):
        listener.hear(engine.step(float(turn)))
    assert "late" in listener.ended and "wide" not in listener.ended
    run_to_end(engine, listener)
    assert_as_alone(engine, [*old, wide, late], listener)


@pytest.mark.parametrize(("min_width", "kind"), [(1, "move"), (8, "hard")])
def test_auto_weighs_what_waits_for_the_wide_group_and_nothing_else(min_width, kind):
    """A bind for those that run moves them, whoever is in the queue."""
    asked = []

    def kind_of_bind(change, wanting):
        asked.append([each.request_id for each in wanting])
        return "hard"

    options = {"switch": "auto", "kind_of_bind": kind_of_bind}
    engine = make_fleet(max_num_seqs=1, fleet=options)
    requests = [make_request(str(i), [1, 2, i], max_tokens=20) for i in range(8)]
    late = replace(make_request("late", [7, 7], max_tokens=9), min_width=min_width)
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    for turn in range(3):
        listener.hear(engine.step(float(turn)))
    engine.add_request(late)
    engine.topology.find(Fleet).policy.wishes = [Wish(equal_groups(UNITS, UNITS), "told")]
    run_to_end(engine, listener)
    assert_as_alone(engine, [*requests, late], listener)
    assert asked == ([["late"]] if kind == "hard" else [])
    assert engine.topology.find(Fleet).history[0].kind == kind


def test_a_class_has_a_group_as_wide_as_it_is_told(monkeypatch):
    policy = NeedPolicy(WIDTHS, frozenset([-1]), bind_width=4)
    engine = make_fleet(policy=policy)
    requests = [make_request(str(i), [1, i], max_tokens=20, ignore_eos=True) for i in range(5)]
    requests.append(make_request("first", [5, 5], max_tokens=9, priority=-1, ignore_eos=True))
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    run_to_end(engine, listener)
    assert_as_alone(engine, requests, listener)
    assert engine.topology.find(Fleet).stats.binds[4, "move", "need"] == 1
    assert engine.topology.find(Fleet).arrangement == equal_groups(UNITS, 1)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_move_that_fails_ends_nobody(failing):
    engine = make_fleet()
    mover = engine.topology.find(Fleet).mover
    assert isinstance(mover, EchoMover)
    mover.faults = {failing}
    requests = [make_request(str(i), [1, 2, i], max_tokens=25) for i in range(6)]
    listener = play(engine, requests, random.Random(failing))
    assert_as_alone(engine, requests, listener)
    assert engine.topology.find(Fleet).stats.failed_changes["move"] == (mover.num_calls >= failing)


def test_a_step_of_a_group_that_fails_harms_only_its_requests():
    engine = make_fleet()
    requests = [make_request(str(i), [1, 2, i], max_tokens=25) for i in range(8)]
    lane = engine.topology.find(Fleet).lanes[Group(3, 1)]
    lane.runner.faults = {4: "fetch"}
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    run_to_end(engine, listener)
    failed = frozenset(lane.runner.failed_requests)
    assert failed
    assert_as_alone(engine, requests, listener, but=failed)
    for name in failed:
        assert listener.outcomes[name, 0].last.finish_reason == "error"


def test_a_step_of_a_wide_group_that_fails_recomputes_who_pauses_below():
    engine = make_fleet(fleet={"max_pause_seconds": 1000.0})
    requests = [make_request(str(i), [1, 2, i], max_tokens=25) for i in range(8)]
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    for turn in range(4):
        listener.hear(engine.step(float(turn)))
    assert isinstance(engine.topology.find(Fleet).policy, Told)
    engine.topology.find(Fleet).policy.wishes = [Wish(equal_groups(UNITS, UNITS), "told", "hard")]
    wide = engine.topology.find(Fleet).lanes[Group(0, 8)]
    wide.runner.faults = {3: "fetch"}
    late = replace(make_request("late", [7, 7, 7], max_tokens=9), min_width=UNITS)
    engine.add_request(late)
    for turn in range(4, 8):
        listener.hear(engine.step(float(turn)))
    assert {lane.state for lane in engine.topology.find(Fleet).lanes.values()} == {
        "open",
        "paused",
        "idle",
    }
    for turn in range(8, 20):
        listener.hear(engine.step(float(turn)))
    assert "late" in listener.ended
    run_to_end(engine, listener)
    assert_as_alone(engine, [*requests, late], listener, but=frozenset(["late"]))
    assert listener.outcomes["late", 0].last.finish_reason == "error"


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_hand_over_that_breaks_ends_nobody(failing, monkeypatch):
    """In the middle, with some requests here and some there."""
    engine, calls = make_fleet(), [0]
    carry = handover._Route.carry

    def breaks(self, *arguments):
        calls[0] += 1
        if calls[0] == failing:
            raise RuntimeError("told to")
        return carry(self, *arguments)

    monkeypatch.setattr(handover._Route, "carry", breaks)
    requests = [make_request(str(i), [1, 2, i], max_tokens=25, n=1 + i % 2) for i in range(6)]
    listener = play(engine, requests, random.Random(failing))
    assert_as_alone(engine, requests, listener)
    assert engine.topology.find(Fleet).stats.failed_changes["move"] == (calls[0] >= failing)
    assert_quiescent(engine)


def test_after_three_failed_moves_groups_pause_instead():
    engine = make_fleet()
    mover = engine.topology.find(Fleet).mover
    assert isinstance(mover, EchoMover)
    mover.faults = set(range(1, 1000))
    requests = [make_request(str(i), [1, 2, i % 13], max_tokens=25) for i in range(14)]
    listener = play(engine, requests, random.Random(2), kinds=(None,))
    assert_as_alone(engine, requests, listener)
    kinds = [turn.kind for turn in engine.topology.find(Fleet).history]
    assert engine.topology.find(Fleet).stats.failed_changes["move"] >= 3 and "hard" in kinds


def test_a_policy_that_fails_changes_nothing():
    class Broken(Told):
        def arrange(self, view):
            raise RuntimeError("told to")

    engine = make_fleet(policy=Broken())
    requests = [make_request(str(i), [1, 2, i], max_tokens=9) for i in range(3)]
    assert_as_alone(engine, requests, play_through(engine, requests))
    assert engine.topology.find(Fleet).arrangement == equal_groups(UNITS, 1)
    assert engine.topology.find(Fleet).stats.failed_changes["policy"] > 0


def play_through(engine, requests) -> Listener:
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    run_to_end(engine, listener)
    return listener


def test_groups_that_do_not_come_to_a_safe_point_go_on_as_they_were():
    engine = make_fleet()
    slow = [engine.topology.find(Fleet).lanes[Group(unit, 1)] for unit in (2, 3)]
    is_ready = [lane.runner.is_ready for lane in slow]
    for lane in slow:
        lane.runner.is_ready = lambda handle: False
    requests = [make_request(str(i), [1, 2, i], max_tokens=25) for i in range(8)]
    engine.wait = lambda lanes: None
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    listener.hear(engine.step(0.0))
    engine.topology.find(Fleet).policy.wishes = [Wish(equal_groups(UNITS, UNITS), "told")]
    for turn in range(1, 30):
        listener.hear(engine.step(float(turn)))
    assert {each.state for each in engine.topology.find(Fleet).lanes.values()} == {
        "closing",
        "idle",
    }
    for turn in range(30, 40):
        listener.hear(engine.step(float(turn)))
    assert engine.topology.find(Fleet).arrangement == equal_groups(UNITS, 1)
    assert engine.topology.find(Fleet).stats.failed_changes["not_ready"] == 1
    for lane, function in zip(slow, is_ready, strict=True):
        lane.runner.is_ready = function
    run_to_end(engine, listener)
    assert_as_alone(engine, requests, listener)


def test_nothing_is_bound_once_the_end_has_begun():
    policy = NeedPolicy(WIDTHS, frozenset([-1]), bind_width=8)
    engine = make_fleet(policy=policy, fleet={"switch": "hard", "max_pause_seconds": 1e6})
    requests = [make_request(str(i), [1, i], max_tokens=20, ignore_eos=True) for i in range(5)]
    wide = make_request("wide", [5, 5], max_tokens=30, priority=-1, ignore_eos=True)
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    listener.hear(engine.step(0.0))
    engine.add_request(wide)
    for turn in range(1, 6):
        listener.hear(engine.step(float(turn)))
    states = {lane.state for lane in engine.topology.find(Fleet).lanes.values()}
    assert "paused" in states
    engine.drain()
    listener.hear(engine.step(7.0))
    assert "paused" not in {lane.state for lane in engine.topology.find(Fleet).lanes.values()}
    run_to_end(engine, listener)
    assert_as_alone(engine, [*requests, wide], listener)
    assert len(engine.topology.find(Fleet).stats.binds) == 1


@pytest.mark.parametrize("failing", range(1, 9))
def test_a_step_of_a_wide_group_fails_while_those_below_take_turns_with_it(failing):
    engine = make_fleet(fleet={"max_pause_seconds": 2.0})
    requests = [make_request(str(i), [1, 2, i], max_tokens=25) for i in range(8)]
    late = make_request("late", [7, 7, 7], max_tokens=30, ignore_eos=True)
    late = replace(late, min_width=UNITS)
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    for turn in range(4):
        listener.hear(engine.step(float(turn)))
    engine.add_request(late)
    engine.topology.find(Fleet).policy.wishes = [Wish(equal_groups(UNITS, UNITS), "told", "hard")]
    engine.topology.find(Fleet).lanes[Group(0, 8)].runner.faults = {failing: "fetch"}
    for turn in range(4, 2000):
        listener.hear(engine.step(float(turn)))
        engine.check()
        if not engine.has_work():
            break
    assert_as_alone(engine, [*requests, late], listener, but=frozenset(["late"]))
    assert listener.outcomes["late", 0].last.finish_reason == "error"
    assert_quiescent(engine)


def test_prompts_that_are_cut_by_a_bind_go_on_within_the_budgets_of_one_group():
    """Of a group alone, one prompt at most is unfinished; the runner audits tokens and rows."""
    engine = make_fleet(max_num_batched_tokens=8, max_num_seqs=4)
    requests = [
        make_request(str(i), [i] * 21, max_tokens=4, prompt_logprobs=0 if i == 1 else None)
        for i in range(4)
    ]
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    listener.hear(engine.step(0.0))
    engine.topology.find(Fleet).policy.wishes = [Wish(equal_groups(UNITS, UNITS), "told")]
    run_to_end(engine, listener)
    assert engine.topology.find(Fleet).stats.num_moved_sequences == 4
    assert engine.stats().num_failed_steps == 0
    assert_as_alone(engine, requests, listener)


@pytest.mark.parametrize("is_bind", [True, False])
def test_sequences_keep_their_place_in_the_order_when_groups_change(is_bind):
    """Running and waiting ones, of prompts that may pass each other, in one patience for all."""
    widths = (1, UNITS) if is_bind else (UNITS, 1)
    before, after = (equal_groups(UNITS, width) for width in widths)
    engine = make_fleet(arrangement=before, max_num_seqs=4, max_num_batched_tokens=4)
    engine.patience = 0.5
    listener, lengths = Listener(), [12, 3, 7, 1, 9, 2, 5, 4, 11, 6] * 2
    requests = [
        make_request(str(n), [n % 13] * length, 0.1 * n, max_tokens=9, ignore_eos=True)
        for n, length in enumerate(lengths)
    ]
    for request in requests:
        engine.add_request(request)
    for turn in range(2):
        listener.hear(engine.step(2.0 + turn))

    def orders():
        lanes = (lane.scheduler.requests.values() for lane in engine.lanes)
        return {each.request.request_id: each.order for lane in lanes for (each,) in lane}

    held = orders()
    assert len(held) > 2
    engine.topology.find(Fleet).policy.wishes = [Wish(after, "told")]
    for turn in range(2, 5):
        listener.hear(engine.step(2.0 + turn))
        engine.check()
    (last,) = engine.topology.find(Fleet).history
    assert last.num_sequences
    later = orders()
    assert later.keys() & held.keys()
    for name, order in (held | later).items():
        number = int(name)
        assert order == (0, 0.1 * number + 0.5 * lengths[number], number, 0)
    run_to_end(engine, listener)
    assert_as_alone(engine, requests, listener)
