"""Token constraints: kept in every step, with overlap, preemption and failed steps; dead ends."""

import numpy as np
import pytest
from echo_kit import VOCAB_SIZE, assert_quiescent, generate, make_engine, runner_of

from shiftjax.core.request import Request, RequestError, SamplingParams


class Alternating:
    """Tokens must be even, odd, even ...; after `most` tokens nothing may follow."""

    def __init__(self, most: int = 10**6, breaks_at: int = 10**6):
        self.accepted: list[int] = []
        self.most, self.breaks_at = most, breaks_at
        self.mask = self._mask()

    def _mask(self) -> np.ndarray:
        parity = len(self.accepted) % 2
        allowed = range(parity, VOCAB_SIZE, 2) if len(self.accepted) < self.most else ()
        return np.array([sum(1 << token for token in allowed)], np.uint32)

    def accept(self, token_id: int) -> bool:
        if len(self.accepted) == self.breaks_at:
            raise ZeroDivisionError("a bug in a constraint")
        assert self.mask[0] >> token_id & 1, "a token that was not allowed"
        self.accepted.append(token_id)
        self.mask = self._mask()
        return bool(self.mask.any())


def request(
    name: str, constraint: Alternating | None, prompt: tuple = (1, 2), **sampling
) -> Request:
    params = SamplingParams(**({"max_tokens": 12} | sampling))
    constraints = () if constraint is None else (constraint,)
    return Request(name, list(prompt), params, constraints=constraints)


def parities(tokens: list[int]) -> list[int]:
    return [token % 2 for token in tokens]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 12])  # 12: some are preempted
def test_every_token_is_allowed_and_neighbours_do_not_notice(overlap, num_blocks):
    def engine():
        return make_engine(overlap=overlap, num_blocks=num_blocks, max_num_seqs=6)

    constraints = {f"c{i}": Alternating() for i in range(3)}
    requests = [
        request(name, constraints.get(name), prompt=(3 + i, 5), seed=i, max_tokens=14)
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
        generate(make_engine(overlap=overlap), request("r", Alternating(), seed=4))[
            "r", 0
        ].token_ids
        for overlap in (True, False)
    ]
    assert tokens[0] == tokens[1]


def test_a_dead_end_is_an_error_of_its_own():
    outcomes = generate(
        make_engine(), request("dead", Alternating(most=5)), request("other", Alternating())
    )
    last = outcomes["dead", 0].last
    assert (last.finish_reason, last.error_code) == ("error", "constraint_failed")
    assert len(outcomes["dead", 0].token_ids) == 5
    assert outcomes["other", 0].last.finish_reason == "length"


def test_a_constraint_that_raises_ends_its_request_alone():
    outcomes = generate(
        make_engine(), request("bug", Alternating(breaks_at=3)), request("other", Alternating())
    )
    assert outcomes["bug", 0].last.error_code == "constraint_failed"
    assert outcomes["other", 0].last.finish_reason == "length"


def test_a_failed_step_does_not_move_a_constraint():
    engine = make_engine(max_num_seqs=2)
    waiting = Alternating()
    runner_of(engine).faults[2] = "fetch"
    requests = [request(f"r{i}", Alternating()) for i in range(2)]
    outcomes = generate(engine, *requests, request("waits", waiting))
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
        make_engine().add_request(request("r", Alternating(), **sampling))
