"""What a step is made of: order, budgets, chunks, sharing, preemption; one behaviour per test."""

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

from shiftjax.core.scheduler_config import SchedulerConfig


def shape(plan):
    """(request, start, tokens, rows) of everything in a plan."""
    return [
        (item.sequence.request.request_id, item.start, item.num_tokens, item.num_rows)
        for item in plan.scheduled
    ]


def shapes(engine):
    return [shape(plan) for plan in runner_of(engine).plans]


def test_decodes_come_first_and_prompts_are_chunked_into_what_is_left():
    engine = make_engine(max_num_batched_tokens=8, overlap=False)
    generate(
        engine,
        make_request("a", [1] * 3, 0.0, max_tokens=3),
        make_request("b", [2] * 12, 1.0, max_tokens=2),
    )
    assert shapes(engine) == [
        [("a", 0, 3, 1), ("b", 0, 5, 0)],
        [("a", 3, 1, 1), ("b", 5, 7, 1)],
        [("a", 4, 1, 1), ("b", 12, 1, 1)],
    ]
    assert [plan.num_decodes for plan in runner_of(engine).plans] == [0, 1, 2]


def test_overlap_points_at_rows_of_the_step_in_flight():
    engine = make_engine(overlap=True)
    generate(
        engine,
        make_request("a", [1] * 3, 0.0, max_tokens=3),
        make_request("b", [2] * 2, 1.0, max_tokens=3),
    )
    rows = [[i.previous_row for i in plan.scheduled] for plan in runner_of(engine).plans]
    assert rows == [[-1, -1], [0, 1], [0, 1]]  # and no fourth step: ends by count are foreseen


def test_overlap_drops_the_token_after_an_unforeseen_stop():
    probe = make_engine()
    request = make_request("a", [1, 2, 3], max_tokens=8, seed=3)
    tokens, _ = reference(probe, request, 0, 0)
    stop = next(token for n, token in enumerate(tokens) if n > 1 and token not in tokens[:n])
    request = make_request("a", [1, 2, 3], max_tokens=8, seed=3, stop_token_ids=[stop])
    plain, overlapped = make_engine(overlap=False), make_engine(overlap=True)
    (before,), (after,) = generate(plain, request).values(), generate(overlapped, request).values()
    assert before.token_ids == after.token_ids == tokens[: tokens.index(stop) + 1]
    assert after.last.stop_token_id == stop
    assert len(runner_of(overlapped).plans) == len(runner_of(plain).plans) + 1


def test_admission_follows_priority_then_arrival():
    engine = make_engine(max_num_seqs=1, overlap=False)
    requests = [
        make_request("late", [1], 2.0, max_tokens=1),
        make_request("early", [1], 1.0, max_tokens=1),
        make_request("urgent", [1], 3.0, max_tokens=1, priority=-1),
    ]
    generate(engine, *requests)
    assert [rows[0][0] for rows in shapes(engine)] == ["urgent", "early", "late"]


def test_nobody_passes_a_request_that_waits_for_room():
    engine = make_engine(num_blocks=9, block_size=4, overlap=False, prefix_caching=False)
    generate(
        engine,
        make_request("holds", [1] * 12, 0.0, max_tokens=4),
        make_request("large", [2] * 24, 1.0, max_tokens=1),
        make_request("small", [3], 2.0, max_tokens=1),
    )
    steps = [{entry[0] for entry in rows} for rows in shapes(engine)]
    assert steps == [{"holds"}] * 4 + [{"large", "small"}]


