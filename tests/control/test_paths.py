"""Drafts of several paths: the one that agrees stays with its blocks, and no token changes."""

from dataclasses import replace

import numpy as np
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
from hypothesis import event, given, settings
from hypothesis import strategies as st
from spent import examples
from test_engine_properties import FAST, check_tokens, engines, play, traffic
from test_speculation import Guesses, counts, let_draft

from shiftjax.core.block_tables import BlockTables
from shiftjax.core.blocks import BlockAllocator
from shiftjax.core.lookahead import Lookahead
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.paths import row_worths
from shiftjax.sim.echo import echo_token


class Forked(Guesses):
    """Drafts of several paths; in each the numbers of `right` say which of them begins rightly.

    From its first token on every path goes on as the echo would, `lengths` tokens in turn.
    """

    def __init__(
        self,
        num_paths: int,
        right: list[int],
        lengths: list[int],
        claims: list[list[float]] | None = None,
        choice="fixed",
    ):
        super().__init__(most=max(lengths))
        self.options = DraftOptions(draft_choice=choice, draft_max_seqs=0, draft_paths=num_paths)
        self.right, self.lengths, self.claims = right, lengths, claims or [[0.5] * 9] * num_paths

    def draft(self, name, most):
        paths = []
        for number in range(len(self.claims)):
            shift = number - self.right[self.count % len(self.right)]
            length = self.lengths[(self.count + number) % len(self.lengths)]
            guesses, last = [], name.token_ids[-1]
            for place in range(min(most, length)):
                position = len(name.token_ids) - 1 + place
                last = echo_token(last, position, name.seed, VOCAB_SIZE)
                last = (last + (shift if not place else 0)) % VOCAB_SIZE
                guesses.append(last)
            if guesses:
                claims = self.claims[number][: len(guesses)]
                paths.append(self.rated(name, guesses, claims, "guess"))
        self.count += 1
        return paths[0]._replace(others=tuple(paths[1:])) if paths else None


def num_paths_of(engine) -> list[int]:
    """Of every step: items that are further paths."""
    return [
        sum(item.path_table is not None for item in plan.scheduled)
        for lane in range(len(engine.lanes))
        for plan in runner_of(engine, lane).plans
    ]


forks = st.builds(
    Forked,
    st.integers(1, 4),
    st.lists(st.integers(0, 4), min_size=1, max_size=7),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
)


@settings(FAST, max_examples=examples(100))
@given(engines(), traffic(), forks)
def test_paths_change_nothing(engine, clients, guesses):
    let_draft(engine, guesses)
    accepted, listener = play(engine, clients)
    check_tokens(engine, accepted, listener, errors=set())
    event(f"paths: {any(num_paths_of(engine))}")
    event(f"preempted: {any(engine.stats().num_preemptions.values())}")
    event(f"prefix hits: {engine.stats().num_prefix_hit_tokens > 0}")


@settings(FAST, max_examples=examples(80))
@given(engines(tightness=2, least_seqs=3), traffic(least=8, most=12), forks)
def test_paths_in_a_small_pool(engine, clients, guesses):
    let_draft(engine, guesses)
    accepted, listener = play(engine, clients)
    check_tokens(engine, accepted, listener, errors=set())


@pytest.mark.parametrize("right", range(4))
def test_the_right_path_saves_its_steps_whichever_it_is(right):
    request = make_request("a", [1, 2], seed=3, max_tokens=25, ignore_eos=True, logprobs=1)
    guesses = Forked(4, [right], [4])
    engine = let_draft(make_engine(max_draft_rows=24), guesses)
    outcome = generate(engine, request)["a", 0]
    assert outcome.token_ids == reference(engine, request, 0, 0)[0]
    assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids
    plans = runner_of(engine).plans
    assert [len(plan.scheduled) for plan in plans] == [1, 4, 4, 4, 4, 4]
    assert [plan.num_tokens for plan in plans] == [2, 20, 20, 20, 20, 16]  # 1 + 4 * 5 + 4
    metrics = outcome.last.metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4 * 19, 19)
    assert sum(metrics.steps_by_mode.values()) == 6  # once a step, not a path
    assert counts(engine) == (19, 3 * 19)


