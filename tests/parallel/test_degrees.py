"""Degrees and pairs of them: read back as they are written, and refused in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.parallel.degrees import Degrees, parse_degrees, parse_phases

degrees = st.builds(Degrees, *[st.integers(1, 1024)] * 4)


@given(degrees, st.permutations(range(4)))
def test_degrees_are_read_back_in_any_order(each, order):
    assert parse_degrees(each.name) == each
    spelled = [f"{name}{number}" for name, number in zip(each._fields, each, strict=True)]
    assert parse_degrees("".join(spelled[i] for i in order)) == each


def test_names():
    assert parse_degrees("dp2pp4sp2tp4") == (2, 4, 2, 4)
    assert parse_degrees("pp8").num_devices == 8
    assert [Degrees().name, Degrees(pp=8).name, Degrees(2, 4, 1, 2).name] == [
        "tp1",
        "pp8",
        "dp2pp4tp2",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "spells no degrees"),
        ("tp", "spells no degrees"),
        ("tp0", "spells no degrees"),
        ("tp-1", "spells no degrees"),
        ("8", "spells no degrees"),
        ("tp8 ", "spells no degrees"),
        ("ep4", "spells no degrees"),
        ("tp2tp4", "spells a degree twice"),
        ("tp1025", "more than 1024"),
    ],
)
def test_what_is_no_degree_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_degrees(text)


def test_pairs():
    assert parse_phases("pp8:tp8") == (Degrees(pp=8), Degrees(tp=8))
    for text, words in (
        ("pp8", "is no pair"),
        ("pp8:tp8:tp8", "spells no degrees"),
        ("pp8:", "spells no degrees"),
        ("pp8:tp4", "pp8 takes 8 devices and tp4 takes 4"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_phases(text)
