"""What is kept of the experts that tokens chose: each token's own, whatever steps and caches do."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chosen_kit import let_tell
from echo_kit import VOCAB_SIZE, Listener, make_engine, make_request, run_to_end, runner_of
from fleet_kit import make_fleet, random_arrangement
from guesses_kit import Guesses, let_draft

from shiftjax.core.engine import Engine
from shiftjax.core.limits import validate_request
from shiftjax.core.request import RequestError
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.routing.chosen import ChosenOf, type_of


def serve(engine: Engine, requests, at: dict | None = None, most: int = 3000) -> Listener:
    """Serve requests that come at some turns, and hold what is told to the tokens."""
    listener, waiting = Listener(), list(requests)
    for turn in range(most):
        while waiting and waiting[0].arrival_seconds <= turn:
            engine.add_request(waiting.pop(0))
        if at and turn in at:
            at[turn](engine)
        if not waiting and not engine.has_work():
            break
        listener.hear(engine.step(float(turn)))
        engine.check()
    asked = {request.request_id: request for request in requests}
    assert listener.ended == asked.keys()
    for (name, _), outcome in listener.outcomes.items():
        request, told = asked[name], outcome.last.notes
        if not request.wants_notes:
            assert told is None
            continue
        texts = [*request.prompt_token_ids, *outcome.token_ids]
        expected = np.array([texts, range(len(texts))], np.uint16).T[:-1, None]
        np.testing.assert_array_equal(told, expected)
    return listener


def random_requests(seed: int, count: int = 24):
    """Prompts with beginnings in common, most of which ask."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(21)] for _ in range(2)]
    for number in range(count):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9))]
        prompt = rng.choice(stems)[: rng.choice((0, 8, 16, 21))] + own
        sampling = {"max_tokens": rng.randrange(1, 15), "n": rng.choice((1, 1, 3))}
        request = make_request(str(number), prompt, float(number * rng.choice((1, 3))), **sampling)
        yield replace(request, wants_notes=rng.random() < 0.7)


def by_arrival(seed: int):
    return sorted(random_requests(seed), key=lambda request: request.arrival_seconds)


ENGINES = {
    "roomy": {},
    "preempted": {"num_blocks": 16},
    "no overlap": {"num_blocks": 16, "overlap": False},
    "no cache": {"num_blocks": 16, "prefix_caching": False},
    "swapped": {"num_blocks": 16, "preemption": "swap", "num_host_blocks": 40},
    "two groups": {"num_blocks": 16, "dp": 2},
    "pipeline": {"num_blocks": 40, "num_micro_batches": 2},
    "windows": {"num_blocks": 60, "windows": (None, 8)},
}


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("name", ENGINES)
def test_each_token_has_its_own(name, drafts):
    preempted, hits, options = 0, 0, {}
    for seed in range(3):
        options = ENGINES[name] | ({"max_proposed_rows": 24} if drafts else {})
        engine = make_engine(max_num_batched_tokens=24, **options)
        if drafts and name != "pipeline":
            let_draft(engine, Guesses(7))
        let_tell(engine, most=(1 << 20, 64)[seed % 2])
        serve(engine, by_arrival(seed))
        stats = engine.stats()
        preempted += sum(stats.num_preemptions.values())
        hits += stats.num_prefix_hit_tokens
    assert preempted or "num_blocks" not in options or name in ("pipeline", "windows")
    assert hits or name == "no cache"


def test_groups_of_a_fleet_move_them_along():
    """Blocks of several sizes have the same hashes, and sequences take what is kept along."""
    moved = 0
    for seed in range(4):
        engine, rng = make_fleet(), random.Random(seed)
        let_tell(engine, size=2)
        fleet = engine.topology.find(Fleet)
        assert fleet is not None

        def regroup(_: Engine, policy: Any = fleet.policy, rng=rng) -> None:
            policy.wishes = [Wish(random_arrangement(rng), "told", "move")]

        serve(engine, by_arrival(seed), dict.fromkeys(range(2, 300, 3), regroup))
        moved += fleet.stats.num_moved_sequences
    assert moved > 5


