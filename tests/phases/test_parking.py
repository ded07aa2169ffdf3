"""Prompts and decodes in a configuration each: what is parked, when phases change, what is lost."""

import pytest
from echo_kit import (
    HOST_BLOCK_BYTES,
    Alternating,
    Listener,
    assert_quiescent,
    constrained,
    generate,
    make_engine,
    make_request,
    parities,
    reference,
    run_to_end,
    runner_of,
)
from phases_kit import LoadFault, exchange_of, make_phases

from shiftjax.host_tier.host_stats import HostStats
from shiftjax.phases.resharding import Resharding, ReshardingState


def requests_of(num: int, *, length: int = 9, **sampling):
    options = {"max_tokens": 6, "ignore_eos": True} | sampling
    return [make_request(f"r{n}", [n % 13] * length, float(n), **options) for n in range(num)]


CONFIGURATIONS = [
    {"pp": (4, 1)},
    {"pp": (1, 2)},
    {"dp": (2, 2), "pp": (2, 1)},
    {"dp": (1, 2), "pp": (1, 3), "overlap": False},
]


@pytest.mark.parametrize("options", CONFIGURATIONS)
@pytest.mark.parametrize("num_host_blocks", [4, 7, 1000])
def test_tokens_are_those_of_one_configuration(options, num_host_blocks):
    requests = requests_of(20)
    engine = make_phases(num_host_blocks=num_host_blocks, **options)
    found = generate(engine, *requests)
    expected = generate(make_engine(), *requests)
    for key, outcome in expected.items():
        assert found[key].token_ids == outcome.token_ids == reference_of(engine, requests, key)
    loads = exchange_of(engine).loads
    assert loads == ["decode", "prefill"] * (len(loads) // 2) + ["decode"]
    assert (len(loads) > 1) == (num_host_blocks < 1000)
    assert engine.stats().num_preemptions == {"recompute": 0, "swap": 0}


def reference_of(engine, requests, key):
    number = [request.request_id for request in requests].index(key[0])
    return reference(engine, requests[number], number, key[1])[0]


def computed(engine, lane: int = 0) -> int:
    """Tokens that the steps of a lane have computed."""
    return sum(plan.num_tokens for plan in runner_of(engine, lane).plans)


def steps_until(engine, condition) -> Listener:
    listener = Listener()
    for step in range(500):
        if condition():
            return listener
        listener.hear(engine.step(float(step)))
        engine.check()
    raise AssertionError("it never came to this")


def scheduler_of(engine, lane: int = 0):
    return engine.lanes[lane].scheduler


# --------------------------------------------------------------------------- phases


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_every_prompt_is_computed_once_and_every_token_decoded_once(prefix_caching):
    requests = requests_of(20)
    engine = make_phases(num_host_blocks=10, prefix_caching=prefix_caching)
    generate(engine, *requests)
    assert len(exchange_of(engine).loads) > 8
    assert (computed(engine, 0), computed(engine, 1)) == (20 * 9, 20 * 5)
    assert not any(plan.num_decodes for plan in runner_of(engine, 0).plans)
    assert all(plan.num_decodes == plan.num_tokens for plan in runner_of(engine, 1).plans)


def test_the_last_of_a_phase_are_parked_by_a_step_that_computes_nothing():
    engine = make_phases()
    generate(engine, *requests_of(3))
    empty = [plan for plan in runner_of(engine).plans if not plan.scheduled]
    assert [plan.num_tokens for plan in empty] == [0] * len(empty)
    assert runner_of(engine).plans[-1] is empty[-1] and empty[-1].offloads
    assert sum(engine.stats().steps_by_mode.values()) == sum(
        bool(plan.scheduled) for lane in (0, 1) for plan in runner_of(engine, lane).plans
    )


def test_copies_to_the_host_ride_on_steps_that_compute():
    engine = make_phases(pp=(1, 1), max_num_batched_tokens=9)
    generate(engine, *requests_of(6))
    carrying = [plan for plan in runner_of(engine).plans if plan.offloads]
    assert sum(bool(plan.scheduled) for plan in carrying) >= 4


def test_who_ends_with_the_first_token_needs_no_room_and_no_other_phase():
    engine = make_phases(num_host_blocks=1)
    outcomes = generate(engine, *requests_of(5, max_tokens=1))
    assert all(len(outcome.token_ids) == 1 for outcome in outcomes.values())
    assert exchange_of(engine).loads == []


def test_a_prompt_that_no_tier_could_hold_is_computed_between_decodes():
    requests = requests_of(4)
    requests.insert(1, make_request("long", [5] * 17, 0.5, max_tokens=4, ignore_eos=True))
    engine = make_phases(num_host_blocks=4)
    outcomes = generate(engine, *requests)
    assert outcomes["long", 0].token_ids == reference(engine, requests[1], 1, 0)[0]
    assert (computed(engine, 0), computed(engine, 1)) == (4 * 9, 4 * 5 + 17 + 3)


def test_prompts_that_come_while_others_decode_wait_for_the_next_phase():
    engine = make_phases()
    for request in requests_of(2):
        engine.add_request(request)
    listener = steps_until(engine, lambda: engine.topology.find(Resharding).phase == "decode")
    engine.add_request(make_request("late", [3] * 5, 9.0, max_tokens=3, priority=-1))
    run_to_end(engine, listener)
    assert exchange_of(engine).loads == ["decode", "prefill", "decode"]
    begun = {name: outcome.last for (name, _), outcome in listener.outcomes.items()}
    assert begun["late"].finish_reason in ("length", "stop")
    assert_quiescent(engine)


def test_parked_requests_are_spread_over_groups_by_load():
    engine = make_phases(dp=(1, 2), max_num_batched_tokens=64)
    for request in requests_of(8):
        engine.add_request(request)
    steps_until(engine, lambda: engine.topology.find(Resharding).phase == "decode")
    assert [len(scheduler_of(engine, lane).requests) for lane in range(3)] == [0, 4, 4]


def test_the_state_says_what_is_parked_and_what_a_switch_took():
    times = iter(range(0, 10_000, 3))
    engine = make_phases(num_host_blocks=7, clock=lambda: float(next(times)))
    for request in requests_of(4):
        engine.add_request(request)
    state = lambda: engine.stats().find(ReshardingState)  # noqa: E731
    assert (state().phase, state().num_switches, state().num_parked) == ("prefill", 0, 0)
    steps_until(engine, lambda: state().num_switches == 1)
    assert (state().phase, state().num_parked) == ("decode", 2)
    assert (state().num_held_bytes, state().num_bytes) == (
        6 * HOST_BLOCK_BYTES,
        7 * HOST_BLOCK_BYTES,
    )
    assert state().switch_seconds > 0
    assert engine.stats().num_waiting == 4
    run_to_end(engine, Listener())
    assert (state().num_switches, state().num_parked, state().num_held_bytes) == (3, 0, 0)


def test_schedulers_and_phases_have_to_agree():
    engine = make_phases()
    lanes = {"prefill": [engine.lanes[1]], "decode": [engine.lanes[0]]}
    with pytest.raises(ValueError, match="must decode"):
        Resharding(lanes, exchange_of(engine), engine.topology.find(Resharding).memory)


# ------------------------------------------------------------------------- failures


@pytest.mark.parametrize("where", ["run", "fetch"])
def test_what_is_safe_on_the_host_outlives_the_pools(where):
    requests = requests_of(6)
    engine = make_phases(pp=(1, 1), max_num_seqs=2, max_num_batched_tokens=9, overlap=False)
    runner_of(engine).faults = {3: where}  # of the fourth; the third is parked by it
    outcomes = generate(engine, *requests)
    reasons = [outcomes[f"r{n}", 0].last.finish_reason for n in range(6)]
    assert reasons == ["length"] * 3 + ["error"] + ["length"] * 2
    assert computed(engine) == 6 * 9 + 9  # the third again


@pytest.mark.parametrize("where", ["run", "fetch"])
def test_what_still_waits_on_the_host_outlives_a_failed_decode(where):
    engine = make_phases(pp=(1, 1), max_num_seqs=2, overlap=False)
    runner_of(engine, 1).faults = {1: where}
    outcomes = generate(engine, *requests_of(6))
    failed = [name for (name, _), o in outcomes.items() if o.last.finish_reason == "error"]
    assert sorted(failed) == ["r0", "r1"]
    assert (computed(engine, 0), computed(engine, 1)) == (6 * 9, 4 * 5 + 2 * 2)


def test_what_a_failed_step_has_read_is_not_read_again():
    engine = make_phases(pp=(1, 1))
    runner_of(engine, 1).faults = {0: "fetch"}
    for request in requests_of(1):
        engine.add_request(request)
    memory = engine.topology.find(Resharding).memory
    steps_until(engine, lambda: engine.topology.find(Resharding).phase == "decode")
    assert memory.index
    run_to_end(engine, Listener())
    assert not memory.index and not memory.extents


def test_an_exchange_that_fails_leaves_everything_where_it_was():
    engine = make_phases(num_host_blocks=4)
    exchange_of(engine).fails_at = 1
    for request in requests_of(3):
        engine.add_request(request)
    listener = Listener()
    with pytest.raises(LoadFault):
        run_to_end(engine, listener)
    assert engine.topology.find(Resharding).phase == "decode"
    engine.check()
    for name in ("r0", "r1", "r2"):
        listener.hear(engine.abort(name))
    assert listener.ended == {"r0", "r1", "r2"}
    assert_quiescent(engine)


# -------------------------------------------------------------- state of a sequence


def test_continuations_share_one_computed_prompt():
    request = make_request("r", [4] * 18, n=4, max_tokens=5, ignore_eos=True)
    engine = make_phases(prefix_caching=False, block_size=4)
    outcomes = generate(engine, request)
    for index in range(4):
        assert outcomes["r", index].token_ids == reference(engine, request, 0, index)[0]
    # The others share four blocks of the prompt, and compute its last two tokens for their first.
    assert (computed(engine, 0), computed(engine, 1)) == (18, 4 + 3 * (2 + 4))


def test_a_continuation_can_end_while_it_is_parked():
    request = make_request("r", [4] * 9, n=3, max_tokens=5, ignore_eos=True)
    for ended in range(3):
        engine = make_phases(num_host_blocks=4)
        engine.add_request(request)
        listener = steps_until(
            engine, lambda e=engine: e.topology.find(Resharding).phase == "decode"
        )
        listener.hear(engine.finish("r", ended, "stop"))
        run_to_end(engine, listener)
        assert_quiescent(engine)
        for index in {0, 1, 2} - {ended}:
            tokens, _ = reference(engine, request, 0, index)
            assert listener.outcomes["r", index].token_ids == tokens


def test_an_abort_gives_back_what_was_kept_on_the_host():
    engine = make_phases(num_host_blocks=7, max_num_batched_tokens=8, pp=(1, 1))
    for request in requests_of(3):
        engine.add_request(request)
    held = engine.topology.find(Resharding).memory
    listener = steps_until(engine, lambda: held.num_reserved_bytes and held.extents)
    for name in ("r0", "r1", "r2"):
        listener.hear(engine.abort(name))
        engine.check()
    assert held.num_held_bytes == 0
    run_to_end(engine, listener)
    assert_quiescent(engine)


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 0, "max_tokens": 0, "n": 1},
        {"min_tokens": 7, "stop_token_ids": [1, 2, 3, 4, 5, 6], "ignore_eos": False},
        {"seed": 3},
    ],
)
def test_whatever_a_request_asks_for_it_gets_as_in_one_configuration(sampling):
    options = {"n": 2, "max_tokens": 9} | sampling
    requests = requests_of(6, length=11, **options)
    found = generate(make_phases(num_host_blocks=8, pp=(3, 2)), *requests)
    expected = generate(make_engine(), *requests)
    assert found.keys() == expected.keys()
    for key, outcome in expected.items():
        assert found[key].token_ids == outcome.token_ids
        assert found[key].logprobs == outcome.logprobs
        given, wanted = ([e.prompt_logprobs for e in o.events] for o in (found[key], outcome))
        assert given == wanted
        assert found[key].last.finish_reason == outcome.last.finish_reason


