"""Which groups the policies ask for, given what there is to do."""

from types import SimpleNamespace

import pytest

from shiftjax.fleet.fleet_policy import (
    Demand,
    FleetView,
    GroupView,
    LoadPolicy,
    NeedPolicy,
    Wish,
)
from shiftjax.fleet.switching import Steps, bind_seconds, kind_of_bind
from shiftjax.parallel.arrangements import Arrangement, Change, equal_groups
from shiftjax.parallel.grid import Group

UNITS, WIDTHS = 8, (1, 2, 4, 8)
NEEDS = NeedPolicy(WIDTHS)
LOAD = LoadPolicy(WIDTHS, bind_at=1.0, release_at=4.0, needs=NEEDS)
IDLE = GroupView(0, 0, 0, 0, 0, 0, 100, 16, 1)


def view(
    arrangement: Arrangement, busy: dict[Group, GroupView] | None = None, *queue: Demand
) -> FleetView:
    groups = {group: (busy or {}).get(group, IDLE) for group in arrangement}
    return FleetView(UNITS, arrangement, groups, queue, 0, 0.0)


def running(num: int, *, blocks: int = 1, width: int = 1) -> GroupView:
    return IDLE._replace(num_running=num, num_used_blocks=blocks, needed_width=width)


def test_a_request_that_needs_a_group_gets_one_where_least_runs():
    units = equal_groups(UNITS, 1)
    busy = {Group(u, 1): running(3 if u < 4 else 1) for u in range(UNITS)}
    wish = NEEDS.arrange(view(units, busy, Demand(4, 100, 1)))
    assert wish == Wish((*(Group(u, 1) for u in range(4)), Group(4, 4)), "need")


def test_a_group_that_is_wide_enough_stays():
    groups = (Group(0, 4), *(Group(u, 1) for u in range(4, 8)))
    busy = {Group(0, 4): running(1, width=4)}
    assert NEEDS.arrange(view(groups, busy, Demand(2, 10, 1))) is None


def test_a_group_that_has_been_outgrown_is_bound_where_it_is():
    units = equal_groups(UNITS, 1)
    wish = NEEDS.arrange(view(units, {Group(5, 1): running(1, width=2)}))
    assert wish is not None and Group(4, 2) in wish.arrangement


def test_what_nobody_needs_is_released_as_far_as_nobody_needs_it():
    groups = (Group(0, 4), Group(4, 4))
    busy = {Group(0, 4): running(2, width=2), Group(4, 4): running(9)}
    wish = NEEDS.arrange(view(groups, busy))
    wanted = (Group(0, 2), Group(2, 2), *(Group(u, 1) for u in range(4, 8)))
    assert wish == Wish(wanted, "unneeded")


def test_no_place_is_torn_up_for_another_request_as_wide():
    assert NEEDS.arrange(view((Group(0, 8),), {Group(0, 8): running(1, width=8)})) is None


@pytest.mark.parametrize(
    ("num", "before", "after"),
    [
        (4, equal_groups(UNITS, 1), equal_groups(UNITS, 8)),
        (20, equal_groups(UNITS, 1), None),
        (20, equal_groups(UNITS, 8), None),
        (40, equal_groups(UNITS, 8), equal_groups(UNITS, 1)),
        (4, equal_groups(UNITS, 8), None),
    ],
)
def test_load_binds_when_it_is_quiet_and_releases_when_it_is_not(num, before, after):
    share = {group: running(num // len(before)) for group in before}
    wish = LOAD.arrange(view(before, share))
    assert (wish and wish.arrangement) == after


@pytest.mark.parametrize("where", ["num_running", "num_waiting", "queue"])
@pytest.mark.parametrize(
    ("num", "before", "after"),
    [
        (8, equal_groups(UNITS, 1), equal_groups(UNITS, 8)),  # one a unit: bind_at
        (9, equal_groups(UNITS, 1), None),
        (31, equal_groups(UNITS, 8), None),
        (32, equal_groups(UNITS, 8), equal_groups(UNITS, 1)),  # four a unit: release_at
    ],
)
def test_load_at_its_thresholds(where, num, before, after):
    """The load policy: quiet is TP, busy is DP, and a threshold belongs to the change it is for.

    Sequences count alike whether they run, wait in a group, or wait in front of all of them.
    """
    first, *_ = before
    held = {} if where == "queue" else {first: IDLE._replace(**{where: num}, max_num_seqs=99)}
    queue = [Demand(1, 10, 1)] * (num - 4) + [Demand(1, 10, 4)] if where == "queue" else ()
    wish = LOAD.arrange(view(before, held, *queue))
    assert (wish and wish.arrangement) == after


def test_load_binds_nothing_that_would_not_fit():
    units = equal_groups(UNITS, 1)
    busy = {Group(0, 1): IDLE._replace(num_running=1, num_used_blocks=100)}
    assert LOAD.arrange(view(units, busy)) is not None  # an eighth of the wide group's blocks
    full = {group: IDLE._replace(num_running=1, num_used_blocks=95) for group in units}
    assert LOAD.arrange(view(units, full)) is None


def test_load_keeps_a_group_that_a_request_needs():
    busy = {Group(0, 8): running(40, width=4)}
    wish = LOAD.arrange(view((Group(0, 8),), busy))
    assert wish == Wish(equal_groups(UNITS, 4), "load")


# ------------------------------------------------------------------ kinds of switching

CHANGE = Change(equal_groups(UNITS, 1), (Group(0, 8),))
STEPS = Steps(decode=lambda width, num, context: 0.01, prefill_rate=lambda width: 1e4)


def lanes(num_tokens: int, left: int) -> list:
    sequence = SimpleNamespace(
        num_computed_tokens=num_tokens,
        token_ids=[0] * num_tokens,
        max_length=num_tokens + left,
        request=SimpleNamespace(sampling=SimpleNamespace(max_tokens=left)),
    )
    scheduler = SimpleNamespace(running=[sequence])
    return [SimpleNamespace(group=group, scheduler=scheduler) for group in CHANGE.sources]


def wanting(num_prompt_tokens: int, num_output: int) -> list:
    sampling = SimpleNamespace(n=1, max_tokens=num_output)
    return [SimpleNamespace(prompt_token_ids=[0] * num_prompt_tokens, sampling=sampling)]


@pytest.mark.parametrize(
    ("rate", "left", "output", "kind"),
    [
        (1e9, 500, 100, "move"),  # quick links
        (1e2, 3, 100, "sequential"),  # slow ones, and what runs is nearly done
        (1e2, 500, 2, "hard"),  # slow ones, and what waits is soon done
    ],
)
def test_auto_takes_the_kind_that_all_together_wait_least_for(rate, left, output, kind):
    moves = SimpleNamespace(seconds=lambda num_tokens, ways: num_tokens / rate)
    arguments = CHANGE, lanes(200, left), wanting(50, output), STEPS, moves
    assert kind_of_bind(*arguments) == kind
    seconds = bind_seconds(*arguments)
    assert seconds["move"] == pytest.approx(9 * 200 / rate)
    assert seconds["sequential"] == pytest.approx(left * 0.01)
    assert seconds["hard"] == pytest.approx(8 * (50 / 1e4 + output * 0.01))