def test_what_a_cache_knows_no_experts_of_is_computed():
    """Who does not ask takes all of a prefix; who asks takes what they are known of."""
    engine = make_engine(num_blocks=64)
    chosen = let_tell(engine, most=8)  # two blocks
    prompt = [n % VOCAB_SIZE for n in range(20)]
    ask = make_request("a", prompt, max_tokens=1)
    serve(engine, [replace(ask, wants_notes=True)])
    assert len(chosen._by_hash) == 2
    serve(engine, [replace(ask, request_id="b", wants_notes=True)])
    assert engine.stats().num_prefix_hit_tokens == 0  # the first block is forgotten
    serve(engine, [replace(ask, request_id="c")])
    assert engine.stats().num_prefix_hit_tokens == 16


def test_an_end_on_the_way_tells_what_there_is():
    engine = make_engine(max_num_batched_tokens=8)
    let_tell(engine)
    prompt = [n % VOCAB_SIZE for n in range(20)]
    ask = replace(make_request("a", prompt, max_tokens=9), wants_notes=True)
    (event,) = aborted(engine, ask, after=0)
    assert event.notes is None or not len(event.notes)
    (event,) = aborted(engine, replace(ask, request_id="b"), after=3)
    assert 0 < len(event.notes) < 20
    np.testing.assert_array_equal(event.notes[:, 0, 0], prompt[: len(event.notes)])


def aborted(engine: Engine, request, after: int):
    engine.add_request(request)
    for turn in range(after):
        engine.step(float(turn))
    found = engine.abort(request.request_id)
    run_to_end(engine, Listener())
    return found


def test_a_failed_step_starts_anew():
    engine = make_engine(max_num_batched_tokens=24)
    let_tell(engine)
    runner_of(engine).faults = {4: "fetch"}
    listener, requests = Listener(), by_arrival(1)
    for request in requests[:8]:
        engine.add_request(request)
    run_to_end(engine, listener)
    asked = {request.request_id: request for request in requests}
    ended = [o for o in listener.outcomes.values() if o.last.finish_reason != "error"]
    assert ended
    for outcome in ended:
        request = asked[outcome.last.request_id]
        if request.wants_notes:
            texts = [*request.prompt_token_ids, *outcome.token_ids]
            np.testing.assert_array_equal(outcome.last.notes[:, 0, 0], texts[:-1])


def test_what_is_computed_anew_with_other_weights_counts_anew():
    engine = make_engine(max_num_batched_tokens=24)
    let_tell(engine)
    ask = replace(make_request("a", list(range(9)), max_tokens=9), wants_notes=True)

    def change(engine: Engine) -> None:
        engine.settle(5.0)
        (sequence,) = engine.lanes[0].scheduler.requests["a"]
        assert sequence.notes.end > 9
        engine.renew(1, recompute=True)
        assert sequence.notes is None

    engine.add_request(ask)
    for turn in range(4):
        engine.step(float(turn))
    change(engine)
    listener = Listener()
    run_to_end(engine, listener)
    assert len(listener.outcomes["a", 0].last.notes) == 9 + 9 - 1


def test_who_asks_in_vain_is_refused():
    engine = make_engine()
    ask = replace(make_request("a", [1, 2]), wants_notes=True)
    with pytest.raises(RequestError, match="keeps no notes"):
        engine.add_request(ask)
    validate_request(ask, replace(engine.limits, keeps_notes=True))
    with pytest.raises(RequestError, match="wants_notes must be true or false"):
        engine.add_request(replace(ask, wants_notes=1))


def test_a_runner_that_tells_nothing_is_found_out():
    engine = make_engine()
    let_tell(engine)
    engine.lanes[0].runner.run = type(engine.lanes[0].runner).run.__get__(engine.lanes[0].runner)
    engine.add_request(make_request("a", [1, 2]))
    listener = Listener()
    run_to_end(engine, listener)
    assert listener.outcomes["a", 0].last.finish_reason == "error"


def test_tokens_are_known_without_a_gap():
    rows = np.arange(200, dtype=np.uint8).reshape(100, 1, 2)
    own = ChosenOf()
    own.add(10, rows[10:20])
    assert (own.first, own.end) == (10, 20)
    assert own.of(9, 12) is None
    own.add(15, np.zeros_like(rows[15:90]))  # what is known stays
    np.testing.assert_array_equal(own.of(10, 20), rows[10:20])
    np.testing.assert_array_equal(own.of(20, 90), 0 * rows[20:90])
    own.add(95, rows[95:])  # those in between are not known
    assert (own.first, own.end) == (95, 100)
    assert own.of(10, 20) is None
    own.add(0, rows[:70])
    np.testing.assert_array_equal(own.of(0, 70), rows[:70])
    assert type_of(256) is np.uint8
    assert type_of(257) is np.uint16
