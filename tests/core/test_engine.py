"""The loop around the schedulers: groups, modes, metrics, faults, ends."""

import itertools
from dataclasses import dataclass

import pytest
from echo_kit import (
    Listener,
    assert_quiescent,
    generate,
    make_engine,
    make_request,
    reference,
    run_to_end,
    runner_of,
)

from shiftjax.core.policies import POLICIES, BasePolicy, ShiftPolicy, make_policy
from shiftjax.core.policy import wanted_modes
from shiftjax.core.request import DuplicateRequestError, StepPlan
from shiftjax.costs.buckets import Bucket
from shiftjax.hosts.calls import LostHostError
from shiftjax.parallel.grid import Group, Mode

MODES = Group(0, 4).modes  # a mode lies between base and shift
BASE, SHIFT = Mode(4, 4), Mode(4, 1)


@dataclass
class Alternating:
    """BASE and SHIFT in turn."""

    num_steps: int = 0

    def choose(self, plan: StepPlan, modes, num_waiting: int, last_mode: Mode | None) -> Mode:
        self.num_steps += 1
        return modes[0] if self.num_steps % 2 else modes[-1]


def test_threshold_chooses_by_the_tokens_of_the_step():
    policy = make_policy("threshold", 8)
    plans = [StepPlan([], num_tokens, 0, 0, [], [], 0) for num_tokens in (8, 9)]
    chosen = [policy.choose(plan, MODES, 0, None) for plan in plans]
    assert chosen == [SHIFT, BASE]


def test_policies_know_which_modes_they_may_choose():
    policy = make_policy("threshold", 8)
    assert policy.wanted(MODES, 1, Bucket(8, 8)) == [SHIFT]
    assert policy.wanted(MODES, 9, Bucket(16, 8)) == [BASE]
    assert policy.wanted(MODES, 8, Bucket(9, 8)) == [BASE, SHIFT]
    assert make_policy("base", 0).wanted(MODES, 1, Bucket(8, 8)) == [BASE]
    sizes = [Bucket(8, 8), Bucket(64, 8), Bucket(64, 40)]  # a step of 9 tokens may be in either 64
    assert list(wanted_modes(make_policy("threshold", 20), sizes, MODES).values()) == [
        [SHIFT],
        [BASE, SHIFT],
        [BASE, SHIFT],
    ]


def test_policies_by_name():
    assert make_policy("base", 0) == BasePolicy()
    assert make_policy("shift", 0) == ShiftPolicy()
    with pytest.raises(ValueError, match=", ".join(POLICIES)):
        make_policy("cost-of-living", 0)
    with pytest.raises(ValueError, match="at least 0"):
        make_policy("threshold", -1)


def test_steps_and_switches_are_counted_by_mode():
    engine = make_engine(policy=Alternating())
    (outcome,) = generate(engine, make_request("a", [1], max_tokens=5)).values()
    labels = [mode.label for mode in runner_of(engine).modes]
    assert labels == ["base", "shift"] * 2 + ["base"]
    assert engine.stats().steps_by_mode == {"base": 3, "shift": 2}
    assert engine.stats().mode_switches == {("base", "shift"): 2, ("shift", "base"): 2}
    assert outcome.last.metrics.steps_by_mode == {"base": 3, "shift": 2}


def test_metrics_are_in_seconds_of_the_clock():
    times = iter([10.0, 12.0, 16.0])
    engine = make_engine(overlap=False)
    engine._clock = lambda: next(times)
    engine.add_request(make_request("a", [1, 2], arrival=1.0, max_tokens=3))
    listener = Listener()
    for now in (4.0, 10.0, 12.0):
        listener.hear(engine.step(now))
    metrics = listener.outcomes["a", 0].last.metrics
    assert (metrics.queue_seconds, metrics.ttft_seconds, metrics.tpot_seconds) == (3.0, 9.0, 3.0)
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (2, 3)


def test_requests_go_to_the_least_loaded_group():
    engine = make_engine(dp=3)
    requests = [make_request(str(n), [1] * 8, float(n), max_tokens=4) for n in range(6)]
    requests[0] = make_request("0", [1] * 30, max_tokens=4)
    generate(engine, *requests)
    served = [
        sorted(
            {i.sequence.request.request_id for p in runner_of(engine, g).plans for i in p.scheduled}
        )
        for g in range(3)
    ]
    assert served == [["0"], ["1", "3", "5"], ["2", "4"]]


