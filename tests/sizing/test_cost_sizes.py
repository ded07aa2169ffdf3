"""Sizes by costs: what a size is said to take, whose policy says so, and who has such sizes."""

import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest

from shiftjax.core.policies import make_policy
from shiftjax.core.request import Request, SamplingParams
from shiftjax.core.step_sizes import Demand, StepSizes, Turn
from shiftjax.costs.machine_files import load_machine
from shiftjax.costs.step_times import StepKind
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.device.choosers import known_costs
from shiftjax.parallel.grid import Mode
from shiftjax.sim.devices import Clock
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model
from shiftjax.sim.named import Phases, deploy, deploy_named
from shiftjax.sim.replay import replay, serve
from shiftjax.sim.sim_backend import make_engine
from shiftjax.sim.trace import on_off_times, poisson, requests_at
from shiftjax.sizing.cost_sizes import CostSizes, Known, patience_of

TARGET = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
BASE, SHIFT = Mode(8, 8), Mode(8, 1)


def sizes_of(policy="cost", threshold=None, **more):
    deployment = deploy(TARGET, "sp=8,tp=1,policy=cost", **more)
    costs = cost_model(TARGET, deployment)
    chooser = make_policy(policy, threshold, costs)
    return CostSizes(Known(deployment.step_sizes, chooser, costs.layout.modes, costs)), costs


def demand(prompts, num_decodes=64, most=8192, last_mode=None, num_waiting=None, context=64_000):
    waiting = len(prompts) if num_waiting is None else num_waiting
    turn = Turn(1.0, 0, last_mode, True)
    return Demand(turn, num_decodes, context, prompts, 0, 0, waiting, most)


# ------------------------------------------------------------------ what a size takes


@pytest.mark.parametrize("policy", ["base", "shift", "threshold", "cost"])
def test_a_size_takes_what_a_step_takes_in_the_mode_of_the_policy(policy):
    """Of decodes at 1,000 tokens and chunks of new prompts, against the cost model itself."""
    sizes, costs = sizes_of(policy, 512 if policy == "threshold" else None)
    seconds = sizes._seconds(demand([(4000, 0)] * 2), [4000, 8000])
    for i, size in enumerate(sizes.sizes):
        if size <= 64:
            continue
        pairs = (size - 64) * 4000 // 2
        work = Work(size, 65, 65, 64 * 1000, size - 64, pairs, 64)
        modes = {"base": [BASE], "shift": [SHIFT], "threshold": [BASE if size > 512 else SHIFT]}
        taken = [costs.seconds(m, work) for m in modes.get(policy, costs.layout.modes)]
        assert seconds(i, size - 64) == pytest.approx(min(taken), rel=0.03)


def test_a_threshold_is_not_priced_by_the_quicker_mode():
    """Large steps in SHIFT are dear, and not by as much for each token as in BASE."""
    prompts = [
        demand([(n, 0)] * m, num_decodes=d) for n in (700, 1500) for m in (2, 6) for d in (50, 200)
    ]
    base, shift = (
        [sizes_of(name)[0].choose(each) for each in prompts] for name in ("base", "shift")
    )
    seconds = [sizes_of(n)[0]._seconds(prompts[0], [9000])(9, 8000) for n in ("base", "shift")]
    assert seconds[1] > 1.3 * seconds[0]
    assert base != shift


def test_what_waits_after_a_step_is_what_the_policy_will_know():
    """With prompts of 100 and 900 tokens and two more behind them, of which one has begun."""
    sizes, _ = sizes_of()
    seen = demand([(100, 0), (900, 0), (50, 0)])._replace(num_begun=1, num_waiting=7)
    ends = [100, 1000, 1050]
    left = [sizes._num_left(seen, ends, n) for n in (0, 60, 100, 101, 1000, 1001, 1050)]
    assert left == [0, 7, 7, 6, 6, 5, 5]