def test_a_grammar_goes_along_from_phase_to_phase():
    constraints = [Alternating() for _ in range(5)]
    requests = [constrained(f"r{n}", c, prompt=(n, 5, 6)) for n, c in enumerate(constraints)]
    outcomes = generate(make_phases(num_host_blocks=2, pp=(2, 2)), *requests)
    for number, constraint in enumerate(constraints):
        tokens = outcomes[f"r{number}", 0].token_ids
        assert parities(tokens) == [0, 1] * 6
        assert constraint.accepted == tokens[:-1]


def test_the_last_token_of_a_prompt_is_not_left_to_the_decodes():
    engine = make_phases(pp=(1, 1), max_num_batched_tokens=8, prefix_caching=False)
    generate(engine, *requests_of(3))
    assert (computed(engine, 0), computed(engine, 1)) == (3 * 9, 3 * 5)


def test_what_ends_with_its_first_token_is_not_copied_to_the_host():
    request = make_request("r", [1] * 9, seed=1, max_tokens=6, ignore_eos=True)
    first = reference(make_phases(), request, 0, 0)[0][0]
    engine = make_phases(pp=(1, 1), prefix_caching=False)
    stops = make_request("r", [1] * 9, seed=1, max_tokens=6, stop_token_ids=[first])
    assert generate(engine, stops)["r", 0].token_ids == [first]
    assert engine.stats().find(HostStats).num_offloaded_bytes == 0


