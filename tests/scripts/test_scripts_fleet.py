"""The benchmark of fleets and its demo, as far as they can be checked without measuring."""

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import demo_fleet as demo  # noqa: E402
from cases import fleet as bench  # noqa: E402
from cases.fleet import Wandering, random_requests, share_equal  # noqa: E402

from shiftjax.fleet.fleet_policy import FleetView  # noqa: E402
from shiftjax.fleet.stats import Turn  # noqa: E402
from shiftjax.parallel.arrangements import (  # noqa: E402
    Change,
    check_arrangement,
    equal_groups,
    parse_arrangement,
)


def turn(text: str, num_sequences: int = 0, seconds: float = 0.0) -> Turn:
    groups = parse_arrangement(text, 8, (1, 2, 4, 8))
    return Turn(12.0, groups, "load", "move", num_sequences, 0, seconds, Change((), groups))


def test_a_share_counts_every_token_that_differs_is_missing_or_too_many():
    wanted = {("a", 0): [1, 2, 3, 4], ("b", 0): [5, 6]}
    assert share_equal(wanted, wanted) == 1.0
    assert share_equal(wanted | {("b", 0): [5, 7]}, wanted) == 5 / 6
    assert share_equal({("a", 0): [1, 2, 3]}, wanted) == 3 / 6
    assert share_equal(wanted | {("b", 0): [5, 6, 7, 8]}, wanted) == 6 / 8
    assert share_equal(wanted | {("c", 0): [1, 1]}, wanted) == 6 / 8


def test_random_groups_are_partitions_of_every_width_and_come_again_by_their_seed():
    def wishes(seed: int) -> list:
        policy = Wandering((1, 2, 8), random.Random(seed), share=0.5)
        view = FleetView(8, equal_groups(8, 1), {}, [], 0, 0.0)
        return [policy.arrange(view) for _ in range(60)]

    found = [wish for wish in wishes(3) if wish is not None]
    assert 15 < len(found) < 45 and wishes(3) == wishes(3) != wishes(4)
    for wish in found:
        check_arrangement(wish.arrangement, 8)
    widths = {group.width for wish in found for group in wish.arrangement}
    assert widths == {1, 2, 8}  # never 4


def test_requests_are_made_from_their_seed():
    prompts = [list(request.prompt_token_ids) for request in random_requests(1, 9)]
    assert prompts == [list(request.prompt_token_ids) for request in random_requests(1, 9)]
    assert prompts != [list(request.prompt_token_ids) for request in random_requests(2, 9)]


def test_binds_are_changes_to_fewer_groups_that_something_has_come_along_with():
    turns = [
        turn("1+1+1+1+1+1+1+1"),
        turn("8", 3, 0.5),
        turn("4+4", 3, 0.25),
        turn("8"),
        turn("2+2+2+2", 1, 0.125),
        turn("4+2+2", 2, 1.0),
    ]
    assert bench.bind_seconds(turns) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("text", "shown"), [("8", "[0 1 2 3 4 5 6 7]"), ("4+2+1+1", "[0 1 2 3][4 5][6][7]")]
)
def test_the_demo_shows_groups_as_brackets(text, shown):
    assert demo.strip(turn(text).arrangement).plain == shown


def test_the_demo_says_why_and_what_went_along():
    words = demo.change_words(turn("8", 3, 0.0042))
    assert words == "bound (load): 3 running texts moved, 4 ms"
    assert demo.change_words(turn("4+4")).startswith("released (load): nothing ran")


@pytest.mark.thorough
def test_quick_on_two_units():
    row = bench.quick(seed=2, num_requests=16, units=2)
    assert (row["tokens_equal"], row["compiles_after_warmup"]) == (1.0, 0)
    assert row["moves"] > 0 and row["bind_milliseconds_p50"] > 0
