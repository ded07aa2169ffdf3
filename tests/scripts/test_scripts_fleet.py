"""The demo of fleets, as far as it can be checked without running it."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import demo_fleet as demo  # noqa: E402

from shiftjax.fleet.stats import Turn  # noqa: E402
from shiftjax.parallel.arrangements import (  # noqa: E402
    Change,
    parse_arrangement,
)


def turn(text: str, num_sequences: int = 0, seconds: float = 0.0) -> Turn:
    groups = parse_arrangement(text, 8, (1, 2, 4, 8))
    return Turn(12.0, groups, "load", "move", num_sequences, 0, seconds, Change((), groups))


@pytest.mark.parametrize(
    ("text", "shown"), [("8", "[0 1 2 3 4 5 6 7]"), ("4+2+1+1", "[0 1 2 3][4 5][6][7]")]
)
def test_the_demo_shows_groups_as_brackets(text, shown):
    assert demo.strip(turn(text).arrangement).plain == shown


def test_the_demo_says_why_and_what_went_along():
    words = demo.change_words(turn("8", 3, 0.0042))
    assert words == "bound (load): 3 running texts moved, 4 ms"
    assert demo.change_words(turn("4+4")).startswith("released (load): nothing ran")