def test_a_full_group_leaves_requests_in_front_where_another_can_take_them():
    engine = make_engine(dp=2, max_num_seqs=2, overlap=False)
    for number in range(6):
        engine.add_request(make_request(str(number), [1], float(number), max_tokens=4))
    engine.step(0.0)
    assert [len(group.scheduler.requests) for group in engine.lanes] == [2, 2]
    assert (engine.stats().num_waiting, engine.stats().num_waiting_tokens) == (2, 2)
    engine.abort("0")
    engine.abort("2")
    engine.step(1.0)
    assert [len(group.scheduler.requests) for group in engine.lanes] == [2, 2]
    assert "4" in engine.lanes[0].scheduler.requests


def test_an_urgent_request_passes_those_that_wait_for_room():
    engine, listener = make_engine(num_blocks=9, max_num_seqs=2, overlap=False), Listener()
    engine.add_request(make_request("holds", [1] * 12, 0.0, max_tokens=6))
    engine.add_request(make_request("large", [2] * 24, 1.0, max_tokens=1))
    listener.hear(engine.step(0.0))
    engine.add_request(make_request("small", [3], 2.0, max_tokens=1))
    engine.add_request(make_request("urgent", [3], 3.0, max_tokens=1, priority=-1))
    listener.hear(engine.step(1.0))
    assert listener.ended == {"urgent"}
    run_to_end(engine, listener)
    assert listener.ended == {"holds", "large", "small", "urgent"}


def test_duplicate_ids_are_refused_while_the_first_lives():
    engine = make_engine()
    engine.add_request(make_request("a", [1]))
    for _ in range(2):  # queued, then running
        with pytest.raises(DuplicateRequestError, match="'a'"):
            engine.add_request(make_request("a", [1]))
        engine.step(0.0)
    engine.abort("a")
    run_to_end(engine, Listener())
    generate(engine, make_request("a", [1]))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_gives_one_last_event_per_continuation_and_then_nothing(num_steps):
    engine, listener = make_engine(), Listener()
    engine.add_request(make_request("a", [1] * 9, n=3, max_tokens=20))
    engine.add_request(other := make_request("b", [2] * 9, 1.0, max_tokens=8))
    for step in range(num_steps):
        listener.hear(engine.step(float(step)))
    events = engine.abort("a")
    assert [(e.index, e.finish_reason, e.is_last) for e in events] == [
        (0, "abort", False), (1, "abort", False), (2, "abort", True),
    ]  # fmt: skip
    listener.hear(events)
    assert engine.abort("a") == engine.abort("unknown") == []
    run_to_end(engine, listener)
    assert_quiescent(engine)
    assert listener.outcomes["b", 0].token_ids == reference(engine, other, 1, 0)[0]


def test_a_stop_string_ends_one_continuation():
    engine, listener = make_engine(), Listener()
    engine.add_request(request := make_request("a", [1], n=2, max_tokens=9, ignore_eos=True))
    for step in range(4):
        listener.hear(engine.step(float(step)))
    listener.hear(engine.finish("a", 0, "stop"))
    assert engine.finish("a", 0, "stop") == engine.finish("a", 7, "stop") == []
    run_to_end(engine, listener)
    assert_quiescent(engine)
    assert listener.outcomes["a", 0].last.finish_reason == "stop"
    assert 0 < len(listener.outcomes["a", 0].token_ids) < 9
    assert listener.outcomes["a", 1].token_ids == reference(engine, request, 0, 1)[0]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", ["run", "fetch"])
def test_a_failed_step_ends_its_batch_and_the_engine_goes_on(fault, overlap):
    engine, listener = make_engine(overlap=overlap, max_num_seqs=2), Listener()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    generate(engine, make_request("before", prompt, max_tokens=1))
    runner = runner_of(engine)
    runner.faults = {len(runner.plans) + 1: fault}
    requests = [make_request(name, prompt, float(n), max_tokens=5) for n, name in enumerate("abc")]
    for request in requests:
        engine.add_request(request)
    run_to_end(engine, listener)
    assert_quiescent(engine)
    for name in "ab":
        last = listener.outcomes[name, 0].last
        assert last.finish_reason == "error" and "StepFault" in last.error
    survivor = listener.outcomes["c", 0]
    assert survivor.token_ids == reference(engine, requests[2], 3, 0)[0]
    assert survivor.last.metrics.num_cached_tokens == 0  # the cache was lost with the pool
    assert (runner.num_resets, engine.stats().num_failed_steps) == (1, 1)