def test_prefix_hit_skips_full_blocks_but_never_the_last_token():
    engine = make_engine(block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first = generate(engine, make_request("a", prompt, max_tokens=2))
    second = generate(engine, make_request("b", prompt, max_tokens=2))
    third = generate(engine, make_request("c", [*prompt, 9], max_tokens=2))
    assert first["a", 0].last.metrics.num_cached_tokens == 0
    assert second["b", 0].last.metrics.num_cached_tokens == 4
    assert third["c", 0].last.metrics.num_cached_tokens == 8
    stats = engine.stats()
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (25, 12)


def test_generated_blocks_are_found_by_the_next_turn_of_a_conversation():
    engine = make_engine(block_size=4)
    (answer,) = generate(engine, make_request("a", [1, 2, 3], max_tokens=10)).values()
    prompt = [1, 2, 3, *answer.token_ids, 4]
    (outcome,) = generate(engine, make_request("b", prompt, max_tokens=1)).values()
    assert outcome.last.metrics.num_cached_tokens == 12  # the 13th token's KV was never computed


@pytest.mark.parametrize("difference", [{"cache_salt": "other"}, {"prompt_logprobs": 0}])
def test_prefixes_that_must_not_be_shared(difference):
    engine = make_engine(block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    generate(engine, make_request("a", prompt, max_tokens=1))
    (outcome,) = generate(engine, make_request("b", prompt, max_tokens=1, **difference)).values()
    assert outcome.last.metrics.num_cached_tokens == 0


def test_blocks_of_a_non_finite_request_are_not_cached():
    engine = make_engine(block_size=4, max_num_batched_tokens=8)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 2 + [9]  # three chunks; only the last one has a row
    runner_of(engine).poisoned = {"bad"}
    outcomes = generate(
        engine,
        make_request("bad", prompt, max_tokens=4),
        make_request("good", [1], 1.0, max_tokens=4),
    )
    bad, good = outcomes["bad", 0], outcomes["good", 0]
    assert (bad.last.finish_reason, bad.token_ids) == ("error", [])
    assert "finite" in bad.last.error
    assert good.last.finish_reason == "length"
    (outcome,) = generate(engine, make_request("same", prompt, max_tokens=1)).values()
    assert outcome.last.metrics.num_cached_tokens == 0
    assert runner_of(engine).num_resets == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_siblings_share_the_full_blocks_of_the_prompt(prefix_caching):
    engine = make_engine(block_size=4, prefix_caching=prefix_caching, overlap=False)
    request = make_request("a", [1] * 10, n=3, max_tokens=4)
    engine.add_request(request)
    listener = Listener()
    for step in range(2):
        listener.hear(engine.step(float(step)))
    tables = [s.block_table for s in engine.lanes[0].scheduler.running]
    assert len(tables) == 3
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert shapes(engine)[0] == [("a", 0, 10, 1)]
    assert shapes(engine)[1] == [("a", 10, 1, 1), ("a", 8, 2, 1), ("a", 8, 2, 1)]
    run_to_end(engine, listener)
    assert bool(engine.lanes[0].scheduler.tables.device.num_cached_blocks) == prefix_caching
    outputs = [listener.outcomes["a", index].token_ids for index in range(3)]
    assert outputs == [reference(engine, request, 0, index)[0] for index in range(3)]
    assert len({tuple(output) for output in outputs}) == 3


def test_prompt_logprobs_rows_stay_in_the_budget():
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=32, overlap=False)
    (outcome,) = generate(
        engine, make_request("a", list(range(10)), prompt_logprobs=1, max_tokens=1)
    ).values()
    assert shapes(engine) == [[("a", 0, 4, 4)], [("a", 4, 4, 4)], [("a", 8, 2, 2)]]
    assert [e.token_id for e in outcome.last.prompt_logprobs[1:]] == list(range(1, 10))


def test_prompts_that_are_scored_share_the_rows_of_a_step():
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=32, overlap=False)
    asked = {"prompt_logprobs": 1, "max_tokens": 1}
    generate(
        engine, make_request("a", [1] * 3, 0.0, **asked), make_request("b", [2] * 6, 1.0, **asked)
    )
    assert shapes(engine) == [[("a", 0, 3, 3), ("b", 0, 1, 1)], [("b", 1, 4, 4)], [("b", 5, 1, 1)]]


