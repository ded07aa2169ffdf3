"""Drafts of any quality change no token, whatever else happens: preemption, swap, hits, cancels.

The runner audits the KV behind every block table and every plan's budgets.
"""

import logging
from dataclasses import replace

import pytest
from echo_kit import (
    VOCAB_SIZE,
    Listener,
    generate,
    make_engine,
    make_request,
    reference,
    run_to_end,
    runner_of,
)
from guesses_kit import Guesses, let_draft
from hypothesis import event, given, settings
from hypothesis import strategies as st
from spent import examples
from traffic_kit import (
    FAST,
    FAULTS,
    WINDOWS,
    check_through_faults,
    check_tokens,
    engines,
    play,
    traffic,
)

from shiftjax.core.engine import Engine
from shiftjax.core.lookahead import Lookahead
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import MOST_TURNS_BETWEEN_TRIALS, DraftStats, Speculation


def counts(engine: Engine) -> tuple[int, int]:
    """Tokens of drafts that were right, and wrong."""
    tokens = [lane.scheduler.lookahead.stats.tokens for lane in engine.lanes]
    return sum(t["guess", "accepted"] for t in tokens), sum(t["guess", "rejected"] for t in tokens)


class Capped(Guesses):
    """Other caps for every draft: (first sequences that draft, sequences that switch it off)."""

    def __init__(self, caps: list[tuple[int, int]], quality: int, most: int):
        super().__init__(quality, most=most)
        self.caps = caps

    def draft(self, name, most):
        first, off = self.caps[self.count % len(self.caps)]
        self.options = replace(self.options, draft_max_seqs=first, draft_off_seqs=off)
        return super().draft(name, most)


caps = st.tuples(st.sampled_from([0, 0, 1, 3]), st.sampled_from([0, 0, 1, 3]))


@settings(FAST, max_examples=examples(100))
@given(engines(), traffic(), st.integers(1, 6), st.integers(0, 10), st.lists(caps, min_size=1))
def test_drafts_change_nothing(engine, clients, most, quality, caps):
    let_draft(engine, Capped(caps, quality, most))
    accepted, listener = play(engine, clients)
    check_tokens(engine, accepted, listener, errors=set())
    event(f"accepted some: {counts(engine)[0] > 0}")
    event(f"preempted: {any(engine.stats().num_preemptions.values())}")
    event(f"prefix hits: {engine.stats().num_prefix_hit_tokens > 0}")


@settings(FAST, max_examples=examples(80))
@given(engines(windows=WINDOWS), traffic(), st.integers(1, 6), st.integers(0, 10))
def test_drafts_that_are_wrong_lose_no_block_that_is_seen(engine, clients, most, quality):
    let_draft(engine, Guesses(quality, most=most))
    accepted, listener = play(engine, clients)
    check_tokens(engine, accepted, listener, errors=set())


@settings(FAST, max_examples=examples(80))
@given(
    engines(tightness=2, least_seqs=3),
    traffic(least=8, most=12),
    st.integers(1, 6),
    st.integers(0, 10),
)
def test_drafts_in_a_small_pool(engine, clients, most, quality):
    let_draft(engine, Guesses(quality, most=most))
    accepted, listener = play(engine, clients)
    check_tokens(engine, accepted, listener, errors=set())


def test_a_right_draft_saves_its_steps():
    alone = make_request("a", [1, 2], seed=3, max_tokens=25, ignore_eos=True)
    engine = let_draft(make_engine(), Guesses(most=4))
    outcomes = generate(engine, alone)
    assert outcomes["a", 0].token_ids == reference(engine, alone, 0, 0)[0]
    plans = runner_of(engine).plans
    assert [plan.num_tokens for plan in plans] == [2, 5, 5, 5, 5, 4]  # 1 + 4 * 5 + 4
    metrics = outcomes["a", 0].last.metrics
    assert (metrics.num_proposed_tokens, metrics.num_accepted_tokens) == (19, 19)


