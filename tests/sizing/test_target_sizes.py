"""Sizes for targets: the choice against a reference, what it brings, and what it leaves alone."""

import math
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from shiftjax.config import EngineConfig
from shiftjax.core.policies import make_policy
from shiftjax.core.step_sizes import Demand, Turn
from shiftjax.deploy.resolve import resolve
from shiftjax.sim.devices import Clock
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import replay
from shiftjax.sim.sim_backend import make_engine
from shiftjax.sim.trace import arrival_times, on_off_times, poisson, requests_at
from shiftjax.sizing.cost_sizes import CostSizes, Known
from shiftjax.sizing.drain import SLACK, WEIGHT, Queue, _sized, best_size, size_alone
from shiftjax.sizing.misses import Coming, Steps, num_missed, owed_to
from shiftjax.sizing.target_sizes import (
    FEWEST,
    PRICE,
    Decision,
    TargetSizes,
    TargetStats,
)
from shiftjax.targets import Target, Targets

TARGET = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
TARGETS = Targets(Target(1.0, 0.05))
SIZES = [16 * 2**i for i in range(10)]


def sizes_with(targets=TARGETS, num_groups=1):
    deployment = deploy(TARGET, "sp=8,tp=1,policy=cost")
    costs = cost_model(TARGET, deployment)
    known = Known(SIZES, make_policy("cost", None, costs), costs.layout.modes, costs)
    return TargetSizes(known, targets, num_groups)


def sequence(arrival, first=None, last=0.0, num_tokens=0, priority=0):
    request = SimpleNamespace(arrival_seconds=arrival, priority=priority)
    known = {"first_token_seconds": first, "last_token_seconds": last}
    return SimpleNamespace(request=request, num_output_tokens=num_tokens, **known)


def some(rng: random.Random):
    """(sizes, demand, queue, seconds) of a group at 10 s."""
    sizes = sizes_with()
    sizes.prompt = 1500.0
    gap = rng.choice([0.05, 0.5])
    for number in range(16):
        sizes.arrived(10.0 - gap * (16 - number), 1500)
    lengths = [rng.randrange(50, 6000) for _ in range(rng.randrange(1, 7))]
    prompts = [sequence(10.0 - rng.uniform(0, 1.3)) for _ in lengths]
    decodes = []
    for _ in range(rng.randrange(1, 60)):
        first, num = rng.uniform(6, 10), rng.randrange(1, 60)
        last = rng.uniform(first, 10.0)
        arrival = first - rng.uniform(0.2, 1.1)
        decodes.append(SimpleNamespace(sequence=sequence(arrival, first, last, num)))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    num_more = rng.choice([0, 0, 20])
    turn = Turn(10.0, rng.choice([0, 30]), None, True)
    pairs = [(length, 0) for length in lengths]
    counts = 0, num_more, len(lengths), rng.choice([1000, 8192])
    demand = Demand(turn, len(decodes), 9000, pairs, *counts, prompts, decodes)
    queue = Queue(len(decodes), ends, num_more, 1500 * num_more, 0.5, rng.choice([20.0, 200.0]))
    fixed, each = rng.uniform(5e-3, 2e-2), rng.uniform(5e-6, 3e-5)

    def seconds(i, num_prompt_tokens):
        return fixed + each * SIZES[i] + 1e-6 * num_prompt_tokens

    return sizes, demand, queue, seconds


def reference(sizes, demand, queue, seconds):
    """(the size, whether it is another than without targets): all of them looked at, one by one."""
    d, total = queue.num_decodes, queue.ends[-1] + queue.more_tokens
    alone = seconds(size_alone(SIZES, d), 0)
    top = min(i for i in range(10) if SIZES[i] >= min(d + total, demand.most) or i == 9)
    owed = owed_to(demand.sequences, demand.decodes, TARGETS, 10.0)
    came = [t for t in sizes._arrivals]
    rate = (len(came) + demand.turn.num_queued) / (10.0 - min(came))
    coming = Coming(queue.num_more, rate, 1500.0, queue.answer, seconds(9, SIZES[9]) / SIZES[9])
    costs, kept, missed = {}, [], {}
    for i in (i for i in range(top + 1) if SIZES[i] > d):
        sized = _sized(SIZES, i, queue, seconds, alone)
        bound = _sized(SIZES, top, queue, seconds, alone)
        late = sized.drain <= 1.1 * bound.drain and sized.first <= 1.1 * bound.first
        kept += [i] if late or i == top else []
        p = SIZES[i] - d
        steps = Steps(p, seconds(i, min(p, total)), alone, sized.drain)
        missed[i] = num_missed(owed, np.array(queue.ends, float), coming, steps)
        costs[i] = WEIGHT * sized.first + sized.late
    assert SLACK == 0.1
    usual = min(kept, key=lambda i: costs[i])
    if missed[usual] <= FEWEST:
        return min(demand.most, SIZES[usual]), False
    best = min(costs, key=lambda i: costs[i] + PRICE * missed[i])
    return min(demand.most, SIZES[best]), best != usual


@pytest.mark.parametrize("part", range(3))
def test_the_size_is_that_of_the_reference(part):
    decided = 0
    for seed in range(100 * part, 100 * part + 100):
        sizes, demand, queue, seconds = some(random.Random(seed))
        got = sizes.best(demand, queue, seconds)
        expected, is_other = reference(sizes, demand, queue, seconds)
        assert got == expected, seed
        ((_, reason),) = sizes.told.steps
        assert (reason == "targets") == is_other == (sizes.stats.last is not None)
        decided += is_other
    assert 10 <= decided <= 90


