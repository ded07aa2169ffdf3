"""Experts are stored as whole as that is worth the room of KV that it takes."""

from dataclasses import replace

import pytest

from shiftjax.sim.estimate import Workload, estimate
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.named import deploy
from shiftjax.sim.planning import recommend
from shiftjax.sim.stored_experts import estimate_stored, step_rows, storages

SHORT, LONG = Workload(4096, 250), Workload(30_000, 2000)


def target(model: str = "qwen3-30b-a3b", dtype: str = "bfloat16", **more: str) -> Target:
    return target_from({"model": model, "machine": "h200x8", "dtype": dtype, **more})


def stored_ways(of: Target, degrees: str, workload: Workload) -> int:
    layout = estimate_stored(of, deploy(of, degrees), workload).deployment.layout
    return layout.ways(layout.least_split)


def test_long_requests_want_the_room_that_whole_experts_take():
    """By tokens per second, which the KV cache limits: with whole experts it is 2.6M tokens."""
    of = target()
    whole = deploy(of, "sp=8,tp=1,policy=greedy,experts=1")
    split = deploy(of, "sp=8,tp=1,policy=greedy,experts=8")
    rates = [estimate(of, each, LONG).tokens_per_second for each in (whole, split)]
    assert stored_ways(of, "sp=8,tp=1,policy=greedy", SHORT) == 1
    assert stored_ways(of, "sp=8,tp=1,policy=greedy", LONG) > 1
    assert rates[0] < rates[1]


def test_what_is_as_near_leaves_most_room():
    of = target()
    deployment = deploy(of, "dp=2,sp=4,tp=1,policy=greedy")
    chosen = estimate_stored(of, deployment, SHORT)
    others = [estimate(of, each, SHORT) for each in storages(deployment)]
    assert {one.deployment.layout.experts_sp for one in others} == {4, 2, 1}
    less = [o for o in others if o.memory.num_kv_tokens > chosen.memory.num_kv_tokens]
    assert all(one.tokens_per_second < chosen.tokens_per_second for one in less)


@pytest.mark.parametrize("degrees", ["sp=8,tp=1,experts=whole", "tp=8,sp=1", "fleet"])
def test_what_the_settings_say_is_not_weighed(degrees):
    of = target("qwen3-30b-a3b", "fp8")
    deployment = deploy(of, degrees)
    assert storages(deployment) == [deployment]


def test_a_dense_model_has_nothing_to_store():
    of = target("qwen3-8b")
    deployment = deploy(of, "sp=8,tp=1")
    assert storages(deployment) == [deployment] and step_rows(of, deployment) == []


@pytest.mark.parametrize(
    ("engine", "shorter"), [("shiftjax", 0.21), ("vllm", 0.32)], ids=["shiftjax", "vllm"]
)
def test_a_large_step_is_shorter_than_with_experts_over_all_devices(engine, shorter):
    """8,192 tokens of Qwen3-30B-A3B in FP8, as a group of eight, in its quickest modes."""
    of = target(dtype="fp8", engine=engine)
    rows = step_rows(of, deploy(of, "sp=8,tp=1,policy=cost,experts=1"))
    row = next(row for row in rows if row["step"] == "8,192")
    assert row["experts"] == "whole ones" and row["ms"] < (1 - shorter) * row["ms over all"]
    assert all(row["ms"] <= row["ms over all"] for row in rows)


def test_rows_name_the_experts_that_prices_assume():
    of = target(dtype="fp8")
    deployment = deploy(of, "dp=2,sp=4,tp=1,policy=cost")
    costs = cost_model(of, deployment).stages[0]
    for row in step_rows(of, deployment):
        size = int(row["step"].replace(",", ""))
        (mode,) = (mode for mode in costs.layout.modes if mode.label == row["mode"])
        used = costs.expert_modes.of(mode, size)
        layout = replace(costs.layout, experts_as=used.mode.sp)
        forced = cost_model(of, replace(deployment, layout=layout))
        assert row["ms"] == pytest.approx(1e3 * forced.mode_seconds(mode, (size, 8)))
        assert row["because"] == used.why


def test_a_mesh_with_experts_is_recommended_with_all_modes():
    chosen, _ = recommend(target(dtype="fp8"), SHORT) or (None, "")
    assert chosen is not None and chosen.sp > 1 and chosen.policy == "cost"
    assert chosen.layout.experts_sp == chosen.sp  # whole: they fit four times