@pytest.mark.parametrize("wrong_at", range(4))
@pytest.mark.parametrize("length", range(3, 9))
def test_a_rejected_token_never_enters_the_prefix_cache(wrong_at, length):
    """The owner is aborted before its next step, and the next request has its tokens."""
    engine = make_engine(overlap=False, block_size=2, num_blocks=40)
    prompt = list(range(1, 1 + length))
    engine.add_request(make_request("a", prompt, max_tokens=12, seed=3, ignore_eos=True))
    engine.step(0.0)
    engine.step(1.0)
    let_draft(engine, Guesses(None, wrong_at, most=4))
    scheduler = engine.lanes[0].scheduler
    (sequence,) = scheduler.requests["a"]
    scheduler.lookahead.join([sequence])
    before = len(sequence.token_ids)
    engine.step(2.0)
    assert len(sequence.token_ids) == before + wrong_at + 1
    tokens = list(sequence.token_ids)
    engine.abort("a")
    scheduler.lookahead = Lookahead()
    engine.add_request(make_request("b", [*tokens, 1, 1], max_tokens=2, seed=1, ignore_eos=True))
    run_to_end(engine, Listener())  # the audit compares what the blocks hold
    assert engine.stats().num_failed_steps == 0
    assert engine.stats().num_prefix_hit_tokens >= (len(tokens) - 1) // 2 * 2


def test_drafts_fill_the_rows_and_no_more():
    """More sequences and longer drafts than rows: `check_plan` of the runner holds the budgets."""
    engine = let_draft(make_engine(max_num_seqs=5, num_blocks=100), Guesses())
    requests = [make_request(f"r{i}", [1, i], seed=i, max_tokens=9, min_tokens=9) for i in range(9)]
    outcomes = generate(engine, *requests)
    for number, request in enumerate(requests):
        expected = reference(engine, request, number, 0)[0]
        assert outcomes[request.request_id, 0].token_ids == expected
    assert max(plan.num_rows for plan in runner_of(engine).plans) == 5


def test_nobody_is_preempted_for_a_draft():
    """Three sequences fill the pool to its watermark: drafts shrink to the blocks that are held."""
    config = {"num_blocks": 16, "block_size": 2, "watermark": 0.1, "max_num_seqs": 3}
    engine = let_draft(make_engine(**config, max_proposed_rows=24), Guesses())
    requests = [
        make_request(f"r{i}", [1] * 4, seed=i, max_tokens=7, ignore_eos=True) for i in range(3)
    ]
    generate(engine, *requests)
    assert engine.stats().num_preemptions == {"recompute": 0, "swap": 0}
    assert counts(engine)[0] > 0


def test_drafts_leave_the_blocks_that_admissions_leave():
    """A block more for each of several drafts in one step, and never one of the watermark's."""
    config = {"num_blocks": 41, "block_size": 1, "watermark": 0.5, "max_num_seqs": 3}
    engine = let_draft(make_engine(**config, max_proposed_rows=30), Guesses())
    free = []
    for number in range(3):
        prompt = [1, number]
        request = make_request(f"r{number}", prompt, seed=number, max_tokens=12, ignore_eos=True)
        engine.add_request(request)
    while engine.has_work():
        before = sum(len(s.block_table) for s in engine.lanes[0].scheduler.running)
        engine.step(0.0)
        used = engine.lanes[0].scheduler.num_used_blocks
        free.append(40 - used)
        assert free[-1] >= 19 or used <= before + 3, "a draft took what others may grow into"
    assert min(free) < 22 and counts(engine)[0] > 0
    assert engine.stats().num_failed_steps == 0