@pytest.mark.parametrize("seed", range(50))
def test_targets_that_none_can_pass_change_nothing(seed):
    sizes, demand, queue, seconds = some(random.Random(seed))
    sizes.targets = Targets(Target(1e5, 1e3))
    assert sizes.best(demand, queue, seconds) == best_size(SIZES, demand.most, queue, seconds)
    assert "targets" not in {reason for _, reason in sizes.told.steps}


def test_a_decode_at_its_limit_makes_steps_small_and_one_without_a_target_does_not():
    """With a prompt of 8,000 tokens that has time."""

    def size_of(priority):
        sizes = sizes_with(Targets(Target(1.0, 0.05), ((1, Target()),)))
        decodes = [SimpleNamespace(sequence=sequence(7, 7.5, 10, 51, priority)) for _ in range(20)]
        prompts = [sequence(10.0, priority=priority)]
        turn = Turn(10.0, 0, None, True)
        demand = Demand(turn, 20, 9000, [(8000, 0)], 0, 0, 1, 8192, prompts, decodes)
        return sizes.choose(demand)

    assert size_of(0) <= 2048 < size_of(1)


def test_an_engine_has_such_sizes_where_a_class_has_a_target():
    kinds = []
    for more in ("", ",target_tpot=0.05", ",targets_by_priority=1:2/0.2", ",step_sizes=largest"):
        engine, _ = make_engine(TARGET, [deploy(TARGET, f"cost{more}")], Clock())
        kinds.append(type(engine.lanes[0].scheduler.sizes))
        found = engine.stats().find(TargetStats)
        assert (found is not None) == (kinds[-1] is TargetSizes)
    assert kinds[:3] == [CostSizes, TargetSizes, TargetSizes]


def test_with_targets_there_are_sizes_between_others():
    found = [deploy(TARGET, f"cost{each}").step_sizes for each in ("", ",target_ttft=1")]
    assert set(found[1]) - set(found[0]) == {768, 1536, 3072, 6144}
    assert set(found[0]) < set(found[1])
    given = deploy(TARGET, "cost,target_ttft=1", token_buckets=(512, 8192))
    assert given.step_sizes == (512, 8192)
    largest = deploy(TARGET, "cost,target_ttft=1,step_sizes=largest")
    assert largest.step_sizes == found[0]  # nobody chooses among more


@pytest.mark.parametrize(
    ("more", "is_chosen"),
    [
        ({}, False),  # that it is a CPU does not say what its steps cost
        ({"machine": "cpu"}, True),
        ({"policy": "cost"}, True),
        ({"shift_threshold": 64}, False),
    ],
)
def test_where_costs_are_unknown_no_size_is_compiled_for_targets(more, is_chosen):
    cpu = target_from({"model": "llama-8b", "machine": "cpu"}).devices
    devices = cpu._replace(total_bytes=80 << 30, free_bytes=80 << 30)
    plain, aimed = (
        resolve(EngineConfig.from_options(**more, **targets), TARGET.model, devices)
        for targets in ({}, {"target_ttft": 1.0})
    )
    assert (aimed.step_sizes != plain.step_sizes) == is_chosen


def test_what_is_told():
    last = Decision(2048, 0.04, 8192, 3.21)
    words = "2,048 tokens: about 0.0 requests would pass their targets, with 8,192 3.2"
    assert (TargetStats() + TargetStats(last)).words == words
    assert TargetStats().words == ""


# ------------------------------------------------------------------ what it brings

TRAFFIC = {  # and how many more, of a hundred, keep to their targets
    "short answers": (lambda: requests_at(arrival_times(16, 15, 2.5, 2), 2048, 28, 1.0, 2), 8),
    "bursts": (lambda: requests_at(on_off_times(1, 12, 30, 10, 30, 7), 4096, 250, 1.0, 7), 0),
    "many": (lambda: poisson(13, 12, 4096, 250, 2, 1.0), 0),
    "chat": (lambda: poisson(20, 8, 600, 200, 0, 1.0), 0),
}


def inside(requests, more=""):
    """How many of a hundred have a first token in 1 s and others in 50 ms."""
    run = replay(requests, TARGET, deploy(TARGET, f"cost{more}")).requests
    return 100 * sum(TARGETS.default.is_met(r.ttft, r.tpot) for r in run) / len(run)


@pytest.mark.costs(8)
@pytest.mark.parametrize("name", TRAFFIC)
def test_more_keep_to_their_targets_and_nowhere_fewer(name):
    make, gain = TRAFFIC[name]
    before, after = (inside(make(), each) for each in ("", ",target_ttft=1,target_tpot=0.05"))
    assert after >= before + gain, (before, after)


def test_a_choice_takes_little_time():
    """With 200 decodes and 32 prompts: about 100 us, and 5 ms on a machine that does much else."""
    sizes = sizes_with()
    decodes = [SimpleNamespace(sequence=sequence(7, 7.5, 10, 51)) for _ in range(200)]
    prompts = [sequence(9.8) for _ in range(32)]
    turn = Turn(10.0, 9, None, True)
    some = Demand(turn, 200, 90_000, [(3000, 0)] * 32, 0, 9, 41, 8192, prompts, decodes)
    took = math.inf
    for _ in range(20):
        begin = time.perf_counter()
        sizes.choose(some)
        took = min(took, time.perf_counter() - begin)
    assert took < 5e-3
