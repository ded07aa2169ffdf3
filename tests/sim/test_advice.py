"""The least devices for a load: what is found keeps the limits, and less does not."""

import math
from dataclasses import replace

import pytest

from shiftjax.options import ConfigError
from shiftjax.sim.advice import Goal, Load, advise, even_load, in_words, load_of
from shiftjax.sim.estimate import Workload
from shiftjax.sim.experiments import target_from
from shiftjax.sim.replay import replay
from shiftjax.sim.replay_metrics import summary
from shiftjax.sim.trace import TraceRequest, poisson

SMALL = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
LOAD = even_load(Workload(500, 30))


def target(machine: str, model: str = "llama-8b", num_devices: int = 4):
    whole = target_from({"model": model, "machine": machine, "dtype": "bfloat16"})
    return replace(whole, machine=replace(whole.machine, num_devices=num_devices))


@pytest.fixture(scope="module")
def found():
    goal = Goal(rate=12.0, ttft=1.0, tpot=0.06)
    return advise([target("l4x8"), target("a10x8")], LOAD, goal, {}, **SMALL)


def test_the_best_keeps_the_limits_and_costs_least(found):
    best = found.best
    assert best is not None and best.meets
    row = summary(replay(LOAD.of_one(12.0, best.replicas), best.target, best.deployment))
    assert row["ttft_p90_seconds"] <= 1.0 and row["tpot_p90_seconds"] <= 0.06
    kept = [trial for trial in found.trials if trial.meets]
    assert best.num_devices == min(trial.num_devices for trial in kept)
    if best.replicas > 1:
        row = summary(replay(LOAD.of_one(12.0, best.replicas - 1), best.target, best.deployment))
        assert row["ttft_p90_seconds"] > 1.0 or row["tpot_p90_seconds"] > 0.06
    assert {trial.target.machine.name for trial in found.trials} == {"l4x8", "a10x8"}


def test_the_advice_is_said_in_words(found):
    best, words = found.best, in_words(found, {})
    assert words.startswith(f"Take {best.num_devices} devices of {best.target.machine.name} as ")
    assert f"{best.replicas} x {best.target.machine.num_devices} with --sp" in words
    assert "$" not in words
    prices = {"l4x8": 0.8, "a10x8": 1.2}
    row = best.row(prices)
    assert row["dollars_per_hour"] == pytest.approx(best.num_devices * prices[row["machine"]])
    tokens = best.tokens_per_second * best.replicas * 3600
    assert row["dollars_per_million"] == pytest.approx(row["dollars_per_hour"] / tokens * 1e6)
    assert f"${row['dollars_per_hour']:,.2f} an hour" in in_words(found, prices)


def test_prices_choose_the_machine():
    goal, machines = Goal(12.0, 1.0, 0.06), [target("l4x8"), target("a10x8")]
    for cheap, dear in (("l4x8", "a10x8"), ("a10x8", "l4x8")):
        best = advise(machines, LOAD, goal, {cheap: 0.1, dear: 100.0}, **SMALL).best
        assert best is not None and best.target.machine.name == cheap


@pytest.mark.thorough
def test_more_load_and_tighter_limits_never_need_less():
    def devices(goal: Goal) -> float:
        best = advise([target("a10x8")], LOAD, goal, {}, **SMALL).best
        return best.num_devices if best else math.inf

    usual = devices(Goal(6.0, 1.0, 0.06))
    assert usual <= devices(Goal(24.0, 1.0, 0.06))
    assert usual <= devices(Goal(6.0, 0.3, 0.06))
    assert usual <= devices(Goal(6.0, 1.0, 0.025))


def test_lengths_that_differ_are_those_of_the_load():
    alike, spread = (even_load(Workload(500, 30), cv).of_one(9.0, 3) for cv in (0.0, 0.8))
    assert len(spread) == len(alike) and {r.num_prompt_tokens for r in alike} == {500}
    assert len({r.num_prompt_tokens for r in spread}) > len(spread) / 2


def test_what_cannot_be_is_said_with_a_reason():
    nothing = advise([target("l4x8")], LOAD, Goal(1.0, 1e-4, 1e-4), {}, **SMALL)
    assert nothing.best is None and not nothing.trials
    assert "where a request is alone" in in_words(nothing, {})
    too_large = advise([target("l4x8", "llama-70b")], LOAD, Goal(1.0, 9.0, 9.0), {}, **SMALL)
    assert "has no room for the weights" in in_words(too_large, {})


def test_of_six_devices_powers_of_two_are_tried():
    advice = advise([target("l4x8", num_devices=6)], LOAD, Goal(1.0, 9.0, 9.0), {}, **SMALL)
    tried = {trial.target.machine.num_devices for trial in advice.trials}
    assert advice.best is not None and tried <= {1, 2, 4}
    nothing = advise([target("l4x8", num_devices=6)], LOAD, Goal(1.0, 1e-4, 1e-4), {}, **SMALL)
    assert nothing.best is None and "where a request is alone" in in_words(nothing, {})
    assert {int(where.split()[2]) for where in nothing.reasons} == {1, 2, 4}


@pytest.mark.thorough
def test_a_quick_time_to_the_first_token_needs_wider_groups():
    load = even_load(Workload(4000, 30))

    def width(ttft: float) -> int:
        best = advise([target("h100x8")], load, Goal(2.0, ttft, 0.05), {}).best
        assert best is not None
        return best.deployment.sp * best.deployment.tp

    assert width(5.0) == 1 < width(0.13)


def test_replicas_take_the_requests_of_a_trace_in_turn():
    requests = poisson(4.0, 50.0, 100, 10, seed=1)
    load = load_of(requests)
    assert isinstance(load, Load) and load.mean.num_prompt_tokens == 100
    own_rate = len(requests) / requests[-1].arrival_seconds
    same = load.of_one(own_rate, 2)
    assert [r.arrival_seconds for r in same] == pytest.approx(
        [r.arrival_seconds for r in requests[::2]]
    )
    assert load.of_one(2 * own_rate, 1)[-1].arrival_seconds == pytest.approx(
        requests[-1].arrival_seconds / 2
    )
    with pytest.raises(ConfigError, match="come at once"):
        load_of([TraceRequest(0.0, 1, 1)] * 3)