def test_the_stats_are_those_of_all_groups():
    engine = let_draft(make_engine(dp=2), Guesses())
    requests = [
        make_request(f"r{i}", [1, i], seed=i, max_tokens=9, ignore_eos=True) for i in range(4)
    ]
    generate(engine, *requests)
    each = [lane.scheduler.lookahead.stats for lane in engine.lanes]
    assert all(stats.num_drafts for stats in each)
    drafts = engine.stats().find(DraftStats)
    assert drafts.num_drafts == sum(stats.num_drafts for stats in each)
    assert drafts.num_accepted == drafts.tokens["guess", "accepted"] == counts(engine)[0]
    assert sum(drafts.steps.values()) == sum(
        plan.num_proposals > 0 for group in range(2) for plan in runner_of(engine, group).plans
    )
    assert drafts.tokens == each[0].tokens + each[1].tokens
    assert drafts.accepted_at == each[0].accepted_at + each[1].accepted_at
    before = drafts.num_drafts
    generate(engine, make_request("again", [1, 2], seed=1, max_tokens=9, ignore_eos=True))
    assert drafts.num_drafts == before < engine.stats().find(DraftStats).num_drafts  # a copy
    assert make_engine().stats().find(DraftStats) is None


def test_a_closed_engine_leaves_no_thread_behind():
    """Requests that come later are drafted for without the index of a long prompt, or not."""
    engine = let_draft(make_engine(), Guesses())
    drafting = engine.lanes[0].scheduler.lookahead._drafting
    drafting._indexer.submit(int).result()
    (thread,) = drafting._indexer._threads
    engine.close()
    assert not thread.is_alive()
    request = make_request("a", [1, 2], seed=3, max_tokens=9, ignore_eos=True)
    outcomes = generate(engine, request)
    assert outcomes["a", 0].token_ids == reference(engine, request, 0, 0)[0]


class Broken(Guesses):
    def draft(self, name, most):
        if name.index == 1:
            raise ValueError("out of guesses")
        return super().draft(name, most)


def test_a_drafter_that_raises_harms_nobody(caplog):
    request = make_request("a", [1, 2], n=3, seed=3, max_tokens=20, ignore_eos=True)
    engine = let_draft(make_engine(max_proposed_rows=16), Broken())
    with caplog.at_level(logging.ERROR):
        outcomes = generate(engine, request)
    for index in range(3):
        outcome = outcomes["a", index]
        assert outcome.token_ids == reference(engine, request, 0, index)[0]
        assert (outcome.last.metrics.num_proposed_tokens > 0) is (index != 1)
    assert sum("drafter failed" in record.message for record in caplog.records) == 1


def test_a_rejected_row_may_be_anything():
    """Numbers that are not finite, in rows that count for nothing, harm nobody; else they do."""
    for place, reason in ((2, "error"), (3, "length"), (4, "length")):
        engine = let_draft(make_engine(), Guesses(None, wrong_at=2, most=4))
        runner = runner_of(engine)
        fetch = runner.fetch

        def spoil(output, fetch=fetch, place=place):
            output = fetch(output)
            if len(output.is_finite) == 5:
                output.is_finite[place] = False
            return output

        runner.fetch = spoil
        outcome = generate(engine, make_request("a", [1], seed=3, max_tokens=9, ignore_eos=True))
        assert outcome["a", 0].last.finish_reason == reason


def test_without_drafts_a_group_plans_ahead_again():
    """And tries again ever more seldom: nearly every step is planned with one in flight."""
    engine = let_draft(make_engine(num_blocks=100), Guesses(most=0))
    engine.limits = engine.limits.__class__(VOCAB_SIZE, 400, 396)
    engine.add_request(make_request("a", [1], seed=3, max_tokens=300, ignore_eos=True))
    ahead = []
    while engine.has_work():
        engine.step(0.0)
        ahead.append(len(engine.lanes[0].in_flight) == 2 or not engine.has_work())
    plans = runner_of(engine).plans
    late = [item.previous_row < 0 for plan in plans for item in plan.scheduled]
    trials = 300 / MOST_TURNS_BETWEEN_TRIALS + 5
    assert 8 <= sum(late) <= 10 + trials


