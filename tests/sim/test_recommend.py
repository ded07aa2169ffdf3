"""Which row of a plan's table is recommended: the best for a goal, else one that none dominates."""

import random
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

from serving.cli.mesh_flags import GOALS as FLAGS
from shiftjax.sim.best_row import GOALS, best_of, distances
from shiftjax.sim.estimate import Estimate, Workload
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target
from shiftjax.sim.named import deploy
from shiftjax.sim.planning import recommend, table_of, with_switch_in_words
from shiftjax.sim.replay import replay
from shiftjax.sim.trace import TraceRequest, arrival_times, on_off_times, requests_at

MODELS = (
    *("llama-8b", "llama-70b", "qwen3-32b", "codellama-34b", "gemma-3-27b", "phi-4"),
    *("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b", "glm-4.5-air"),
)
MACHINES = ("h200x8", "h100x8", "a100x8", "b200x8", "l4x8", "a10x8", "l40sx8", "mi300x8")
SAME = 1e-5  # a row this little better in a column is not better


class Question(NamedTuple):
    """Requests for a target, and the rows of it that have room for them."""

    target: Target
    workload: Workload
    fitting: list[Estimate]


@cache
def questions(count: int, seed: int) -> tuple[Question, ...]:
    """Models, machines, formats and lengths by chance, of which something fits."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        options = {"model": rng.choice(MODELS), "machine": rng.choice(MACHINES)}
        target = target_from(options | {"dtype": rng.choice(("bfloat16", "fp8"))})
        target = replace(target, machine=target.machine.as_run)
        workload = Workload(round(2 ** rng.uniform(6, 14)), round(2 ** rng.uniform(4, 11)))
        if fitting := [one for one in table_of(target, workload) if one.fits]:
            found.append(Question(target, workload, fitting))
    return tuple(found)


def columns(one: Estimate) -> tuple[float, float, float]:
    return one.ttft_seconds, one.tpot_seconds, 1 / one.tokens_per_second


def dominates(one: Estimate, other: Estimate) -> bool:
    pairs = list(zip(columns(one), columns(other), strict=True))
    return all(a <= b * (1 + SAME) for a, b in pairs) and any(a < b * (1 - SAME) for a, b in pairs)


@pytest.mark.costs(15)
def test_no_row_dominates_the_recommended_one():
    behind = []
    for number, (target, workload, table) in enumerate(questions(20, seed=7)):
        best = best_of(table, workload)
        assert best is not None
        assert not [one.deployment.name for one in table if dominates(one, best)]
        most = max(one.tokens_per_second for one in table)
        behind.append(best.tokens_per_second / most)
        if number % 5 == 0:
            chosen, reason = recommend(target, workload) or (None, "")
            degrees = [(d.dp, d.pp, d.sp, d.tp) for d in (chosen, best.deployment) if d is not None]
            assert degrees[0] == degrees[1], reason
            assert best.deployment.name.strip() in reason
    assert sorted(behind)[len(behind) // 2] > 0.7  # of the most tokens per second, at the median


@pytest.mark.parametrize("goal", GOALS)
def test_a_goal_is_the_best_row_of_its_column(goal: str):
    for _, workload, table in questions(3, seed=1):
        best = best_of(table, workload, goal)
        assert best is not None
        costs = {
            "ttft": lambda one: one.ttft_seconds,
            "tpot": lambda one: one.tpot_seconds,
            "latency": lambda one, w=workload: one.alone_seconds(w),
            "throughput": lambda one: 1 / one.tokens_per_second,
        }
        least = min(map(costs[goal], table))
        assert costs[goal](best) == pytest.approx(least, rel=SAME)
        equal = [one for one in table if costs[goal](one) <= least * (1 - SAME)]
        assert not [one for one in equal if dominates(one, best)]


def test_goals_of_the_command_are_those_of_the_table():
    assert set(FLAGS) == set(GOALS)


def test_kernels_that_nobody_has_run_recommend_nothing():
    """With the switch's sums one group of eight would be the nearest to the best."""
    target, workload = (
        target_from({"model": "qwen3-30b-a3b", "machine": "h200x8"}),
        Workload(4096, 250),
    )
    by_switch = best_of(table_of(target, workload), workload)
    chosen, _ = recommend(target, workload) or (None, "")
    assert chosen is not None and by_switch is not None
    assert (chosen.dp, chosen.sp, by_switch.deployment.sp) == (2, 4, 8)
    words = with_switch_in_words(target, chosen, by_switch)
    assert words.startswith("switch: with its sums, as in the table, dp1 sp8 tp1 would be")
    proven = replace(target, machine=replace(target.machine, measured="us"))
    chosen, _ = recommend(proven, workload) or (None, "")
    assert chosen is not None and chosen.sp == 8
    assert with_switch_in_words(proven, chosen, by_switch) == ""