def test_what_steps_took_corrects_what_sizes_are_said_to_take():
    """The size that was best turns out twice as dear as all others, which stay as they are."""
    sizes, costs = sizes_of()
    some = demand([(1500, 0)] * 6)
    best = sizes.choose(some)
    assert 64 < best < 8192
    for turn in range(400):
        size = sizes.sizes[turn % len(sizes.sizes)]
        work = Work(size, min(size, 65), min(size, 65), 0, 0, 0)
        for mode in costs.layout.modes:
            kind = StepKind(mode, *costs.size_of(work), True)
            sizes.times.learn(kind, 2.0 if size == best else 1.0, 1.0)
    assert sizes.choose(some) != best


def test_steps_that_all_take_twice_as_long_change_no_size():
    sizes, costs = sizes_of()
    demands = [demand([(n, 0)] * m) for n in (100, 900, 4000) for m in (1, 3, 9)]
    before = [sizes.choose(each) for each in demands]
    kind = StepKind(BASE, *costs.size_of(Work.prefill(64)), True)
    for _ in range(20_000):
        sizes.times.learn(kind, 2.0, 1.0)
    assert sizes._seconds(demands[0], [100])(5, 100) > 1.9 * sizes_of()[0]._seconds(
        demands[0], [100]
    )(5, 100)
    assert [sizes.choose(each) for each in demands] == before


def test_an_engine_learns_what_its_steps_take():
    """It believes in memory and products that are twice as fast as they are."""
    machine = TARGET.machine
    rates = {fmt: 2 * rate for fmt, rate in machine.matmul_flops.items()}
    memory = 2 * machine.memory_bytes_per_second
    fast = replace(machine, memory_bytes_per_second=memory, matmul_flops=rates)
    deployment, clock = deploy(TARGET, "cost"), Clock()
    belief = deployment.costs(fast, TARGET.engine)
    engine, _ = make_engine(TARGET, [deployment], clock, belief)
    some = SamplingParams(max_tokens=100, ignore_eos=True)
    trace = enumerate(poisson(5, 20, 1000, 100, 0))
    coming = (Request(str(n), r.prompt(n, 99), some, r.arrival_seconds) for n, r in trace)
    serve(engine, clock, coming)
    sizes = engine.lanes[0].scheduler.sizes
    assert isinstance(sizes, CostSizes)
    work = Work.decode(8, 1000)
    kind = StepKind(SHIFT, *belief.size_of(work), True)
    expected = cost_model(TARGET, deployment).seconds(SHIFT, work) / belief.seconds(SHIFT, work)
    assert expected > 1.1
    assert sizes.times.factor(kind) == pytest.approx(expected, rel=0.03)


def test_decodes_alone_are_learned_from_now_and_then():
    sizes, _ = sizes_of()
    learned = []
    sizes.times.learn = lambda *step: learned.append(step)
    item = SimpleNamespace(start=8, num_tokens=1, num_rows=1)
    for step in range(80):
        plan = SimpleNamespace(scheduled=[item], chunks=[], step_id=step, num_rowwise=1)
        plan.num_guesses, plan.proposing_seconds = 0, 0.0
        sizes.learn_step(plan, SHIFT, 0.01, True)
    assert len(learned) == 10


def test_moving_means():
    sizes, _ = sizes_of()
    assert sizes.rate(5.0) == 0.0  # nothing is known yet
    for number in range(20):
        sizes.arrived(0.5 * number, 1000 if number < 10 else 3000)
    assert sizes.rate(10.0) == 16 / (10.0 - 2.0)
    assert 1000 < sizes.prompt < 2000
    sizes.ended(28)
    assert sizes.answer == pytest.approx(126.0)


def test_patience_is_twice_what_a_prompt_token_takes():
    sizes, costs = sizes_of()
    given = Known(sizes.sizes, make_policy("base", None), costs.layout.modes, costs)
    seconds = costs.mode_seconds(BASE, costs.size_of(Work.prefill(8192)))
    assert patience_of(given) == pytest.approx(2 * seconds / 8192)


# ------------------------------------------------------------------ who has such sizes


def made(text: str, target=TARGET, **more):
    """(patience, sizes of each lane) of an engine on virtual devices."""
    named = deploy_named(target, text, **more)
    deployments = list(named.by_phase.values()) if isinstance(named, Phases) else [named]
    engine, _ = make_engine(target, deployments, Clock())
    return engine.patience, [lane.scheduler.sizes for lane in engine.lanes]