def with_model(engine: Engine, choice: str | None = None, overlap: bool = True) -> Engine:
    """Let the runner guess three tokens, all of them right."""
    rule = {"draft_choice": choice} if choice else {"fixed_drafts": True}
    options = DraftOptions("model", draft_model="echo", draft_max_seqs=0, **rule)
    for lane in engine.lanes:
        config = lane.scheduler.config
        lane.scheduler.lookahead = Speculation(
            Drafting(options),
            Prices((config.max_num_batched_tokens,), engine.policy, lane.modes),
            max_rows=config.max_rows,
            overlap=overlap,
            num_guesses=3,
            num_micro_batches=config.num_micro_batches,
        )
    return engine


@settings(FAST, max_examples=examples(60))
@given(engines(), traffic())
def test_drafts_of_a_model_change_nothing(engine, clients):
    accepted, listener = play(with_model(engine, overlap=engine.overlap), clients)
    check_tokens(engine, accepted, listener, errors=set())


@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_model_guesses_after_a_step_is_drafted_in_the_next(overlap):
    alone = make_request("a", [1, 2], seed=3, max_tokens=17, ignore_eos=True)
    engine = with_model(make_engine(overlap=overlap), overlap=overlap)
    outcomes = generate(engine, alone)
    assert outcomes["a", 0].token_ids == reference(engine, alone, 0, 0)[0]
    assert [plan.num_tokens for plan in runner_of(engine).plans] == [2, 4, 4, 4, 4]
    assert all(plan.num_guesses == 3 for plan in runner_of(engine).plans)


def test_a_group_that_plans_ahead_asks_a_model_in_trials_alone():
    """No row is left to a draft at first; once there is, a trial finds out."""
    engine = with_model(make_engine(num_blocks=100, max_num_seqs=2, max_proposed_rows=2), "fill")
    for name, most in (("a", 45), ("b", 30)):
        engine.add_request(make_request(name, [1], seed=3, max_tokens=most, ignore_eos=True))
    while engine.has_work():
        engine.step(0.0)
    plans = runner_of(engine).plans
    both = [plan for plan in plans if plan.num_decodes == 2]
    assert sum(plan.num_guesses > 0 for plan in both) < len(both)
    assert any(plan.num_proposals for plan in plans)


# ------------------------------------------------------------------------- pipelines

PIPELINES = (2, 4)


@pytest.mark.costs(10)
@settings(FAST, max_examples=examples(200))
@given(
    engines(tightness=2, least_seqs=2, stages=PIPELINES),
    traffic(least=3, most=12),
    st.integers(1, 6),
    st.integers(0, 10),
)
def test_drafts_in_a_pipeline_change_nothing(engine, clients, most, quality):
    """Other micro-batches preempt who drafts, or find its prefix, while its step is in flight."""
    let_draft(engine, Guesses(quality, most=most))
    caught = []
    for lane in engine.lanes:
        scheduler = lane.scheduler
        preempt = scheduler._preempt

        def watched(sequence, builder, lane=lane, preempt=preempt):
            items = [item for each in lane.in_flight if each.plan for item in each.plan.scheduled]
            caught.extend(i for i in items if i.sequence is sequence and i.proposal is not None)
            preempt(sequence, builder)

        scheduler._preempt = watched
    accepted, listener = play(engine, clients)
    check_tokens(engine, accepted, listener, errors=set())
    event(f"accepted some: {counts(engine)[0] > 0}")
    for kind, number in engine.stats().num_preemptions.items():
        event(f"{kind}: {number > 0}")
    event(f"preempted with a draft in flight: {bool(caught)}")


@settings(FAST, max_examples=examples(60))
@given(engines(stages=PIPELINES), traffic(), st.integers(0, 10), FAULTS)
def test_faults_in_a_pipeline_that_drafts_end_their_requests_only(engine, clients, quality, faults):
    check_through_faults(let_draft(engine, Guesses(quality, most=4)), clients, faults)


