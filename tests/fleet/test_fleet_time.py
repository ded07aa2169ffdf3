"""Changes of groups in virtual seconds: who steps when, who waits for whom, and which units idle.

Tokens are the same whatever becomes of running requests (`test_regrouping.py`); what the kinds of
switching differ in is time. Every step takes a second here, in groups of all widths.
"""

from dataclasses import replace

import pytest
from echo_pools import Told
from time_kit import of_tokens, play_fleet

from shiftjax.fleet.fleet_policy import LoadPolicy, NeedPolicy, Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups, possible_widths
from shiftjax.parallel.grid import Group

UNITS = 4
WIDTHS = possible_widths(UNITS)
ALL = Group(0, UNITS)
FOR_EVER = 1e6

# One on each unit, of 8, 12, 16 and 20 steps: alone it ends after as many seconds.
OLD = [of_tokens(str(number), 8 + 4 * number, prompt=(number, 2, 3)) for number in range(4)]
ALONE = {str(number): 8.0 + 4 * number for number in range(4)}


def wide(name: str = "wide", num: int = 20, arrival: float = 2.5):
    """A request for a group of all units; others' steps end half a second after it has come."""
    return replace(of_tokens(name, num, arrival, prompt=(7, 7)), min_width=UNITS)


def play(*requests, switch: str, max_pause_seconds: float = FOR_EVER, **options):
    fleet = {"switch": switch, "max_pause_seconds": max_pause_seconds}
    return play_fleet(requests, policy=NeedPolicy(WIDTHS), units=UNITS, fleet=fleet, **options)


# ------------------------------------------------------------------ kinds of switching


@pytest.mark.parametrize(
    ("switch", "begin", "delay", "num_moved"),
    [
        ("move", 3.0, 0.0, 4),  # all go along
        ("sequential", 20.0, 0.0, 0),  # when the longest has ended
        ("soft", 8.0, 0.0, 1),  # on the first unit that is idle; it is moved when all are
        ("hard", 3.0, 20.0, 0),  # the others pause for as long as it takes
    ],
)
def test_each_kind_of_switching_makes_nobody_wait_but_those_it_says(
    switch, begin, delay, num_moved
):
    """Live moves, sequential switching, soft preemption and hard preemption, by the clock."""
    played = play(*OLD, wide(), switch=switch)
    assert (played.begins["wide"], played.ends["wide"]) == (begin, begin + 20)
    assert {n: played.ends[n] - alone for n, alone in ALONE.items()} == dict.fromkeys(ALONE, delay)
    stats = played.engine.topology.find(Fleet).stats
    assert (stats.num_moved_sequences, stats.num_recomputed_sequences) == (num_moved, 0)
    assert bool(stats.moved_blocks["bind"]) == bool(num_moved)
    assert stats.paused_seconds == 4 * delay
    (bind,) = [turn for turn in played.engine.topology.find(Fleet).history if turn.change.is_bind]
    assert bind.kind == switch


def test_the_devices_of_groups_that_leave_idle_in_sequential_switching_and_not_in_soft():
    """Soft preemption: idle engines start the request of the wide group at once, under DP."""
    spans = {switch: play(*OLD, wide(), switch=switch).spans for switch in ("soft", "sequential")}
    units = range(UNITS)
    idle = {
        switch: sum(20 - sum(s.is_on(unit) for s in of if s.end <= 20) for unit in units)
        for switch, of in spans.items()
    }
    assert idle == {"sequential": 12 + 8 + 4, "soft": 8 + 4}
    assert {span.group.width for span in spans["soft"] if span.end <= 20} == {1}


def test_soft_waits_for_those_that_give_way_and_not_for_whom_it_has_begun():
    """Soft preemption of two: the group is for both, so neither has to end before it opens."""
    played = play(*OLD, wide(), wide("other", 22, 2.6), switch="soft")
    assert (played.begins["wide"], played.begins["other"]) == (8.0, 12.0)
    (bind,) = [turn for turn in played.engine.topology.find(Fleet).history if turn.change.is_bind]
    assert (bind.seconds, bind.num_sequences, bind.num_recomputed) == (20.0, 2, 0)
    assert max(played.gaps("wide")) == max(played.gaps("other")) == 0.0
    assert {n: played.ends[n] for n in ALONE} == ALONE


