"""Pipelines of several stages: micro-batches, steps in flight, and random traffic over them."""

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
from hypothesis import event, given, settings
from spent import examples
from traffic_kit import FAST, FAULTS, check_served, check_through_faults, engines, traffic

from shiftjax.core.micro_batches import num_dealt

PIPELINES = (2, 4)


def run_steps(engine, num: int) -> None:
    for step in range(num):
        engine.step(float(step))


def micro_batches(engine) -> list[int]:
    return [plan.micro_batch for plan in runner_of(engine).plans]


def decoding(engine, *numbers: int, max_tokens: int = 12, prompt=(1, 2)) -> None:
    for number in numbers:
        name, arrival = str(number), float(number)
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        engine.add_request(make_request(name, [*prompt], arrival, **sampling))


# ------------------------------------------------------------------------- in flight


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_micro_batches", [1, *PIPELINES])
def test_every_stage_has_a_step_in_flight_and_overlap_one_more(num_micro_batches, overlap):
    engine = make_engine(num_micro_batches=num_micro_batches, overlap=overlap, num_blocks=128)
    decoding(engine, *range(num_micro_batches))
    most = 0
    while engine.has_work():
        engine._launch(engine.lanes[0], 0.0)
        most = max(most, len(engine.lanes[0].in_flight))
        engine.step(0.0)
    assert most == num_micro_batches + overlap
    assert micro_batches(engine)[: 2 * num_micro_batches] == [*range(num_micro_batches)] * 2


@pytest.mark.parametrize(("overlap", "most"), [(True, 2), (False, 1)])
def test_one_sequence_samples_in_no_more_steps_at_once_than_without_stages(overlap, most):
    engine, listener = make_engine(num_micro_batches=4, overlap=overlap), Listener()
    decoding(engine, 0)
    while engine.has_work():
        listener.hear(engine.step(0.0))
        assert len(engine.lanes[0].in_flight) <= most
    assert listener.outcomes["0", 0].last.finish_reason == "length"


def test_chunks_of_a_prompt_follow_each_other_without_a_commit():
    engine = make_engine(num_micro_batches=4, max_num_batched_tokens=8)
    engine.add_request(make_request("long", [1] * 40, max_tokens=2))
    run_steps(engine, 4)
    plans, flights = runner_of(engine).plans, engine.lanes[0].in_flight
    assert [plan.scheduled[0].start for plan in plans] == [0, 8, 16, 24]
    assert len(flights) == 4  # nothing has been committed


def test_chunks_take_turns_with_the_decodes_of_all_micro_batches():
    engine = make_engine(num_micro_batches=2, max_num_batched_tokens=8, num_blocks=128)
    decoding(engine, 0, 1, 2, max_tokens=30)
    run_steps(engine, 8)
    engine.add_request(make_request("long", [1] * 40, 9.0, max_tokens=2))
    begin = len(runner_of(engine).plans)
    run_to_end(engine, Listener())
    plans = runner_of(engine).plans[begin:]
    chunked = [plan for plan in plans if len(plan.scheduled) > plan.num_decodes]
    assert len(chunked) >= 5
    mine = chunked[0].micro_batch
    assert all(plan.num_decodes for plan in chunked)  # those of its own micro-batch go on
    last = plans.index(chunked[-1])
    turns = [plan.micro_batch for plan in plans[plans.index(chunked[0]) : last + 1]]
    assert turns == [mine, 1 - mine] * (len(turns) // 2) + [mine]  # and the others


# ------------------------------------------------------------------------- admission


def sizes(engine) -> list[int]:
    config, running = engine.lanes[0].scheduler.config, engine.lanes[0].scheduler.running
    return [sum(s.micro_batch == each for s in running) for each in range(config.num_micro_batches)]


def test_a_burst_is_dealt_evenly_to_the_micro_batches():
    engine = make_engine(
        num_micro_batches=4, max_num_seqs=10, max_num_batched_tokens=40, num_blocks=128
    )
    decoding(engine, *range(10))
    run_steps(engine, 4)
    assert sorted(sizes(engine)) == [2, 2, 3, 3]
    assert engine.lanes[0].scheduler.config.max_step_seqs == 3  # the rows of a step
    assert len(runner_of(engine).plans) == 4  # each took its share at once


def test_few_blocks_are_dealt_like_many():
    engine = make_engine(num_micro_batches=4, num_blocks=5, block_size=4, watermark=0.0)  # four fit
    decoding(engine, *range(8), max_tokens=3)
    run_steps(engine, 4)
    assert sizes(engine) == [1, 1, 1, 1]


def test_where_sequences_end_unevenly_admission_evens_it_out():
    engine = make_engine(
        num_micro_batches=2, max_num_seqs=4, max_num_batched_tokens=40, num_blocks=128
    )
    decoding(engine, *range(4), max_tokens=40)
    run_steps(engine, 4)
    gone = [s for s in engine.lanes[0].scheduler.running if s.micro_batch == 1]
    for sequence in gone:
        engine.abort(sequence.request.request_id)
    assert sizes(engine) == [2, 0]
    decoding(engine, 4, 5)
    run_steps(engine, 4)
    assert sizes(engine) == [2, 2]  # those that ran have stayed where they were


def test_the_emptiest_is_dealt_to_first_and_room_and_blocks_end_it():
    assert [num_dealt(each, [3, 1, 0], [1] * 3, 9, 99) for each in range(3)] == [0, 1, 2]
    assert [num_dealt(each, [0, 0], [1] * 9, 5, 99) for each in range(2)] == [3, 3]  # its own first
    assert [num_dealt(each, [1, 0], [9, 1], 9, 3) for each in range(2)] == [0, 1]


# ------------------------------------------------------------------ ends while steps fly


def test_a_preempted_sequence_comes_back_when_the_host_knows_what_it_had():
    engine = make_engine(num_micro_batches=2, num_blocks=7, block_size=4, max_num_seqs=2)
    requests = [make_request(str(n), [1 + n] * 8, float(n), max_tokens=12) for n in range(2)]
    outcomes = generate(engine, *requests)
    assert engine.stats().num_preemptions["recompute"] > 0
    for number, request in enumerate(requests):
        expected, _ = reference(engine, request, number, 0)
        assert outcomes[str(number), 0].token_ids == expected


def test_a_preempted_sequence_waits_for_its_own_steps_even_where_there_is_room_at_once():
    engine, listener = make_engine(num_micro_batches=4, num_blocks=7, block_size=4), Listener()
    first, second = (make_request(str(n), [1 + n] * 8, float(n), max_tokens=12) for n in range(2))
    for request in (first, second):
        engine.add_request(request)
    (lane,) = engine.lanes
    while not lane.scheduler.num_preemptions["recompute"]:
        if not engine._launch(lane, 0.0):
            listener.hear(engine.step(0.0))
    (victim,) = lane.scheduler.waiting
    assert victim.num_pending_tokens  # a step of it is in flight
    listener.hear(engine.abort(first.request_id))
    assert not engine._launch(lane, 0.0)
    run_to_end(engine, listener)
    expected, _ = reference(engine, second, 1, 0)
    assert listener.outcomes[second.request_id, 0].token_ids == expected


def test_what_is_preempted_for_one_micro_batch_is_not_brought_back_for_another():
    """A plan that copied it to the host and back would lose track of the copy."""
    small = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 2}
    swaps = {"preemption": "swap", "num_host_blocks": 12, "watermark": 0.0}
    engine = make_engine(num_micro_batches=4, overlap=False, **small, **swaps)
    request = make_request("a", [0] * 4, n=2, seed=0)
    outcomes = generate(engine, request)  # what is left on the host is dropped
    assert sum(engine.stats().num_preemptions.values()) > 0
    for index in range(2):
        assert outcomes["a", index].token_ids == reference(engine, request, 0, index)[0]