@settings(FAST, max_examples=examples(60))
@given(engines(stages=PIPELINES), traffic())
def test_drafts_of_a_model_in_a_pipeline_change_nothing(engine, clients):
    accepted, listener = play(with_model(engine, overlap=engine.overlap), clients)
    check_tokens(engine, accepted, listener, errors=set())


def pipeline(num_micro_batches: int, num_seqs: int, **options) -> Engine:
    """A pipeline with a sequence of 40 tokens in each of the first micro-batches."""
    options = {"num_micro_batches": num_micro_batches, "num_blocks": 200, **options}
    engine = make_engine(max_proposed_rows=16, **options)
    for number in range(num_seqs):
        sampling = {"seed": number, "max_tokens": 40, "ignore_eos": True}
        engine.add_request(make_request(str(number), [1, number], **sampling))
    return engine


@pytest.mark.parametrize("num_micro_batches", PIPELINES)
def test_only_its_own_steps_keep_a_micro_batch_from_drafting(num_micro_batches):
    engine = let_draft(pipeline(num_micro_batches, num_micro_batches), Guesses(most=3))
    (lane,), most = engine.lanes, 0
    while engine.has_work():
        engine.step(0.0)
        flights = [flight.plan for flight in lane.in_flight if flight.has_proposals]
        assert len({plan.micro_batch for plan in flights}) == len(flights)
        most = max(most, len(flights))
    assert most == num_micro_batches
    assert len(runner_of(engine).plans) == num_micro_batches * (1 + 10)  # 40 = 1 + 9 * 4 + 3


class Quiet(Drafting):
    """Keeps what a model guesses to itself, for a while."""

    is_quiet = True

    def draft(self, name, most):
        return None if self.is_quiet else super().draft(name, most)


@pytest.mark.parametrize("num_micro_batches", [1, *PIPELINES])
def test_a_trial_asks_every_micro_batch_what_a_model_guesses(num_micro_batches):
    """Of a group that plans ahead: a guess is known a turn of its own micro-batch later."""
    engine = with_model(pipeline(num_micro_batches, num_micro_batches))
    (lane,) = engine.lanes
    speculation = lane.scheduler.lookahead
    quiet = speculation._drafting = Quiet(speculation._drafting.options)
    for siblings in lane.scheduler.requests.values():
        speculation.start(siblings)
    while speculation.commits_first:
        engine.step(0.0)
    quiet.is_quiet = False
    run_to_end(engine, Listener())
    plans = runner_of(engine).plans
    drafted = {plan.micro_batch for plan in plans if plan.num_proposals}
    assert drafted == set(range(num_micro_batches))


def test_only_what_ends_by_itself_is_learned_from():
    engine = let_draft(make_engine(), guesses := Guesses())
    engine.add_request(make_request("whole", [1], seed=1, max_tokens=4, ignore_eos=True))
    engine.add_request(make_request("gone", [2], seed=2, max_tokens=40, ignore_eos=True))
    engine.step(0.0)
    engine.step(1.0)
    engine.step(2.0)
    engine.abort("gone")
    run_to_end(engine, Listener())
    ended = {sequence.request.request_id: whole for sequence, whole in guesses.ended.items()}
    assert ended == {"whole": True, "gone": False}


@pytest.mark.parametrize(("salt", "is_known"), [("mine", True), ("theirs", False)])
def test_nobody_guesses_from_what_another_salt_was_answered(salt, is_known):
    options = DraftOptions(speculation="suffix", fixed_drafts=True, draft_max_seqs=0)
    engine = let_draft(make_engine(prefix_caching=False), Drafting(options))
    asked = make_request("a", [1, 2], seed=1, max_tokens=30, ignore_eos=True)
    (first,) = generate(engine, replace(asked, cache_salt="mine")).values()
    (again,) = generate(engine, replace(asked, request_id="b", cache_salt=salt)).values()
    assert again.token_ids == first.token_ids
    drafted = [each.last.metrics.num_accepted_tokens for each in (first, again)]
    assert (drafted[1] > drafted[0]) == is_known
