"""Servers that could be bought: which there are, and that no closed form leaves out a good one."""

from dataclasses import replace

import pytest

from shiftjax.sim.estimate import Workload
from shiftjax.sim.experiments import target_from
from shiftjax.sim.load import Limits, even_load, load_of
from shiftjax.sim.servers import TPOT_ERROR, all_servers, changed
from shiftjax.sim.trace import TraceRequest
from shiftjax.sim.trials import Trials

LIMITS = Limits(1.0, 0.06)
LOAD = even_load(Workload(500, 30), LIMITS)


def target(machine: str, model: str = "llama-8b", num_devices: int = 4, **formats: str):
    whole = target_from({"model": model, "machine": machine, "dtype": "bfloat16"} | formats)
    return replace(whole, machine=replace(whole.machine, num_devices=num_devices))


def field_of(whole, limits=LIMITS, load=LOAD, is_cache_open=False, **budgets):
    return all_servers([whole], load, limits, is_cache_open, budgets)


def test_of_six_devices_powers_of_two_are_cut_in_every_way():
    found = field_of(target("l4x8", num_devices=6))
    names = {(each.num_devices, each.deployment.name) for each in found.servers}
    assert {n for n, _ in names} <= {1, 2, 4} and {s.most_devices for s in found.servers} == {6}
    left = {tuple(where.split()[:3:2]) for where in found.reasons}
    all_names = names | {(int(n), name) for name, n in left}
    assert all_names == {
        *((4, name) for name in ("sp4", "sp2tp2", "tp4", "pp2sp2", "pp2tp2", "pp4")),
        *((2, name) for name in ("sp2", "tp2", "pp2")),
        (1, "tp1"),
    }


def test_a_cache_that_is_left_open_comes_in_both_formats():
    plain, both = (field_of(target("l4x8"), is_cache_open=each) for each in (False, True))
    assert {s.target.formats.kv for s in plain.servers} == {"bfloat16"}
    assert {(s.target.formats.kv, s.rank) for s in both.servers} == {("bfloat16", 0), ("fp8", 1)}
    assert all(s.deployment.formats.kv == s.target.formats.kv for s in both.servers)
    assert len(both.servers) >= 2 * len(plain.servers)


def test_modes_are_chosen_by_cost_where_no_threshold_is_given():
    free, given = field_of(target("l4x8")), field_of(target("l4x8"), threshold=64)
    assert {s.deployment.policy for s in free.servers if s.deployment.sp > 1} == {"cost"}
    assert {s.deployment.threshold for s in given.servers if s.deployment.sp > 1} == {64}


def test_what_has_no_room_or_is_slow_alone_is_left_out_with_a_reason():
    nothing = field_of(target("l4x8"), Limits(1e-4, 1e-4))
    assert not nothing.servers
    assert all("where a request is alone" in reason for reason in nothing.reasons.values())
    large = field_of(target("l4x8", "llama-70b"), Limits(9.0, 9.0))
    assert not large.servers
    assert any("has no room for the weights" in reason for reason in large.reasons.values())


@pytest.mark.parametrize("name", ["sp4", "tp2", "sp2tp2"])
@pytest.mark.parametrize("ttft", [1.0, 0.4])
def test_no_rate_that_a_replay_keeps_is_out_of_reach(name, ttft):
    limits = Limits(ttft, 0.06)
    servers = {s.deployment.name: s for s in field_of(target("l4x8"), limits).servers}
    server = servers[name]
    trials = Trials(LOAD, limits, 0.0, 9)
    assert not trials.first(server, 1, server.most_load * 1.02).meets
    # and no bound says nothing: something like it is kept
    assert any(trials.first(server, 1, server.most_load * x).meets for x in (0.8, 0.6, 0.4))


@pytest.mark.parametrize(("name", "rate"), [("sp4", 6.0), ("tp4", 3.0), ("tp2", 1.5)])
def test_a_closed_form_comes_near_the_replay(name, rate):
    limits = Limits(9.0, 9.0)
    (server,) = (s for s in field_of(target("l4x8"), limits).servers if s.deployment.name == name)
    ttft, tpot = server.closed.times(rate)
    measured = Trials(LOAD, limits, 0.0, 1).first(server, 1, rate)
    assert tpot / TPOT_ERROR < measured.tpot < tpot * TPOT_ERROR
    assert ttft < measured.ttft
    assert server.closed.times(1e3) == (float("inf"), float("inf"))


def test_what_a_cache_knows_counts_for_the_rate():
    blocks = [(1, 2, 3), (4, 5, 6)]
    known, new = (
        [TraceRequest(n * 0.5, 1536, 10, ids) for n, ids in enumerate(each)]
        for each in (blocks * 20, [(9 * n, 9 * n + 1, 9 * n + 2) for n in range(40)])
    )
    rates = [
        {s.deployment.name: s.most_load for s in field_of(target("l4x8"), load=load_of(t)).servers}
        for t in (known, new)
    ]
    assert all(rates[0][name] > 1.5 * rates[1][name] for name in ("sp4", "tp4"))


def test_settings_change_on_more_devices():
    servers = {s.deployment.name: s for s in field_of(target("l4x8")).servers}
    found = changed(servers["tp2"], {}, {"dp": 2, "max_num_seqs": 32})
    deployment = found.deployment
    assert (deployment.dp, deployment.tp, deployment.max_num_seqs) == (2, 2, 32)
    assert found.num_devices == 4 and deployment.name == "dp2tp2"
    small = changed(servers["tp2"], {}, {"max_num_batched_tokens": 2048})
    assert small.deployment.step_sizes[-1] == 2048  # with the sizes that are compiled


def test_a_fleet_keeps_what_was_changed_before():
    server = {s.deployment.name: s for s in field_of(target("l4x8")).servers}["sp4"]
    for settings in ({"max_num_batched_tokens": 2048, "target_tpot": 0.06}, {"fleet": True}):
        server = changed(server, {}, settings)
    deployment = server.deployment
    assert deployment.name == "fleet:tp1" and deployment.widths == (1, 2, 4)
    assert deployment.max_num_batched_tokens == 2048 and deployment.targets.default.tpot == 0.06
