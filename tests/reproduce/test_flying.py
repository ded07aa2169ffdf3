"""Flying Serving's evaluation: what is run, and how near it is."""

import pytest

from shiftjax.reproduce import flying
from shiftjax.reproduce.figures import Curve, Figure, Options, count
from shiftjax.reproduce.run import results_of

QUICK = Options(quick=True)


def results(*parts, options=QUICK):
    return list(results_of("flying", options, parts))


def figures_of(*parts, options=QUICK):
    return [each for each in results(*parts, options=options) if isinstance(each, Figure)]


def test_rates_of_the_repository_are_met():
    """Times to the first token of DP at the highest rate are too short, and nothing else is far."""
    found = figures_of("rates")
    assert count(found).compared == 21
    per_token = [each for each in found if "TPOT" in each.what]
    assert count(per_token).fair >= 8
    assert count(per_token).near >= 6
    full = [each for each in found if each.unit == "tokens/s"]
    assert count(full).near == 3
    first = [each for each in found if "TTFT" in each.what]
    assert count(first).fair >= 8


def test_wider_groups_answer_sooner_and_carry_less():
    found = {each.what: each.ours for each in figures_of("widths")}
    kinds = ("4 x TP 1", "2 x TP 2", "TP 4")
    ttft, full = (
        [found[f"Llama-8B, 4 x H200, {what} {kind}"] for kind in kinds]
        for what in ("one stream: TTFT of", "saturated:")
    )
    assert ttft == sorted(ttft, reverse=True)
    assert full == sorted(full, reverse=True)


def test_a_bind_takes_as_long_as_what_it_moves():
    found = {each.what: each.ours for each in figures_of("switches", "contexts")}
    few = found["Llama-70B: live switch"]
    many = found["Llama-70B: bind of four units with 64 sequences"]
    assert 3 < many / few < 4.5
    wide = found["Llama-70B: longest context of a bound fleet, thousands of tokens"]
    one = found["Llama-70B: longest context of 4 x TP 2, thousands of tokens"]
    assert wide == pytest.approx(4 * one, rel=0.05)


def test_in_bursts_a_fleet_carries_what_dp_does():
    by_what = {each.what: each for each in figures_of("bursts")}
    assert abs(by_what["Llama-70B, bursts: peak throughput over DP"].error) < 0.1
    assert abs(by_what["Llama-70B, bursts: peak throughput over Shift"].error) < 0.15
    assert abs(by_what["bursts: P90 TTFT of TP over it, least of the models"].error) < 0.15
    assert by_what["Llama-70B, bursts: changes of groups by load"].ours >= 1


def test_a_curve_has_a_line_for_each_deployment():
    (curve,) = (each for each in results("rates") if isinstance(each, Curve))
    assert {name: len(points) for name, points in curve.lines.items()} == {
        "dp": 3,
        "tp": 3,
        "merged": 3,
    }
    assert curve.lines["dp"][-1][1] > curve.lines["tp"][-1][1]


def test_urgent_requests_are_served_as_by_tp():
    found = {each.what: each for each in figures_of("priorities")}
    assert abs(found["urgent requests: TPOT over that of TP, least of the models"].error) < 0.25
    assert found["with urgent requests: throughput over DP"].ours > 0.85
    assert found["Llama-70B, urgent requests: TPOT of DP over that of the fleet"].ours > 2


def test_dp_keeps_up_with_its_limit():
    assert flying.limit("Llama-70B") == pytest.approx(7.2, rel=0.1)