def test_soft_moves_nobody_for_a_request_that_has_ended_meanwhile():
    """Soft preemption: what runs in the other groups is finished there."""
    played = play(*OLD, wide(num=3), switch="soft")
    assert played.ends == ALONE | {"wide": 11.0}
    assert played.engine.topology.find(Fleet).stats.num_moved_sequences == 0


@pytest.mark.parametrize("switch", ["sequential", "soft", "hard"])
def test_only_the_units_concerned_notice_a_bind(switch):
    """A group of 4 of 8 units is bound; steps of the other units follow each other as ever."""
    policy = NeedPolicy(possible_widths(8), frozenset([-1]), bind_width=4)
    old = [of_tokens(str(n), 12 + n % 4, prompt=(n, 2)) for n in range(8)]
    old.append(of_tokens("more", 12, prompt=(8, 2)))  # a second one on a unit of the first half
    first = of_tokens("first", 10, 2.5, priority=-1)
    late = of_tokens("late", 4, 5.5)
    played = play_fleet(
        [*old, first, late],
        units=8,
        policy=policy,
        fleet={"switch": switch, "max_pause_seconds": FOR_EVER},
    )
    bind = played.engine.topology.find(Fleet).history[0]
    assert bind.change.wide == Group(4, 4)  # where least was to do
    others = [n for n in (*map(str, range(8)), "more") if played.of(n)[0].group.first < 4]
    assert len(others) == 5 and all(max(played.gaps(name)) == 0.0 for name in others)
    # What comes meanwhile has to wait for none of them.
    assert played.begins["late"] == 6.0
    assert played.begins["first"] == {"hard": 3.0, "sequential": 15.0, "soft": 12.0}[switch]


@pytest.mark.parametrize(("switch", "begin"), [("sequential", 20.0), ("soft", 8.0)])
def test_the_wide_group_opens_as_soon_whatever_comes_meanwhile(switch, begin):
    """Sequential switching and soft preemption: groups that give way take no others to finish."""
    late = [of_tokens(f"late{n}", 15, 3.5 + n) for n in range(10)]
    played = play(*OLD, wide(), *late, switch=switch, max_num_seqs=16)
    (bind,) = [turn for turn in played.engine.topology.find(Fleet).history if turn.change.is_bind]
    assert (played.begins["wide"], bind.seconds) == (begin, 20.0)
    assert {n: played.ends[n] for n in ALONE} == ALONE
    assert all(played.begins[each.request_id] >= begin for each in late)


# ------------------------------------------------------------------ pauses


def test_what_pauses_goes_on_when_the_wide_group_has_nothing_left_to_do():
    """Hard preemption: without being told so by the policy, and in the very next step."""
    told = Told()
    told.wishes = [Wish(equal_groups(UNITS, 1), "told")] * 3 + [Wish((ALL,), "told", "hard")]
    fleet = {"max_pause_seconds": FOR_EVER}
    played = play_fleet([*OLD, wide(num=7)], units=UNITS, policy=told, fleet=fleet)
    assert [(turn.seconds, turn.reason) for turn in played.engine.topology.find(Fleet).history] == [
        (3.0, "told"),
        (10.0, "done"),
    ]
    assert {max(played.gaps(name)) for name in ALONE} == {7.0}


@pytest.mark.parametrize("max_pause", [1.0, 5.0, 11.0])
def test_paused_groups_take_turns_with_the_one_that_has_their_devices(max_pause):
    """Hard preemption: work of DP pauses, and nobody pauses longer than the setting says."""
    played = play(*OLD, wide(num=60), switch="hard", max_pause_seconds=max_pause)
    for name in ALONE:
        # Once for the pause and the wide group's step that has just begun, then for one step each.
        assert sorted(set(played.gaps(name))) == [0.0, 1.0, max_pause + 1]
    shared = [span for span in played.spans if 3 + max_pause <= span.begin < played.ends["3"]]
    widths = [span.group.width for span in shared if span.is_on(3)]
    assert widths == [4, 1] * 17  # of 20 steps three had been made
    assert max(played.gaps("wide")) == 1.0
    stats = played.engine.topology.find(Fleet).stats
    assert stats.paused_seconds == 4 * max_pause
    assert (stats.num_moved_sequences, stats.num_recomputed_sequences) == (0, 0)
    assert played.engine.stats().num_preemptions == {"recompute": 0, "swap": 0}