def test_nothing_is_recommended_where_nothing_fits():
    target = target_from({"model": "llama-405b", "machine": "l4x8"})
    assert recommend(target, Workload(1000, 100)) is None
    assert best_of(table_of(target, Workload(1000, 100)), Workload(1000, 100)) is None


def test_a_row_without_room_says_why_and_has_no_times():
    target = target_from({"model": "llama-70b", "machine": "a10x8"})
    rows = {one.deployment.name: one for one in table_of(target, Workload(100_000, 250))}
    crowded, short = rows["dp8 sp1 tp1"].row(), rows["dp1 sp1 tp8"].row()
    assert crowded["fits"] == "no room beside the weights" and crowded["kv_tokens"] == 0
    assert short["fits"] == f"room for {rows['dp1 sp1 tp8'].memory.num_kv_tokens:,} tokens"
    assert {short[name] for name in rows["dp1 sp1 tp8"].times()} == {None}


def mean_completion(requests: list[TraceRequest], target: Target, degrees: str) -> float:
    run = replay(requests, target, deploy(target, f"{degrees},policy=cost"))
    return sum(r.completion for r in run.requests) / len(run.requests)


def in_hindsight(requests: list[TraceRequest], dtype: str, has_switch: bool) -> float:
    """The recommended mesh of Qwen3-30B-A3B over the quickest one of this traffic."""
    target = target_from({"model": "qwen3-30b-a3b", "machine": "h200x8", "dtype": dtype})
    if not has_switch:
        target = replace(target, machine=target.machine.as_run)
    means = {}
    for dp, sp, tp in ((8, 1, 1), (4, 1, 2), (4, 2, 1), (2, 4, 1), (2, 1, 4), (1, 8, 1), (1, 4, 2)):
        means[dp, sp, tp] = mean_completion(requests, target, f"dp={dp},sp={sp},tp={tp}")
    chosen, _ = recommend(target, Workload(4096, 250)) or (None, "")
    assert chosen is not None
    return means[chosen.dp, chosen.sp, chosen.tp] / min(means.values())


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_model_with_experts_is_near_hindsight_in_bursts(dtype: str):
    """Where the switch adds up, too: one group of eight is 15% and 20% behind."""
    bursts = on_off_times(4, 48, 30, 10, 30, seed=0)
    assert in_hindsight(requests_at(bursts, 4096, 250, 1.0, seed=0), dtype, True) < 1.06


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "has_switch", "most"),
    [("bfloat16", False, 1.06), ("fp8", False, 1.06), ("bfloat16", True, 1.13), ("fp8", True, 1.1)],
)
def test_a_model_with_experts_is_near_hindsight_with_code(dtype, has_switch, most):
    """Lengths and rate of Azure's code trace, four times as fast."""
    requests = requests_at(arrival_times(10, 30, cv=2, seed=0), 2048, 28, 1.0, seed=0)
    assert in_hindsight(requests, dtype, has_switch) < most


def test_of_rows_that_are_as_near_the_one_with_most_tokens_is_recommended():
    ((_, workload, table),) = questions(1, seed=7)
    first = table[0]
    slower = replace(first, ttft_seconds=1.03 * first.ttft_seconds)
    more, much_slower = (
        replace(each, tokens_per_second=1.01 * first.tokens_per_second)
        for each in (slower, replace(slower, tpot_seconds=1.1 * first.tpot_seconds))
    )
    assert distances([first, more])[0] < distances([first, more])[1] < 1.02
    assert best_of([first, more], workload) is more
    assert best_of([first, slower], workload) is first
    assert best_of([first, much_slower], workload) is first
