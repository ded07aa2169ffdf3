"""Token constraints: kept in every step, with overlap, preemption and failed steps; dead ends."""

import pytest
from echo_kit import (
    Alternating,
    assert_quiescent,
    constrained,
    generate,
    make_engine,
    parities,
    runner_of,
)

from shiftjax.core.request import RequestError


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 12])  # 12: some are preempted
def test_every_token_is_allowed_and_neighbours_do_not_notice(overlap, num_blocks):
    def engine():
        return make_engine(overlap=overlap, num_blocks=num_blocks, max_num_seqs=6)

    constraints = {f"c{i}": Alternating() for i in range(3)}
    requests = [
        constrained(name, constraints.get(name), prompt=(3 + i, 5), seed=i, max_tokens=14)
        for i, name in enumerate(("c0", "free0", "c1", "free1", "c2", "free2"))
    ]
    outcomes = generate(engine(), *requests)
    for name, constraint in constraints.items():
        tokens = outcomes[name, 0].token_ids
        assert parities(tokens) == [0, 1] * 7
        assert constraint.accepted == tokens[:-1]  # the last one ends by length
    for each in (each for each in requests if not each.constraints):
        alone = generate(engine(), each)[each.request_id, 0].token_ids
        assert outcomes[each.request_id, 0].token_ids == alone


def test_overlap_changes_nothing():
    tokens = [
        generate(make_engine(overlap=overlap), constrained("r", Alternating(), seed=4))[
            "r", 0
        ].token_ids
        for overlap in (True, False)
    ]
    assert tokens[0] == tokens[1]


def test_a_dead_end_is_an_error_of_its_own():
    outcomes = generate(
        make_engine(), constrained("dead", Alternating(most=5)), constrained("other", Alternating())
    )
    last = outcomes["dead", 0].last
    assert (last.finish_reason, last.error_code) == ("error", "constraint_failed")
    assert len(outcomes["dead", 0].token_ids) == 5
    assert outcomes["other", 0].last.finish_reason == "length"


def test_a_constraint_that_raises_ends_its_request_alone():
    outcomes = generate(
        make_engine(),
        constrained("bug", Alternating(breaks_at=3)),
        constrained("other", Alternating()),
    )
    assert outcomes["bug", 0].last.error_code == "constraint_failed"
    assert outcomes["other", 0].last.finish_reason == "length"


def test_a_failed_step_does_not_move_a_constraint():
    engine = make_engine(max_num_seqs=2)
    waiting = Alternating()
    runner_of(engine).faults[2] = "fetch"
    requests = [constrained(f"r{i}", Alternating()) for i in range(2)]
    outcomes = generate(engine, *requests, constrained("waits", waiting))
    assert outcomes["r0", 0].last.error_code == "step_failed"
    assert parities(outcomes["waits", 0].token_ids) == [0, 1] * 6
    assert waiting.accepted == outcomes["waits", 0].token_ids[:-1]
    assert_quiescent(engine)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"min_tokens": 1}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"n": 2}, "1 constraints for 2"),
    ],
)
def test_what_could_leave_no_token_is_refused(sampling, words):
    with pytest.raises(RequestError, match=words):
        make_engine().add_request(constrained("r", Alternating(), **sampling))
