"""Fleets in the simulator: what they must share with static deployments, moves, and the policy."""

from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.costs.memory import kv_token_bytes
from shiftjax.fleet.cost_arrangement import LEAST_HOLD_SECONDS, CostArrangement
from shiftjax.fleet.fleet_policy import Demand, FleetView, GroupView
from shiftjax.fleet.handover import Copy, Crossing
from shiftjax.fleet.move_costs import MoveCosts
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.setup import move_costs
from shiftjax.fleet.step_prices import Coming
from shiftjax.options import ConfigError
from shiftjax.parallel.arrangements import Arrangement, FleetOptions, all_groups, possible_widths
from shiftjax.parallel.grid import Group
from shiftjax.reproduce import flying
from shiftjax.sim.devices import Clock, CostMover, Units
from shiftjax.sim.estimate import Workload, fleet_estimate
from shiftjax.sim.experiments import choose_deployments, target_from
from shiftjax.sim.modelled import memory_of
from shiftjax.sim.named import deploy_named, standard_deployments
from shiftjax.sim.planning import fleet_estimates
from shiftjax.sim.replay import FleetRun, Replay, replay
from shiftjax.sim.replay_metrics import arrangements, makespan, queue_by_priority, shares, summary
from shiftjax.sim.sim_backend import make_engine
from shiftjax.sim.trace import TraceRequest, on_off_times, poisson, requests_at

TARGET = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
SMALL = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
OPTIONS = FleetOptions(release_at=2.0)
BURSTS = requests_at(on_off_times(1.0, 20.0, 6.0, 2.0, 12.0), 1024, 60)
DECODES = requests_at(on_off_times(2.0, 60.0, 6.0, 1.5, 9.0), 128, 200)


def fleet(name="fleet", target=TARGET, **settings):
    return deploy_named(target, name, fleet=OPTIONS, **SMALL | settings)


@pytest.fixture(scope="module")
def bursts():
    return replay(BURSTS, TARGET, fleet("fleet:load:move"))


def changes(run: Replay) -> FleetRun:
    assert run.fleet is not None
    return run.fleet


# ------------------------------------------------------------------ as static deployments


@pytest.mark.parametrize(
    ("arrangement", "static"), [("8", "cost"), ("+".join("1" * 8), "dp"), ("8:threshold", "shift")]
)
def test_groups_that_stay_are_a_static_deployment(arrangement, static):
    trace = poisson(6.0, 4.0, 600, 20)
    budgets: dict[str, Any] = SMALL | {"prefix_caching": False}
    fixed = replay(trace, TARGET, deploy_named(TARGET, f"fleet:{arrangement}", **budgets))
    known = replay(trace, TARGET, standard_deployments(TARGET, **budgets)[static])
    assert fixed.requests == known.requests
    assert [step[:4] for step in fixed.steps] == [step[:4] for step in known.steps]


def test_work_begins_when_the_last_unit_of_its_group_is_idle():
    units = Units(4)
    assert units.occupy(Group(1, 1), 1.0, 5.0) == 6.0
    assert units.occupy(Group(0, 2), 0.0, 1.0) == 7.0
    assert units.occupy(Group(0, 1), 0.0, 1.0) == 8.0
    assert units.occupy(Group(2, 2), 2.0, 1.0) == 3.0


# ------------------------------------------------------------------ changes of groups


def test_the_load_policy_binds_in_quiet_times_and_releases_in_bursts(bursts):
    share = shares(bursts)
    assert set(share) == {"8", "1+1+1+1+1+1+1+1"} and min(share.values()) > 0.1
    assert sum(share.values()) == pytest.approx(1.0)
    spans = arrangements(bursts)
    assert spans[0][0] == 0.0 and spans[-1][1] == makespan(bursts)
    row = summary(bursts)
    assert row["binds"] + row["releases"] == len(changes(bursts).turns) > 1
    assert row["moved_sequences"] > 0 and row["moved_bytes"] > 0 and row["preemptions"] == 0
    assert len(bursts.requests) == len(BURSTS)