@pytest.mark.parametrize("where", ["run", "fetch"])
def test_a_failure_with_all_stages_at_work_ends_what_that_step_computed(where):
    engine, listener = make_engine(num_micro_batches=4, num_blocks=128), Listener()
    decoding(engine, *range(4))
    runner_of(engine).faults = {9: where}  # of the second micro-batch
    run_to_end(engine, listener)
    assert_quiescent(engine)
    reasons = [listener.outcomes[str(n), 0].last.finish_reason for n in range(4)]
    assert reasons == ["length", "error", "length", "length"]
    assert runner_of(engine).num_resets == 1


def test_an_abort_with_all_stages_at_work_leaves_the_others_as_they_are():
    engine, listener = make_engine(num_micro_batches=4, num_blocks=128), Listener()
    decoding(engine, *range(5))
    for step in range(9):
        listener.hear(engine.step(float(step)))
    assert len(engine.lanes[0].in_flight) >= 4
    listener.hear(engine.abort("2"))
    run_to_end(engine, listener)
    assert_quiescent(engine)
    for number in (0, 1, 3, 4):
        request = make_request(str(number), [1, 2], max_tokens=12, ignore_eos=True)
        expected, _ = reference(engine, request, number, 0)
        assert listener.outcomes[str(number), 0].token_ids == expected
    assert listener.outcomes["2", 0].last.finish_reason == "abort"


# ---------------------------------------------------------------------- random traffic


@pytest.mark.costs(20)
@settings(FAST, max_examples=examples(200))
@given(engines(stages=PIPELINES), traffic())
def test_any_pipeline_gives_the_tokens_of_one_stage(engine, clients):
    stats = check_served(engine, clients)
    event(f"prefix hits: {stats.num_prefix_hit_tokens > 0}")
    event(f"all micro-batches: {len(set(micro_batches(engine))) > 1}")
    assert stats.num_failed_steps == 0


@pytest.mark.costs(25)
@settings(FAST, max_examples=examples(200))
@given(engines(tightness=2, least_seqs=3, stages=PIPELINES), traffic(least=8, most=12))
def test_crowds_in_a_small_pool_of_a_pipeline(engine, clients):
    stats = check_served(engine, clients)
    for kind, number in stats.num_preemptions.items():
        event(f"{kind}: {number > 0}")
    assert stats.num_failed_steps == 0


@settings(FAST, max_examples=examples(120))
@given(
    engines(stages=PIPELINES),
    traffic(most=8),
    FAULTS,
)
def test_faults_in_a_pipeline_end_their_requests_only(engine, clients, faults):
    check_through_faults(engine, clients, faults)