def test_max_tokens_0_scores_the_prompt():
    engine = make_engine()
    request = make_request("a", [1, 2, 3], prompt_logprobs=0, max_tokens=0)
    (outcome,) = generate(engine, request).values()
    (event,) = outcome.events
    assert (event.token_ids, event.finish_reason, event.is_last) == ((), "length", True)
    assert [entry.token_id for entry in event.prompt_logprobs[1:]] == [2, 3]


def squeeze(preemption: str, overlap: bool, **more):
    """Two requests that together outgrow the pool."""
    engine = make_engine(
        num_blocks=9, block_size=4, overlap=overlap, prefix_caching=False, watermark=0.0,
        preemption=preemption, num_host_blocks=9 if preemption == "swap" else 0, **more,
    )  # fmt: skip
    requests = [make_request(name, [n] * 8, float(n), max_tokens=16) for n, name in enumerate("ab")]
    return engine, requests, generate(engine, *requests)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_youngest_is_preempted_and_loses_nothing(preemption, overlap):
    engine, requests, outcomes = squeeze(preemption, overlap)
    for number, request in enumerate(requests):
        assert outcomes[request.request_id, 0].token_ids == reference(engine, request, number, 0)[0]
    assert outcomes["a", 0].last.metrics.num_preemptions == 0
    assert outcomes["b", 0].last.metrics.num_preemptions == 1
    assert engine.stats().num_preemptions[preemption] == 1
    plans = runner_of(engine).plans
    computed = sum(i.num_tokens for p in plans for i in p.scheduled if i.sequence.index == 0)
    moved = [block for plan in plans for _, blocks in plan.offloads for block in blocks]
    assert bool(moved) == (preemption == "swap") == (computed == 2 * 23)
    assert len(moved) == sum(len(blocks) for plan in plans for _, blocks in plan.restores)


@pytest.mark.parametrize("overlap", [True, False])
def test_prompt_logprobs_survive_a_preemption_halfway(overlap):
    engine = make_engine(
        num_blocks=19, block_size=1, max_num_seqs=2, overlap=overlap, prefix_caching=False,
        watermark=0.0,
    )  # fmt: skip
    prompt = list(range(12))
    grows = make_request("grows", [1] * 4, max_tokens=12)
    scored = make_request("scored", prompt, 1.0, prompt_logprobs=1, max_tokens=2)
    outcome = generate(engine, grows, scored)["scored", 0]
    assert outcome.last.metrics.num_preemptions == 1
    (entries,) = [e.prompt_logprobs for e in outcome.events if e.prompt_logprobs]
    assert [entry.token_id for entry in entries[1:]] == prompt[1:]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_what_is_computed_again_is_cached_again(preemption):
    engine = make_engine(
        num_blocks=9, overlap=False, watermark=0.0, preemption=preemption,
        num_host_blocks=9 if preemption == "swap" else 0,
    )  # fmt: skip
    requests = [make_request(name, [n] * 8, float(n), max_tokens=16) for n, name in enumerate("ab")]
    last = generate(engine, *requests)["b", 0]
    assert last.last.metrics.num_preemptions == 1
    (outcome,) = generate(
        engine, make_request("c", [1] * 8 + last.token_ids, max_tokens=1)
    ).values()
    assert outcome.last.metrics.num_cached_tokens == 20


def test_blocks_that_are_still_cached_are_not_restored():
    engine = make_engine(
        num_blocks=9, overlap=False, watermark=0.0, preemption="swap", num_host_blocks=9
    )
    prompt = [1] * 8
    generate(
        engine, *(make_request(n, prompt, float(i), max_tokens=16) for i, n in enumerate("ab"))
    )
    host = engine.lanes[0].scheduler.tables.tier
    assert 0 < host.num_restored_blocks < host.num_offloaded_blocks


def test_without_host_room_swap_falls_back_to_recompute():
    engine = make_engine(
        num_blocks=9, overlap=False, prefix_caching=False, preemption="swap", num_host_blocks=2
    )
    generate(engine, *(make_request(n, [1] * 8, max_tokens=16) for n in "ab"))
    assert engine.stats().num_preemptions == {"recompute": 1, "swap": 0}