def test_the_same_trace_gives_the_same_changes(bursts):
    again = replay(BURSTS, TARGET, fleet("fleet:load:move"))
    assert again.requests == bursts.requests and changes(again).turns == changes(bursts).turns


@pytest.mark.parametrize("kind", ["sequential", "soft", "hard"])
def test_all_kinds_of_switching_end_all_requests(kind):
    run = replay(BURSTS, TARGET, fleet(f"fleet:load:{kind}"))
    assert len(run.requests) == len(BURSTS) and len(changes(run).turns) > 1
    assert kind in {turn.kind for turn in changes(run).turns}


def test_the_kind_of_switching_is_chosen_by_cost():
    run = replay(DECODES, TARGET, fleet("fleet:auto"))
    assert len(run.requests) == len(DECODES) and changes(run).turns
    with pytest.raises(ConfigError, match="needs fleet_policy = cost"):
        fleet("fleet:load:auto")


def test_changes_of_a_greedy_fleet_take_no_time():
    run, other = (replay(DECODES, TARGET, fleet(name)) for name in ("fleet:greedy", "fleet"))
    assert changes(run).turns and changes(run).move_seconds == 0.0 < changes(run).num_moved_bytes
    assert changes(other).turns and changes(other).move_seconds > 0.0


def test_a_request_that_fits_no_unit_waits_for_a_wide_group():
    """And is served while short ones are, in groups that are let go afterwards."""
    long = TraceRequest(0.5, 20_000, 20)
    short = [TraceRequest(0.1 * n, 600, 20) for n in range(20)]
    options = replace(fleet().fleet, fleet_policy="context")
    late = TraceRequest(9.0, 600, 20)
    trace = sorted([*short, long, late], key=lambda request: request.arrival_seconds)
    small = deploy_named(TARGET, "fleet", fleet=options, num_blocks=1000, **SMALL)
    run = replay(trace, TARGET, small)
    assert len(run.requests) == 22 and run.num_refused == 0
    assert [max(g.width for g in turn.arrangement) for turn in changes(run).turns] == [2, 1]


def test_queues_are_told_by_class():
    trace = [TraceRequest(0.0, 2000, 40, priority=n % 2) for n in range(80)]
    run = replay(trace, TARGET, fleet("fleet:8"))
    urgent, patient = queue_by_priority(run)
    assert (urgent["priority"], urgent["requests"], patient["requests"]) == (0, 40, 40)
    assert urgent["queue_p50_seconds"] < patient["queue_p50_seconds"]


# ------------------------------------------------------------------ moves


