"""What is learned of drafts: true rates, sequences that differ, and traffic that changes."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.core.proposal import Claims
from shiftjax.drafts.acceptance import Acceptance, Record

steady = settings(deadline=None, derandomize=True)

RATES = {  # source, match, claim -> how often such a token is kept in truth
    ("own", 2, 0.5): 0.9,
    ("own", 2, 1.0): 0.7,
    ("own", 16, 1.0): 0.95,
    ("corpus", 2, 0.5): 0.1,
}


def teach(table, claims, rate, times, record=None, seed=0):
    rng = random.Random(seed)
    for _ in range(times):
        accepted, num = 0, len(claims.values)
        while accepted < num and rng.random() < rate:
            accepted += 1
        table.learn(claims, record or Record(), num, accepted)


def test_before_anything_is_learned_a_claim_is_believed():
    claims = Claims("model", 0, [1.0, 0.5, 0.5])
    assert Acceptance().survivals(claims, Record()) == [1.0, 0.5, 0.25]


def test_what_is_copied_is_believed_by_the_length_of_its_match():
    firsts = [Acceptance().survivals(Claims("own", n, [1.0]), Record())[0] for n in (1, 2, 6, 30)]
    assert firsts == pytest.approx([1 / 3, 1 / 2, 3 / 4, 30 / 32])
    pair = Acceptance().survivals(Claims("own", 2, [1.0, 0.5]), Record())
    assert pair == pytest.approx([1 / 2, 1 / 8])


def test_rates_are_learned_apart():
    table = Acceptance()
    for (source, match, claim), rate in RATES.items():
        teach(table, Claims(source, match, [claim] * 4), rate, 2000)
    for (source, match, claim), rate in RATES.items():
        first, second = table.survivals(Claims(source, match, [claim] * 2), Record())
        assert first == pytest.approx(rate, abs=0.05)
        assert second == pytest.approx(rate**2, abs=0.08)


def test_traffic_that_changes_is_followed():
    table, claims = Acceptance(), Claims("own", 4, [1.0])
    teach(table, claims, 0.9, 5000)
    teach(table, claims, 0.2, 3000)
    assert table.survivals(claims, Record())[0] == pytest.approx(0.25, abs=0.06)


def test_what_is_not_tried_is_believed_again():
    table, record, claims = Acceptance(), Record(), Claims("own", 6, [0.8])
    teach(table, claims, 0.0, 4, record)
    (unlucky,) = table.survivals(claims, record)
    assert unlucky < 0.5
    for _ in range(20):
        table.fade([record])
    assert table.survivals(claims, record) == pytest.approx([0.6], abs=0.01)


def test_only_outcomes_that_are_known_count():
    """Behind a rejected token, and beyond what was offered, nothing was tried."""
    short, long = Acceptance(), Acceptance()
    short.learn(Claims("own", 4, [1.0, 0.5]), Record(), 2, 1)
    long.learn(Claims("own", 4, [1.0, 0.5, 0.3, 0.3]), Record(), 4, 1)
    assert short._cells == long._cells
    cut = Acceptance()
    cut.learn(Claims("own", 4, [1.0, 0.5, 0.5]), Record(), 1, 1)
    assert list(cut._cells.values()) == [(1.0, 1.0)]
    nothing = Acceptance()
    nothing.learn(Claims("own", 4, [1.0]), Record(), 0, 0)
    assert nothing._cells == {}


def test_a_sequence_that_differs_has_a_factor_of_its_own():
    table, claims = Acceptance(), Claims("own", 4, [1.0] * 3)
    good, bad = Record(), Record()
    for round_ in range(300):
        teach(table, claims, 0.9, 1, good, seed=2 * round_)
        teach(table, claims, 0.3, 1, bad, seed=2 * round_ + 1)
    assert good.factor > 1.05 and bad.factor < 0.7
    assert table.survivals(claims, good)[0] > table.survivals(claims, Record())[0]
    assert table.survivals(claims, bad)[0] < table.survivals(claims, Record())[0]


def test_a_record_is_that_of_the_last_drafts():
    table, claims, record = Acceptance(), Claims("own", 4, [1.0] * 3), Record()
    teach(table, claims, 0.5, 3000)
    teach(table, claims, 0.0, 100, record)
    assert record.factor < 0.5
    teach(table, claims, 0.5, 40, record)
    assert 0.75 < record.factor < 1.4


@steady
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 70), st.integers(0, 5)), max_size=20),
    st.lists(st.floats(0, 1), max_size=16),
)
def test_survivals_are_probabilities_that_fall(lessons, values):
    table, record = Acceptance(), Record()
    for claim, match, accepted in lessons:
        table.learn(Claims("own", match, [claim] * 5), record, 5, accepted)
    survivals = table.survivals(Claims("own", 4, values), record)
    assert len(survivals) == len(values)
    assert all(0 <= late <= early <= 1 for early, late in pairwise([1.0, *survivals]))