@pytest.mark.parametrize("right", [0, 1, 2, 3])  # 3: none of them
@pytest.mark.parametrize("length", range(3, 9))
def test_only_the_path_that_stays_enters_the_prefix_cache(right, length):
    """The owner is aborted before its next step, and the next requests have its tokens."""
    engine = make_engine(overlap=False, block_size=2, num_blocks=40, max_draft_rows=24)
    prompt = list(range(1, 1 + length))
    engine.add_request(make_request("a", prompt, max_tokens=12, seed=3, ignore_eos=True))
    engine.step(0.0)
    engine.step(1.0)
    let_draft(engine, Forked(3, [right], [4]))
    scheduler = engine.lanes[0].scheduler
    (sequence,) = scheduler.requests["a"]
    scheduler.lookahead.start([sequence])
    before, table = len(sequence.token_ids), list(sequence.block_table)
    engine.step(2.0)
    assert num_paths_of(engine)[-1] == 2
    assert len(sequence.token_ids) == before + (5 if right < 3 else 1)
    shared = (before - 1) // 2
    assert sequence.block_table[:shared] == table[:shared]
    if len(table) > shared:
        assert (sequence.block_table[shared] == table[shared]) is (right in (0, 3))
    assert scheduler.num_used_blocks == len(sequence.block_table)  # the others' are free again
    engine.check()
    tokens = list(sequence.token_ids)
    engine.abort("a")
    scheduler.lookahead = Lookahead()
    wrong = [*tokens[:before], (tokens[before] + 1) % VOCAB_SIZE, *tokens[before + 1 :]]
    for name, ids in (("right", tokens), ("wrong", wrong)):
        hits = engine.stats().num_prefix_hit_tokens
        engine.add_request(make_request(name, [*ids, 1, 1], max_tokens=2, ignore_eos=True))
        run_to_end(engine, Listener())  # the audit compares what the blocks hold
        found = engine.stats().num_prefix_hit_tokens - hits
        assert found == ((len(tokens) - 1) // 2 if name == "right" else before // 2) * 2
    assert engine.stats().num_failed_steps == 0


@pytest.mark.parametrize("way", ["abort", "finish", "fail", "launch fails"])
def test_blocks_of_paths_in_flight_are_released_once(way):
    """While a step with paths flies: its owner leaves, or the step fails."""
    engine = let_draft(make_engine(max_draft_rows=32), Forked(3, [1], [4]))
    for name in "ab":
        engine.add_request(make_request(name, [1, 2], seed=3, max_tokens=30, ignore_eos=True))
    runner, listener = runner_of(engine), Listener()
    listener.hear(engine.step(0.0))
    for _ in range(9):
        if runner.plans[-1].copies:
            break
        listener.hear(engine.step(1.0))
    lane = engine.lanes[0]
    assert len(lane.in_flight) == 1 and lane.in_flight[0].plan is runner.plans[-1]
    tables = lane.scheduler.tables
    held = sum(len(sequence.block_table) for sequence in lane.scheduler.running)
    assert lane.scheduler.num_used_blocks == held + 2 * 2 * 2  # sequences, paths, blocks
    engine.check()
    if way == "abort":
        listener.hear(engine.abort("a"))
    elif way == "finish":
        listener.hear(lane.scheduler.finish("a", 0, "stop"))
    elif way == "fail":
        listener.hear(lane.scheduler.fail(lane.in_flight.pop().plan, "told to"))
        runner.reset()
    else:
        runner.faults[len(runner.plans)] = "run"
    engine.check()
    run_to_end(engine, listener)
    assert listener.ended == {"a", "b"}
    assert tables.device.num_free_blocks == tables.device.num_usable_blocks


@pytest.mark.parametrize(
    ("bucket", "num_tokens"),
    [(3, [3]), (4, [4]), (5, [3, 2]), (6, [3, 3]), (7, [4, 3]), (8, [5, 3])],
)
def test_a_path_is_offered_where_it_beats_the_rest_of_the_first(bucket, num_tokens):
    """Survivals of 0.9, 0.81, 0.08, 0.01, against 0.5 and 0.45 in one row more."""
    guesses = Forked(2, [1], [2, 4], [[0.9, 0.9, 0.1, 0.1], [0.5, 0.9]], choice="fill")
    guesses.count = 1  # the first path has four tokens, the second two
    engine = let_draft(make_engine(max_draft_rows=24), guesses, bucket)
    engine.add_request(make_request("a", [1, 2], seed=3, max_tokens=30, ignore_eos=True))
    engine.step(0.0)
    engine.step(1.0)
    plan = next(plan for plan in runner_of(engine).plans if plan.num_drafts)
    assert [item.num_tokens for item in plan.scheduled] == num_tokens


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_paths_are_taken_than_the_setting_says(most):
    """A step is built for copies of blocks only where there may be further paths."""
    guesses = Forked(4, [0], [3])
    guesses.options = replace(guesses.options, draft_paths=most)
    engine = let_draft(make_engine(max_draft_rows=24), guesses)
    generate(engine, make_request("a", [1, 2], seed=3, max_tokens=9, ignore_eos=True))
    assert max(num_paths_of(engine)) == most - 1


def test_first_drafts_come_before_second_paths():
    """Room for six sequences: four of them draft, two have a second path."""
    config = {"num_blocks": 200, "max_num_seqs": 6, "max_draft_rows": 32}
    engine = let_draft(make_engine(**config), Forked(2, [0], [3]))
    requests = [
        make_request(f"r{i}", [1, i], seed=i, max_tokens=17, ignore_eos=True) for i in range(4)
    ]
    generate(engine, *requests)
    plans = runner_of(engine).plans
    assert max(len(plan.scheduled) for plan in plans) == 6
    for plan in plans:
        drafting = [item for item in plan.scheduled if item.draft]
        first = [item.sequence for item in drafting if item.path_table is None]
        assert len(first) == len(set(first)) >= len(drafting) - len(first)


def test_paths_leave_the_blocks_that_admissions_leave():
    """Of 40 blocks 21 are the watermark's: further paths end where they would take one."""
    config = {"num_blocks": 41, "block_size": 1, "watermark": 0.5, "max_num_seqs": 6}
    engine = let_draft(make_engine(**config, max_draft_rows=32), Forked(4, [1], [3]))
    for number in range(2):
        request = make_request(f"r{number}", [1, number], seed=number, max_tokens=12)
        engine.add_request(request)
    (lane,), used = engine.lanes, []
    while engine.has_work():
        engine.step(0.0)
        engine.check()
        items = lane.in_flight[-1].plan.scheduled if lane.in_flight else []
        if any(item.path_table for item in items):
            used.append(lane.scheduler.num_used_blocks)
    assert max(used) == 19 and engine.stats().num_failed_steps == 0


def test_a_constraint_cuts_every_path_by_itself():
    """The first path is forbidden from its first token on, the second from its third."""
    engine = let_draft(make_engine(max_draft_rows=24), Forked(2, [1], [4]))
    request = make_request("a", [1, 2], seed=3, max_tokens=20)
    expected = reference(engine, request, 0, 0)[0]

    class Only:
        """Allows the tokens that come without it, and its state is their number."""

        done = 0

        def mask_at(self, place):
            return bits(expected[place] if place < len(expected) else 0)

        @property
        def mask(self):
            return self.mask_at(self.done)

        def accept(self, token_id):
            assert token_id == expected[self.done]
            self.done += 1
            return True

        def draft_masks(self, draft):
            masks = [self.mask]
            for place, token in enumerate(draft[:2], self.done):
                if token != expected[place]:
                    break
                masks.append(self.mask_at(place + 1))
            return masks

        def forced_tokens(self, most):
            return []

    request = type(request)("a", [1, 2], request.sampling, constraints=(Only(),))
    outcome = generate(engine, request)["a", 0]
    assert outcome.token_ids == expected
    plans = runner_of(engine).plans
    assert [plan.num_tokens for plan in plans][1:] == [3] * 6 + [1]  # two tokens of path 2, alone
    assert not any(num_paths_of(engine))


def bits(token):
    return np.array([1 << token], np.uint32)


@pytest.mark.parametrize(
    ("survivals", "worths"),
    [
        ([0.5, 0.1], [0.25, 0.25, 0.1]),
        ([0.5, 0.4, 0.1], [0.3, 0.3, 0.3, 0.1]),
        ([0.9] * 3, [0.675] * 4),
        ([], []),
    ],
)
def test_the_first_row_of_a_path_brings_nothing_by_itself(survivals, worths):
    assert row_worths(survivals) == pytest.approx(worths)


def test_a_fork_keeps_what_stands_before_it():
    tables = BlockTables(BlockAllocator(20, 4))
    (sequence,) = sequences = [_sequence(range(10))]
    tables.admit(sequence, 0)
    before = list(sequence.block_table)
    forks = [tables.fork(sequence, 2, 5), tables.fork(sequence, 2, 3)]
    assert [len(fork) for fork in forks] == [5, 3]
    assert all(fork[:2] == before[:2] for fork in forks)
    assert len({*before[2:], *forks[0][2:], *forks[1][2:]}) == 1 + 3 + 1
    tables.check(sequences)
    tables.join(sequence, forks[0])
    assert sequence.block_table == forks[0]
    tables.check(sequences)
    assert tables.device.num_free_blocks == 19 - 5


def _sequence(token_ids):
    engine = make_engine()
    engine.add_request(make_request("a", list(token_ids)))
    engine.step(0.0)
    (sequence,) = engine.lanes[0].scheduler.requests["a"]
    sequence.block_table, sequence.num_computed_tokens = [], 0
    return sequence