def test_a_swap_that_no_step_would_copy_is_a_recompute():
    """ "a" has its last token in flight, and "b" is the victim of its own growth: no step is left.

    The runner audits what a sequence that comes back from the host would attend to.
    """
    engine = make_engine(
        num_blocks=5, block_size=2, watermark=0.0, preemption="swap", num_host_blocks=9
    )
    a, b = make_request("a", [1] * 3, max_tokens=2), make_request("b", [2] * 3, 1.0, max_tokens=4)
    outcomes = generate(engine, a, b)
    assert engine.stats().num_preemptions == {"recompute": 1, "swap": 0}
    assert engine.stats().num_failed_steps == 0
    assert outcomes["b", 0].token_ids == reference(engine, b, 1, 0)[0]


def test_no_preemptions_where_none_are_allowed():
    engine, _, outcomes = squeeze("recompute", True, max_preemptions=0)
    assert engine.stats().num_preemptions == {"recompute": 0, "swap": 0}
    assert outcomes["b", 0].last.metrics.queue_seconds > 10


def test_aborting_a_swapped_request_frees_the_host():
    engine = make_engine(
        num_blocks=9, overlap=False, prefix_caching=False, preemption="swap", num_host_blocks=9
    )
    listener = Listener()
    for name in "ab":
        engine.add_request(make_request(name, [1] * 8, max_tokens=16))
    while not engine.stats().num_preemptions["swap"]:
        listener.hear(engine.step(0.0))
    host = engine.lanes[0].scheduler.tables.tier
    assert host.memory.num_idle_bytes < host.memory.num_used_bytes
    listener.hear(engine.abort("b"))
    assert host.memory.num_used_bytes == 0
    run_to_end(engine, listener)
    assert_quiescent(engine)


def test_min_tokens_bans_stop_ids_with_a_token_in_flight():
    engine = make_engine(eos_token_ids=tuple(range(12)))  # 12 is the only other token
    outcomes = generate(engine, make_request("a", [1], min_tokens=5, max_tokens=9))
    assert outcomes["a", 0].token_ids[:5] == [12] * 5
    banned = [p.scheduled[0].bans_stop_ids(0) for p in runner_of(engine).plans]
    assert banned[:5] == [True] * 5 and not any(banned[5:])


def test_config_problems_come_together():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens.*watermark"):
        SchedulerConfig(8, 4, 9, 8, watermark=1.0)


def test_an_admission_leaves_the_watermark_free_while_others_run():
    engine = make_engine(num_blocks=20, max_num_batched_tokens=64, watermark=0.4)
    engine.add_request(make_request("runs", [1, 2], max_tokens=3, ignore_eos=True))
    engine.add_request(make_request("large", list(range(1, 11)) * 4 + [3] * 7, max_tokens=1))
    engine.step(0.0)  # 12 blocks would fit into the 18 that are free, but not beside 8
    assert [s.request.request_id for s in engine.lanes[0].scheduler.running] == ["runs"]
    run_to_end(engine, Listener())
    assert engine.stats().num_preemptions == {"recompute": 0, "swap": 0}


def test_a_group_takes_no_more_prompts_than_a_step_can_compute():
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=32)
    for number in range(4):
        engine.add_request(make_request(str(number), [number + 1] * 20, max_tokens=1))
    engine.step(0.0)
    assert list(engine.lanes[0].scheduler.requests) == ["0", "1"]  # 40 tokens; two stay in front


def test_the_last_token_needs_no_block_where_preemption_is_not_allowed():
    engine = make_engine(num_blocks=4, block_size=4, max_preemptions=0)
    engine.add_request(make_request("a", [1] * 4, max_tokens=5, ignore_eos=True))  # 8 with KV
    engine.add_request(make_request("b", [2] * 4, max_tokens=1, ignore_eos=True))  # 4 with KV
    engine.step(0.0)
    assert len(engine.lanes[0].scheduler.running) == 2
