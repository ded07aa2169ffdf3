"""What steps took corrects what the next are predicted to take: the means."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.costs.step_times import MOST_SURPRISE, PRIOR_STEPS, StepKind, StepTimes
from shiftjax.parallel.grid import Mode

SHIFT = Mode(2, 1)
KINDS = [StepKind(SHIFT, size, size, False) for size in (8, 16, 32)]


def learned(*steps: tuple[StepKind, float]) -> StepTimes:
    """After steps that took so many times what was predicted."""
    times = StepTimes()
    for kind, ratio in steps:
        times.learn(kind, 0.02 * ratio, 0.02)
    return times


def test_predictions_are_believed_at_first():
    assert StepTimes().factor(KINDS[0]) == 1.0


def test_what_is_known_of_other_kinds_is_believed_of_one_that_was_never_seen():
    """Of a slow machine, but not after a few slow steps of one kind."""
    times = learned(*[(KINDS[0], 1.5)] * 5)
    assert times.factor(KINDS[0]) > 1.2 and 1.0 < times.factor(KINDS[1]) < 1.11
    times = learned(*[(KINDS[0], 1.5)] * 1000)
    assert times.factor(KINDS[0]) == pytest.approx(1.5, rel=0.001)
    assert times.factor(KINDS[1]) == pytest.approx(1.5, rel=0.01)


def test_a_kind_that_is_dearer_than_the_others_is_found_out():
    times = learned(*[(KINDS[0], 1.0), (KINDS[1], 1.6)] * 100)
    cheap, dear, unseen = map(times.factor, KINDS)
    assert cheap == pytest.approx(1.0, abs=0.02) and dear == pytest.approx(1.6, abs=0.03)
    assert unseen == pytest.approx(1.6**0.5, rel=0.03)


def test_a_kind_is_what_it_has_come_to_be():
    times = learned(*[(KINDS[0], 1.0)] * 1000, *[(KINDS[0], 1.8)] * 1000)
    assert times.factor(KINDS[0]) == pytest.approx(1.8, rel=0.02)


def test_what_nobody_sees_any_more_is_forgotten():
    """A few slow steps are not the end of a kind: it comes back to what the others are."""
    dear = [(KINDS[1], 2.0)] * 4
    factors = [
        learned(*[(KINDS[0], 1.0)] * 50, *dear, *[(KINDS[0], 1.0)] * later).factor(KINDS[1])
        for later in (0, 200, 400, 800, 1600)
    ]
    assert factors[0] > 1.35
    assert all(after < before for before, after in pairwise(factors))
    assert factors[-1] == pytest.approx(1.0, abs=0.01)


steps = st.tuples(st.sampled_from(KINDS), st.floats(1e-6, 1e6))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(steps, max_size=30), steps)
def test_no_step_moves_a_factor_far(before, last):
    """However long it took; and factors stay within what was measured."""
    times = learned(*before)
    known = {kind: times.factor(kind) for kind in KINDS}
    kind, ratio = last
    times.learn(kind, ratio, 1.0)
    for each in KINDS:
        moved = times.factor(each) / known[each]
        assert moved * (1 + 1e-9) >= 1 / MOST_SURPRISE and moved <= MOST_SURPRISE * (1 + 1e-9)
    ratios = [1.0, ratio, *(one for _, one in before)]
    assert min(ratios) * (1 - 1e-9) <= times.factor(kind) <= max(ratios) * (1 + 1e-9)


def test_one_slow_step_of_a_kind_is_worth_little():
    usual = [(KINDS[0], 1.0)] * 100
    factor = learned(*usual, (KINDS[1], 1000.0)).factor(KINDS[1])
    assert 1.1 < factor <= MOST_SURPRISE ** (1 / PRIOR_STEPS)


@pytest.mark.parametrize("seconds", [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_what_takes_no_time_teaches_nothing(seconds):
    times = StepTimes()
    times.learn(KINDS[0], *seconds)
    assert times.factor(KINDS[0]) == 1.0