def test_what_another_has_read_in_vain_is_computed_again():
    parked = make_request("parked", [5] * 8, 1.0, max_tokens=4, ignore_eos=True)
    reader = make_request("reader", [5] * 20, 0.0, max_tokens=4, ignore_eos=True)
    filler = make_request("filler", [7] * 6, 0.5, max_tokens=9, ignore_eos=True)
    engine = make_phases(dp=(1, 2), pp=(1, 1), num_host_blocks=4, max_num_seqs=1)
    runner_of(engine, 1).faults = {0: "fetch"}
    outcomes = generate(engine, reader, filler, parked)
    assert runner_of(engine, 1).plans[0].restores  # of what the other has parked
    assert outcomes["reader", 0].last.finish_reason == "error"
    assert outcomes["parked", 0].token_ids == reference(engine, parked, 2, 0)[0]
    assert computed(engine, 2) == 8 + (8 + 3)  # in the group of the filler


def test_a_beginning_that_many_have_in_common_is_parked_once():
    requests = [
        make_request(f"r{n}", [1] * 8 + [n % 13, n], float(n), max_tokens=4, ignore_eos=True)
        for n in range(10)
    ]
    for prefix_caching, num_blocks in ((True, 2 + 10), (False, 10 * 3)):
        engine = make_phases(pp=(1, 1), prefix_caching=prefix_caching, max_num_seqs=1)
        for request in requests:
            engine.add_request(request)
        memory = engine.topology.find(Resharding).memory
        listener = steps_until(
            engine, lambda e=engine: e.topology.find(Resharding).phase == "decode"
        )
        assert memory.num_held_bytes == num_blocks * HOST_BLOCK_BYTES
        run_to_end(engine, listener)
        assert_quiescent(engine)
        for number, request in enumerate(requests):
            tokens, _ = reference(engine, request, number, 0)
            assert listener.outcomes[request.request_id, 0].token_ids == tokens