@pytest.mark.parametrize("where", ["run", "fetch"])
def test_a_lost_host_is_the_end_of_the_engine(where, monkeypatch):
    engine = make_engine()
    runner = runner_of(engine)

    def lose(*_):
        raise LostHostError("host 1 has gone")

    monkeypatch.setattr(runner, where, lose)
    engine.add_request(make_request("r", [1, 2, 3], max_tokens=5))
    with pytest.raises(LostHostError, match="host 1"):
        run_to_end(engine, Listener())
    assert runner.num_resets == 0  # which other hosts would have to take part in


@pytest.mark.parametrize("overlap", [True, False])
def test_after_a_step_without_memory_steps_are_smaller_for_a_while(overlap, monkeypatch):
    monkeypatch.setattr("shiftjax.core.scheduler.STEPS_TO_RECOVER", 20)
    engine, listener = make_engine(overlap=overlap), Listener()
    runner = runner_of(engine)
    run = runner.run

    def without_memory(plan, mode, previous_handle):
        runner.run = run
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    runner.run = without_memory
    engine.add_request(make_request("lost", [1, 2, 3] * 4, max_tokens=5))
    run_to_end(engine, listener)
    assert listener.outcomes["lost", 0].last.error_code == "device_oom"
    prompts = [[(n + i * (1 + n % 7)) % 13 for i in range(28)] for n in range(60)]  # no prefixes
    requests = [make_request(f"r{n}", p, float(n), max_tokens=20) for n, p in enumerate(prompts)]
    for request in requests:
        engine.add_request(request)
    run_to_end(engine, listener)
    assert_quiescent(engine)
    for number, request in enumerate(requests):
        outcome = listener.outcomes[request.request_id, 0]
        assert outcome.token_ids == reference(engine, request, number + 1, 0)[0]
    sizes = [plan.num_tokens for plan in runner.plans]
    assert max(sizes[:20]) == 6  # half of the 12 that had no room
    assert 6 < max(sizes[21:40]) <= 12
    assert max(sizes[60:]) == 32  # as configured, again


@pytest.mark.parametrize("num_ended", [0, 1, 2])
def test_who_ends_before_a_commit_fails_ends_once_and_is_told(num_ended, monkeypatch):
    """Three requests end in one step, and blocks of one of them cannot be given back."""
    engine, listener = make_engine(), Listener()
    for number in range(3):
        engine.add_request(make_request(str(number), [1], float(number), max_tokens=2))
    tables = engine.lanes[0].scheduler.tables
    release, calls = tables.release, itertools.count()

    def broken(sequence):
        if next(calls) == num_ended:
            raise RuntimeError("on purpose")
        release(sequence)

    monkeypatch.setattr(tables, "release", broken)
    run_to_end(engine, listener)
    reasons = [listener.outcomes[str(number), 0].last.finish_reason for number in range(3)]
    assert reasons == ["length"] * num_ended + ["error"] * (3 - num_ended)
    engine.check()


def test_a_failed_launch_leaves_the_step_before_its_results():
    engine, listener = make_engine(overlap=True), Listener()
    runner_of(engine).faults = {1: "run"}
    engine.add_request(make_request("short", [1], max_tokens=1))
    engine.add_request(make_request("long", [1], 1.0, max_tokens=5))
    run_to_end(engine, listener)
    assert listener.outcomes["short", 0].last.finish_reason == "length"
    assert len(listener.outcomes["long", 0].token_ids) == 1
    assert listener.outcomes["long", 0].last.finish_reason == "error"


def test_what_only_the_step_on_top_has_starts_again():
    engine, listener = make_engine(overlap=True), Listener()
    runner_of(engine).faults = {0: "fetch"}
    engine.add_request(make_request("failed", [1], max_tokens=5))
    listener.hear(engine.step(0.0))
    engine.add_request(later := make_request("later", [2], 1.0, max_tokens=5))
    listener.hear(engine.step(1.0))
    (sequence,) = engine.lanes[0].scheduler.waiting
    assert (sequence.num_computed_tokens, sequence.num_pending_tokens) == (0, 0)
    run_to_end(engine, listener)
    assert listener.outcomes["failed", 0].last.finish_reason == "error"
    assert listener.outcomes["later", 0].token_ids == reference(engine, later, 1, 0)[0]