def costs_of(deployment) -> MoveCosts:
    memory = memory_of(TARGET, deployment)
    sized = deployment.with_blocks(memory.num_kv_tokens // deployment.block_size, memory)
    return move_costs(sized, TARGET.machine)


@pytest.mark.parametrize("ways", [2, 8])
def test_bytes_of_a_move_are_those_of_its_calls(ways):
    """Where places are equally full those are the bytes of the tokens, and a call more per gap."""
    deployment = fleet()
    costs, clock, units = costs_of(deployment), Clock(), Units(8)
    mover = CostMover(costs, clock, units, host_seconds=0.25)
    per_call, calls = costs.blocks_per_call(ways), 3
    numbers = iter(range(1, 10_000))
    pairs = [
        (place, tuple(next(numbers) for _ in range(ways)), 5000 + n * ways + place)
        for n in range(calls * per_call)
        for place in range(ways)
    ]
    wide = Group(0, ways)
    mover.move(Crossing(wide, 1, True, pairs))
    tokens = calls * per_call * ways * deployment.block_size  # of one unit
    assert mover.num_bytes == tokens * kv_token_bytes(deployment.layout, deployment.formats)
    assert mover.seconds == pytest.approx(costs.seconds(tokens, ways))
    assert clock.now == 0.25
    assert units.occupy(wide, 0.0, 0.0) == pytest.approx(0.25 + mover.seconds)
    mover.move(Crossing(wide, 1, False, pairs[:1]))
    assert mover.num_bytes == tokens * costs.block_bytes // 16 + costs.call_bytes(ways)


def test_copies_take_memory_time_of_their_group_alone():
    costs, clock, units = costs_of(fleet()), Clock(), Units(8)
    mover = CostMover(costs, clock, units, host_seconds=0.0)
    mover.compact(Copy(Group(4, 2), [(9, 1), (8, 2)]))
    assert mover.num_bytes == 0 and mover.seconds == costs.copy_seconds(2) > 0
    assert units.occupy(Group(4, 1), 0.0, 0.0) == mover.seconds
    assert units.occupy(Group(0, 4), 0.0, 0.0) == 0.0


# ------------------------------------------------------------------ the cost policy

UNITS = 8
WIDTHS = possible_widths(UNITS)


def cost_policy(target=TARGET, **settings) -> CostArrangement:
    engine, _ = make_engine(target, [fleet(target=target, **settings)], Clock())
    policy = engine.topology.find(Fleet) and engine.topology.find(Fleet).policy
    assert isinstance(policy, CostArrangement)
    return policy


POLICY = cost_policy()


def view_of(arrangement: Arrangement, sequences: list[tuple[int, int, int]], now: float):
    """Sequences of (prompt left, context, output), spread evenly over the groups by width."""
    slots = [group for group in arrangement for _ in range(group.width)]
    held = {group: [0, 0, 0, 0, 0] for group in arrangement}
    for number, (left, context, output) in enumerate(sequences):
        mine = held[slots[number % len(slots)]]
        for place, value in enumerate((1, left, context, output, -(-context // 16))):
            mine[place] += value
    groups = {
        group: GroupView(n, 0, left, context, output, blocks // group.width, 18_000, 64, 1)
        for group, (n, left, context, output, blocks) in held.items()
    }
    return FleetView(UNITS, arrangement, groups, [], 0, now, len(sequences))


sequences = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 300, 4000]), st.integers(16, 8000), st.integers(0, 600)),
    min_size=1,
    max_size=64,
)


@settings(max_examples=60, deadline=None)
@given(sequences=sequences, start=st.sampled_from(WIDTHS))
def test_the_cost_policy_hardly_changes_where_nothing_has_changed(sequences, start):
    """Means of groups differ where sequences spread unevenly: it may return, and holds end that."""
    policy = replace(POLICY, _load=type(POLICY._load)(), _held_until={})
    groups = [group for group in all_groups(UNITS, WIDTHS) if group.width == start]
    arrangement, changes = tuple(sorted(groups)), 0
    for turn in range(40):
        wish = policy.arrange(view_of(arrangement, sequences, 0.2 * turn))
        if wish is not None:
            assert wish.arrangement != arrangement
            arrangement, changes = wish.arrangement, changes + 1
    assert changes <= 4


def test_loads_that_come_and_go_do_not_make_it_thrash():
    """Two loads that want other groups, in turn at every look: it stays, longer each time."""
    sums = tuple(way.scaled(2.5, 0.4) for way in TARGET.machine.all_reduce)  # wide groups pay more
    dear = replace(TARGET, machine=replace(TARGET.machine, all_reduce=sums, switch_sum=()))
    policy = cost_policy(dear, step_sizes="largest")
    few, many = [(0, 3000, 10)] * 4, [(0, 500, 100)] * 48
    arrangement, wished = (Group(0, UNITS),), []
    for turn in range(400):
        now = 0.05 * turn
        wish = policy.arrange(view_of(arrangement, (few, many)[turn % 2], now))
        if wish is not None:
            wished.append(now)
            arrangement = wish.arrangement
    gaps = [later - before for before, later in pairwise(wished)]
    assert 1 < len(wished) < 10
    assert min(gaps) >= LEAST_HOLD_SECONDS - 1e-9  # differences of floats
    assert gaps[2] > 2 * gaps[0]


@pytest.mark.parametrize(("queued", "wanted"), [(282, (Group(0, 1), Group(7, 1))), (0, ())])
def test_a_backlog_is_for_the_groups_that_are_done_with_it_first(queued, wanted):
    """Prompts that kept coming would have made one group of 8 the best: here nobody keeps up."""
    budgets = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    policy = cost_policy(flying.target("llama-8b"), **budgets)
    held = GroupView(158, 0, 0, 654_000, 18_600, 5_100, 400_000, 256, 1)
    groups, queue = (Group(0, UNITS),), [Demand(1, 4096, 1)] * min(queued, 256)
    view = FleetView(UNITS, groups, {groups[0]: held}, queue, queued - len(queue), 0.0)
    idle = view._replace(groups={groups[0]: held._replace(num_running=0)}, queue=[], num_unseen=0)
    assert policy.arrange(idle) is None  # nobody is there, and nobody has come
    wish = policy.arrange(view._replace(num_seen=400, now=4.0))
    assert {group for group in wanted} <= set(wish.arrangement if wish else ())
    assert bool(wish) == bool(wanted)


@pytest.mark.parametrize("engine", ["shiftjax", "vllm"])
@pytest.mark.parametrize("rate", [2.0, 40.0])
def test_the_cost_policy_is_near_the_best_groups_that_stay(engine, rate):
    options = {"model": "llama-70b", "machine": "h200x8", "dtype": "fp8", "engine": engine}
    target, trace = target_from(options), poisson(rate, 4.0, 600, 60)
    names = ("fleet:8", "fleet:4+4", "fleet:2+2+2+2", "fleet:" + "+".join("1" * 8), "fleet")
    options = {"max_num_seqs": 64, "step_sizes": "largest"}
    rows = [summary(replay(trace, target, fleet(name, target, **options))) for name in names]
    best = min(row["completion_mean_seconds"] for row in rows[:-1])
    assert rows[-1]["completion_mean_seconds"] <= 1.04 * best


@pytest.mark.parametrize("rate", [2.0, 40.0])
def test_with_sizes_by_cost_every_arrangement_is_quicker(rate):
    """Narrow groups gain most: how much the choice of groups does not foresee."""
    options = {"model": "llama-70b", "machine": "h200x8", "dtype": "fp8", "engine": "shiftjax"}
    target, trace = target_from(options), poisson(rate, 4.0, 600, 60)
    for name in ("fleet:8", "fleet:4+4", "fleet"):
        means = {}
        for sizes in ("largest", "cost"):
            deployment = fleet(name, target, max_num_seqs=64, step_sizes=sizes)
            row = summary(replay(trace, target, deployment))
            means[sizes] = row["completion_mean_seconds"]
        busy = 0.96 if name == "fleet:8" else 0.9  # the largest steps cost a wide group little
        assert means["cost"] <= (busy if rate == 40.0 else 1.0) * means["largest"], name


@pytest.mark.costs(8)
@pytest.mark.parametrize("width", [8, 4, 2])
def test_prices_are_those_of_the_sizes_that_are_chosen(width):
    """Seconds of a token while prompts keep coming: predicted, and of a replay in a steady state.

    With the largest steps there, a token of two groups of 4 is said to take half as long again.
    """
    rate, prompt, output, seconds = 40.0, 600, 60, 5.0
    trace = poisson(rate, seconds, prompt, output)
    run = replay(trace, TARGET, fleet("fleet:" + "+".join([str(width)] * (UNITS // width))))
    inside = [r for r in run.requests if seconds / 4 < r.arrival < seconds - r.completion]
    token, first = (mean(getattr(r, name) for r in inside) for name in ("tpot", "ttft"))
    running = rate * width / UNITS * (mean(r.completion for r in inside) - first)
    coming = Coming(rate, prompt, width / UNITS, float("inf"))
    said = POLICY.steps.token_seconds(width, running, prompt + output / 2, coming)
    assert said == pytest.approx(token, rel=0.15)


def test_decodes_beside_prompts_read_their_contexts():
    """Steps with prompts were priced as if they did not, and narrow groups have many of them."""
    coming, steps = Coming(150.0, 600, 1.0, float("inf")), POLICY.steps  # in every step
    long, short = (steps.token_seconds(1, 64, context, coming) for context in (4096, 1))
    alone = steps.decode_seconds(1, 64, 4096) - steps.decode_seconds(1, 64, 1)
    assert long - short == pytest.approx(alone, rel=0.1) and alone > 0.1 * short


def test_a_fleet_takes_narrow_groups_where_their_steps_are_quicker():
    """It stayed with one group of 8, as the largest steps would have had it."""
    trace, means = poisson(44.0, 4.0, 600, 60), {}
    target = replace(TARGET, machine=replace(TARGET.machine, switch_sum=()))  # that serves 8 alone
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
    for name in ("fleet:8", "fleet"):
        run = replay(trace, target, fleet(name, target, **sizes))
        means[name] = mean(request.completion for request in run.requests)
        widths = {group.width for turn in changes(run).turns for group in turn.arrangement}
    assert 4 in widths and means["fleet"] < 0.97 * means["fleet:8"]


# ------------------------------------------------------------------ names and plans


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fleet:cosst", "did you mean cost"),
        ("fleet:tp3", "cannot be cut"),
        ("fleets", "there are .*fleet"),
    ],
)
def test_other_names_are_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        choose_deployments(TARGET, [name])


def test_an_arrangement_that_cannot_be_is_refused_when_it_is_made():
    with pytest.raises(ConfigError, match="there are 8"):
        make_engine(TARGET, [fleet("fleet:4+2")], Clock())


def test_a_plan_of_fleets_trades_memory_for_reach():
    rows = [one.row() for one in fleet_estimates(TARGET, Workload(4096, 250))]
    assert [(row["tp"], row["widths"]) for row in rows] == [
        (1, "1,2,4,8"),
        (2, "1,2,4"),
        (4, "1,2"),
    ]
    kv = [row["kv_tokens"] for row in rows]
    assert kv == sorted(kv) and rows[0]["tokens_per_second"] > rows[1]["tokens_per_second"]
    assert rows[0]["reach_wide"] == 8 * rows[0]["reach_narrow"] == kv[0]
    regimes = fleet_estimates(TARGET, Workload(4096, 250))[0].regimes
    assert list(regimes) == [8, 4, 2, 1] and list(regimes.values()) == sorted(regimes.values())


def test_what_a_plan_holds_is_what_the_engine_has():
    deployment = fleet()
    plan = fleet_estimate(TARGET, deployment, Workload(600, 60))
    engine, _ = make_engine(TARGET, [deployment], Clock())
    for lane in engine.lanes:
        blocks = lane.scheduler.tables.device
        assert plan.kv_tokens(lane.group.width) == blocks.num_blocks * blocks.block_size


def test_padded_heads_are_told():
    target = target_from({"model": "smollm2-135m", "machine": "h200x8"})
    (first, *_) = fleet_estimates(target, Workload(100, 10))
    assert first.padding == (pytest.approx(16 / 9 - 1), pytest.approx(1 / 3))
    assert first.row()["padded_heads"] == "+78% q, +33% kv"
    assert memory_of(target, first.deployment).weight_bytes > 270e6


def test_groups_of_a_width_choose_modes_by_costs_of_that_width():
    engine, _ = make_engine(TARGET, [fleet()], Clock())
    widths = {lane.group.width: lane.policy.costs.layout.sp for lane in engine.lanes}
    assert widths == {1: 1, 2: 2, 4: 4, 8: 8}