def on(machine="h200x8", engine="shiftjax", model="llama-70b"):
    return target_from({"model": model, "machine": machine, "engine": engine, "dtype": "fp8"})


@pytest.mark.parametrize(
    "name", ["cost", "shift", "base", "dp", "dp=2,sp=4,tp=1,policy=threshold", "pp4tp2"]
)
def test_every_policy_has_sizes_by_cost(name):
    patience, sizes = made(name)
    assert patience > 0 and all(isinstance(each, CostSizes) for each in sizes)
    assert {each.num_groups for each in sizes} == {len(sizes)}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("cost,step_sizes=largest", on()),
        ("pp8:tp8", on()),
        ("cost", on(engine="vllm")),
        ("shift", on("cpu", model="smollm2-135m")),  # nobody says how fast this CPU is
    ],
)
def test_others_have_steps_as_ever(name, target):
    patience, sizes = made(name, target)
    assert patience == 0.0 and {type(each) for each in sizes} == {StepSizes}


def test_a_cpu_whose_costs_are_named_has_sizes_by_them():
    assert made("cost", on("cpu", model="smollm2-135m"))[0] > 0.0
    assert made("shift,machine=cpu", on("cpu", model="smollm2-135m"))[0] > 0.0


def test_a_fleet_has_one_patience_and_sizes_by_width():
    patience, sizes = made("fleet")
    widest, _ = made("fleet:8")
    assert patience == widest
    assert len({each._costs.layout.sp for each in sizes}) == 4


@pytest.mark.parametrize(
    ("kind", "options", "is_known"),
    [
        ("NVIDIA H200", {}, True),
        ("NVIDIA H200", {"sizes_by": "largest"}, False),
        ("cpu", {}, False),
        ("cpu", {"machine": "cpu"}, True),
        ("cpu", {"machine": "h200x8"}, True),
        ("a device that nobody knows", {}, False),
    ],
)
def test_devices_that_are_known_have_costs_for_it(kind, options, is_known):
    deployment: Deployment = replace(deploy(TARGET, "shift,shift_threshold=512"), **options)
    costs = known_costs(deployment, SimpleNamespace(device_kind=kind))
    assert (costs is not None) == is_known
    if costs is not None and "machine" not in options:
        assert costs.machine == load_machine("h200x8")


# ------------------------------------------------------------------ what it brings

TRAFFIC = {
    "chat": (lambda: poisson(20, 10, 600, 200, 0, 1.0), (0.0, 0.03, 0.03)),
    "bursts": (
        lambda: requests_at(on_off_times(1, 12, 30, 10, 30, 0), 4096, 250, 1.0, 0),
        (0.05, 0.0, 0.0),
    ),
    "many": (lambda: poisson(11.5, 12, 4096, 250, 0, 1.0), (0.0, 0.0, 0.0)),
}


@pytest.mark.costs(8)
@pytest.mark.parametrize("policy", ["cost", "shift"])
@pytest.mark.parametrize("name", TRAFFIC)
def test_no_mean_is_worse_than_with_the_largest_steps(name, policy):
    make, gains = TRAFFIC[name]
    runs = [
        replay(make(), TARGET, deploy(TARGET, f"{policy},step_sizes={sizes}")).requests
        for sizes in ("largest", "cost")
    ]
    for column, gain in zip(("ttft", "tpot", "completion"), gains, strict=True):
        before, after = ([v for r in run if (v := getattr(r, column)) is not None] for run in runs)
        assert statistics.mean(after) <= (1 - gain) * statistics.mean(before), column
        last = int(0.99 * len(after))
        assert sorted(after)[last] <= 1.03 * sorted(before)[last], column


@pytest.mark.costs(15)
def test_where_nothing_keeps_up_first_tokens_are_kept():
    """A mixture of experts in an overload: the case that the guard is for."""
    target = on(model="qwen-30b-a3b")
    requests, means = poisson(52, 8, 4096, 250, 0, 1.0), []
    for sizes in ("largest", "cost"):
        run = replay(requests, target, deploy(target, f"dp=2,sp=4,tp=1,cost,step_sizes={sizes}"))
        means.append(statistics.mean(request.ttft for request in run.requests))
    assert means[1] <= means[0]
