"""The best deployment of every window, in hindsight."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.draft_options import DraftOptions
from shiftjax.options import ConfigError
from shiftjax.sim.experiments import choose_deployments, sweep, target_from
from shiftjax.sim.hindsight import Oracle, best_in_hindsight, oracle_of
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import Replay, RequestRecord, StepRecord
from shiftjax.sim.replay_metrics import summary
from shiftjax.sim.trace import TraceRequest

TARGET = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
MESHES = {"a": "sp8", "b": "dp8", "c": "tp8"}
MODE = next(iter(deploy(TARGET, "sp8").layout.modes))


def replayed(name, arrivals, completions, num_refused=0):
    """Each request, and a step that ends when it comes."""
    deployment = replace(deploy(TARGET, MESHES[name]), name=name)
    requests = [
        RequestRecord(arrival, 0.0, completion, 0.0, completion, 10, 1, 0)
        for arrival, completion in zip(arrivals, completions, strict=True)
    ]
    steps = [StepRecord(arrival, 1.0, 10, 0, MODE) for arrival in arrivals]
    return Replay(deployment, requests, steps, num_refused, 3, 4)


def test_each_window_goes_to_who_was_best_in_it():
    arrivals = [0.0, 1.0, 12.0, 25.0]
    a = replayed("a", arrivals, [1.0, 5.0, 2.0, 9.0])
    b = replayed("b", arrivals, [2.0, 2.0, 3.0, 1.0])
    best = best_in_hindsight([a, b], 10.0)
    assert best.best == {"b": 2, "a": 1}
    assert [r.completion for r in best.requests] == [2.0, 2.0, 2.0, 1.0]
    assert [step.done for step in best.steps] == arrivals
    assert best.deployment.name == "oracle" and best.deployment.dp == 8
    assert summary(best)["best_in_windows"] == "b:2 a:1"


def test_who_refuses_is_best_nowhere():
    whole = replayed("a", [0.0, 1.0], [9.0, 9.0])
    refusing = replayed("b", [0.0], [1.0], num_refused=1)
    best = best_in_hindsight([refusing, whole], 10.0)
    assert best.best == {"a": 1} and best.num_refused == 0


times = st.lists(st.floats(0.0, 50.0), min_size=1, max_size=12).map(sorted)


@settings(deadline=None)
@given(times, st.data())
def test_nobody_who_stays_is_better(arrivals, data):
    each = st.lists(st.floats(0.1, 9.0), min_size=len(arrivals), max_size=len(arrivals))
    replays = [replayed(name, arrivals, data.draw(each)) for name in MESHES]
    best = best_in_hindsight(replays, data.draw(st.floats(0.5, 60.0)))
    means = [summary(one)["completion_mean_seconds"] for one in (best, *replays)]
    assert means[0] <= min(means) + 1e-9
    assert [r.arrival for r in best.requests] == arrivals
    assert sum((best.best or {}).values()) <= len(arrivals)


def test_an_oracle_knows_every_way_to_cut_the_machine():
    found = oracle_of(TARGET).deployments
    meshes = {(each.dp, each.pp, each.sp, each.tp) for each in found}
    sizes = (1, 2, 4, 8)
    whole = {(8 // (sp * tp), 1, sp, tp) for sp in sizes for tp in sizes if sp * tp <= 8}
    assert whole < meshes and any(pp > 1 for _, pp, _, _ in meshes)
    drafts = DraftOptions(speculation="suffix")
    drafting = oracle_of(TARGET, drafts=drafts).deployments
    assert [each.name for each in drafting] == [each.name for each in found]
    assert {each.drafts for each in drafting} == {drafts}
    small = target_from({"model": "llama-70b", "machine": "a10x8", "dtype": "fp8"})
    whole_weights = [d for d in oracle_of(small).deployments if not d.layout.gathers]
    assert whole_weights and all(each.tp * each.pp > 1 for each in whole_weights)  # that fit


def test_a_sweep_compares_an_oracle_with_all_that_was_served(monkeypatch):
    few = Oracle((deploy(TARGET, "dp8"),))
    monkeypatch.setattr("shiftjax.sim.experiments.oracle_of", lambda target, **budgets: few)
    deployments = choose_deployments(TARGET, ["oracle", "tp"])
    trace = [TraceRequest(0.0, 500, 30)] + [TraceRequest(100.0, 8000, 2)] * 16
    tp, oracle = [point.row() for point in sweep(trace, TARGET, deployments, [1.0])]
    assert (tp["name"], oracle["name"]) == ("tp", "oracle")
    assert oracle["best_in_windows"] == "tp:1 dp8:1" and oracle["requests"] == 17
    assert oracle["completion_mean_seconds"] < tp["completion_mean_seconds"]


def test_the_name_is_told_where_another_is_unknown():
    with pytest.raises(ConfigError, match="oracle"):
        choose_deployments(TARGET, ["orcle"])