@pytest.mark.parametrize("switch", ["sequential", "soft"])
def test_nobody_waits_longer_than_the_longest_pause_for_others_to_give_way(switch):
    """Sequential switching and soft preemption become hard preemption then."""
    long = [of_tokens(str(number), 30, prompt=(number, 2, 3)) for number in range(4)]
    played = play(*long, wide(num=4), switch=switch, max_pause_seconds=6.0)
    assert played.begins["wide"] == 3.0 + 6.0  # it was seen at 3
    assert played.ends["wide"] == 13.0
    assert {max(played.gaps(str(n))) for n in range(4)} == {4.0}
    assert [turn.kind for turn in played.engine.topology.find(Fleet).history] == ["hard", "move"]


def test_what_has_begun_early_does_not_pause_for_the_group_that_it_is_for():
    """Soft preemption that becomes hard: it goes along, and those that have not finished pause."""
    old = [of_tokens(str(n), 8 if n == 0 else 30, prompt=(n, 2, 3)) for n in range(4)]
    played = play(*old, wide(num=12), switch="soft", max_pause_seconds=10.0)
    assert (played.begins["wide"], played.ends["wide"]) == (8.0, 20.0)
    bind, release = played.engine.topology.find(Fleet).history
    assert (bind.seconds, bind.kind, bind.num_sequences) == (13.0, "hard", 1)
    assert (release.seconds, release.change.is_bind) == (20.0, False)
    assert [max(played.gaps(str(n))) for n in range(4)] == [0.0, 7.0, 7.0, 7.0]
    assert played.engine.topology.find(Fleet).stats.num_recomputed_sequences == 0


# ------------------------------------------------------------------ moves


def test_where_a_wide_group_has_too_few_rows_the_youngest_waits():
    """Live moves: the oldest go on without a pause, and what is left out follows when one ends."""
    told = Told()
    told.wishes = [Wish(equal_groups(UNITS, 1), "told")] * 3 + [Wish((ALL,), "told")]
    old = [of_tokens(str(n), 8 + n, prompt=(n, 2, 3)) for n in range(4)]
    played = play_fleet(old, units=UNITS, policy=told, max_num_seqs=3)
    (bind,) = played.engine.topology.find(Fleet).history
    assert (bind.seconds, bind.num_sequences, bind.num_recomputed) == (3.0, 3, 1)
    assert [max(played.gaps(str(n))) for n in range(4)] == [0.0, 0.0, 0.0, 5.0]
    assert played.ends == {"0": 8.0, "1": 9.0, "2": 10.0, "3": 11.0 + 5.0}


# ------------------------------------------------------------------ load


def test_load_that_swings_between_the_thresholds_changes_no_groups():
    """The load policy: TP when it is quiet, DP when it is busy, and as it is in between."""
    always = [of_tokens(f"a{n}", 60) for n in range(4)]  # 1 per unit: bind
    some = [of_tokens(f"b{n}", 5, 10.5) for n in range(3)]
    many = [of_tokens(f"c{n}", 10 + 2 * n, 20.5) for n in range(4)]  # 2 per unit: release
    policy = LoadPolicy(WIDTHS, bind_at=1.0, release_at=2.0, needs=NeedPolicy(WIDTHS))
    played = play_fleet([*always, *some, *many], units=UNITS, policy=policy, max_num_seqs=16)
    turns = [(turn.seconds, turn.reason) for turn in played.engine.topology.find(Fleet).history]
    # The last of the four ends at 37; before that there are 7, 6 and 5: units stay as they are.
    assert turns == [(0.0, "quiet"), (21.0, "load"), (37.0, "quiet")]
    assert all(max(played.gaps(f"a{n}")) == 0.0 for n in range(4))