def test_a_fault_in_scheduling_ends_all_requests_and_the_engine_goes_on(monkeypatch):
    engine, listener = make_engine(max_num_seqs=1), Listener()
    for number in range(3):
        engine.add_request(make_request(str(number), [1] * 9, float(number), max_tokens=9))
    listener.hear(engine.step(0.0))
    scheduler = engine.lanes[0].scheduler
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_schedule_decodes", lambda draft: scheduler.running.pop().nothing)
        listener.hear(engine.step(1.0))
        engine.check()
    run_to_end(engine, listener)
    assert listener.outcomes["0", 0].last.finish_reason == "error"
    generate(engine, make_request("after", [1] * 9))


@pytest.mark.parametrize("missing", ["token_ids", "is_finite", "logprobs", "top_ids"])
def test_an_output_that_does_not_fit_the_plan_is_a_failed_step(missing, monkeypatch):
    engine, runner, listener = make_engine(), None, Listener()
    runner = runner_of(engine)
    cut = {"token_ids": slice(1, None), "is_finite": slice(1, None)}
    fetch = runner.fetch

    def broken(handle):
        output = fetch(handle)
        value = getattr(output, missing)[cut[missing]] if missing in cut else None
        return output._replace(**{missing: value})

    monkeypatch.setattr(runner, "fetch", broken)
    engine.add_request(make_request("a", [1], logprobs=2))
    run_to_end(engine, listener)
    assert listener.outcomes["a", 0].last.finish_reason == "error"
    assert "ValueError" in listener.outcomes["a", 0].last.error


def test_a_non_finite_row_ends_every_continuation_of_its_request():
    engine = make_engine()
    runner_of(engine).poisoned, runner_of(engine).poisoned_index = {"a"}, 1
    requests = make_request("a", [1] * 9, n=3, max_tokens=20), make_request("b", [2], max_tokens=20)
    outcomes = generate(engine, *requests)
    assert [outcomes["a", n].last.finish_reason for n in range(3)] == ["error"] * 3
    assert 0 < len(outcomes["a", 0].token_ids) < 20
    assert outcomes["b", 0].token_ids == reference(engine, requests[1], 1, 0)[0]


@pytest.mark.parametrize("row", [0, 2, 3])
def test_any_non_finite_row_of_a_prompt_is_seen(row, monkeypatch):
    engine, listener = make_engine(), Listener()
    runner = runner_of(engine)

    def poisoned(handle):
        handle.is_finite[row] = False
        return handle

    monkeypatch.setattr(runner, "fetch", poisoned)
    engine.add_request(make_request("a", [1, 2, 3, 4], prompt_logprobs=0))
    run_to_end(engine, listener)
    assert listener.outcomes["a", 0].last.finish_reason == "error"
    assert "finite" in listener.outcomes["a", 0].last.error


def test_flushing_the_prefix_cache_leaves_running_requests_alone():
    engine, listener = make_engine(), Listener()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    request = make_request("a", prompt, max_tokens=9)
    engine.add_request(request)
    for step in range(3):
        listener.hear(engine.step(float(step)))
    engine.flush_prefix_cache()
    engine.check()
    run_to_end(engine, listener)
    assert listener.outcomes["a", 0].token_ids == reference(engine, request, 0, 0)[0]
    (outcome,) = generate(engine, make_request("b", prompt, max_tokens=1)).values()
    assert outcome.last.metrics.num_cached_tokens == 0


def test_aborted_requests_leave_the_queue():
    engine = make_engine(max_num_seqs=1)
    for number in range(9):
        engine.add_request(make_request(str(number), [1], float(number), max_tokens=2))
    for number in range(0, 9, 2):
        (event,) = engine.abort(str(number))
        assert (event.finish_reason, event.is_last) == ("abort", True)
        assert event.metrics.queue_seconds is None
    listener = Listener()
    run_to_end(engine, listener)
    assert listener.ended == {"1", "3", "5", "7"}


def test_an_abort_keeps_the_queue_in_order():
    engine = make_engine(max_num_seqs=1)
    for arrival in (0, 5, 1, 6, 7, 2, 3):
        engine.add_request(make_request(str(arrival), [1], float(arrival), max_tokens=9))
    engine.abort("0")
    engine.step(0.0)
    assert list(engine.lanes[0].scheduler.requests) == ["1"]
