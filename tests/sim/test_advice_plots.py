"""Plots of an advice: shares inside the limits by rate, what was tried."""

import pytest
from test_servers import LIMITS, LOAD, field_of, target

from shiftjax.sim.advice import Advice, Question
from shiftjax.sim.advice_plots import FACTORS, curve_rows, pareto, slo_curve
from shiftjax.sim.servers import changed
from shiftjax.sim.trials import Trials


@pytest.fixture(scope="module")
def advice():
    field = field_of(target("l4x8"))
    servers = {s.deployment.name: s for s in field.servers}
    trials = Trials(LOAD, LIMITS, 0.0, 99)
    best, *_ = (
        trials.first(servers[name], num, 10.0)
        for name, num in (("sp4", 1), ("tp4", 2), ("sp2tp2", 1))
    )
    return Advice(Question(10.0), trials, best, field, 0, True)


@pytest.fixture(scope="module")
def rows(advice):
    return curve_rows(advice)


def test_more_load_leaves_fewer_inside(rows):
    names = list(dict.fromkeys(row["name"] for row in rows))
    assert names == ["1 x sp4, KV bfloat16", "1 x sp2tp2, KV bfloat16"]  # on as many devices
    own = [row for row in rows if row["name"] == names[0]]
    assert [row["rate"] for row in own] == [10.0 * factor for factor in FACTORS]
    assert own[0]["inside"] > own[-1]["inside"] and own[-1]["tpot_seconds"] > LIMITS.tpot
    assert all(0 <= row["inside"] <= 1 for row in rows)


def test_nothing_has_no_curve():
    field = field_of(target("l4x8"))
    nothing = Advice(Question(9.0), Trials(LOAD, LIMITS, 0.0, 9), None, field, 0, True)
    assert curve_rows(nothing) == []


def test_the_curve_says_what_was_planned(advice, rows):
    (axes,) = slo_curve(advice, rows).axes
    legend = axes.get_legend()
    assert legend is not None
    words = [text.get_text() for text in legend.get_texts()]
    names = dict.fromkeys(row["name"].replace(", ", "\n") for row in rows)
    assert words == [*names, "planned: 10 requests/s", "90%"]


def test_what_keeps_the_limits_is_filled_and_named(advice):
    (axes,) = pareto(advice.trials.all).axes
    kept = [trial.deployment.name for trial in advice.trials.all if trial.meets]
    assert sorted(text.get_text() for text in axes.texts) == sorted(kept) and kept
    assert len(axes.lines) == 1 + len(kept)


@pytest.mark.costs(12)
def test_a_change_is_compared_with_what_it_changed(advice):
    servers = {s.deployment.name: s for s in advice.field.servers}
    only = advice.field._replace(servers=[servers["sp4"]])
    aimed = changed(servers["sp4"], {}, {"target_tpot": 0.06})
    best = advice.best._replace(server=aimed, changed="with a target")
    rows = curve_rows(advice._replace(best=best, field=only))
    assert list(dict.fromkeys(row["name"] for row in rows)) == [
        "1 x sp4, KV bfloat16, with a target",
        "1 x sp4, KV bfloat16",
    ]
