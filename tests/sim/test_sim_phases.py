"""Phases in the replay: the engine's own switches, copies beside computation, and closed forms."""

from dataclasses import replace
from itertools import pairwise

import pytest

from shiftjax.arch.formats import Formats
from shiftjax.core.request import StepPlan
from shiftjax.costs.machine import Transfer
from shiftjax.host_tier.extents import Offload, Restore
from shiftjax.options import ConfigError
from shiftjax.parallel.degrees import Degrees
from shiftjax.phases.resharding import PHASES
from shiftjax.sim.experiments import choose_deployments, target_from
from shiftjax.sim.host_link import HostLink, Stored
from shiftjax.sim.modelled import reload_of
from shiftjax.sim.named import Phases, deploy, deploy_named
from shiftjax.sim.phase_rates import Batch, phased, rates_of
from shiftjax.sim.replay import replay
from shiftjax.sim.replay_metrics import makespan, phase_shares, phase_spans, summary
from shiftjax.sim.trace import TraceRequest

HOST = 64 * 2**30


def target(engine="vllm"):
    names = {"model": "codellama-34b", "machine": "a10x8", "engine": engine, "dtype": "bfloat16"}
    return target_from(names)


def run(one, name, lengths, host_bytes=HOST, **budgets):
    (deployment,) = choose_deployments(one, [name], host_bytes=host_bytes, **budgets)
    return replay([TraceRequest(0.0, *each) for each in lengths], one, deployment)


def test_a_name_says_both_configurations():
    (phases,) = choose_deployments(target(), ["pp8:tp8"], host_bytes=HOST)
    assert isinstance(phases, Phases) and phases.name == "pp8:tp8"
    meshes = {phase: each.mesh for phase, each in phases.by_phase.items()}
    assert meshes == {"prefill": "dp=1 pp=8 sp=1 tp=1", "decode": "dp=1 sp=1 tp=8"}
    assert [each.parks for each in phases.by_phase.values()] == [True, False]


def test_phases_that_are_modes_are_one_deployment():
    (one,) = choose_deployments(target(), ["sp2tp4:tp8"], host_bytes=HOST)
    assert not isinstance(one, Phases)
    assert (one.mesh, one.policy) == ("dp=1 sp=2 tp=4", "threshold")


@pytest.mark.parametrize(
    ("name", "words"),
    [("pp8:tp4", "make the products equal"), ("pp8:tp", "spells no degrees")],
)
def test_pairs_that_are_none(name, words):
    with pytest.raises(ConfigError, match=words):
        choose_deployments(target(), [name])


def test_half_of_the_hosts_memory_is_the_default():
    one = target()
    phases = deploy_named(one, "pp8:tp8")
    assert {each.host_bytes for each in phases.by_phase.values()} == {384 * 2**30}
    unknown = replace(one, machine=replace(one.machine, host_memory_bytes=0.0))
    with pytest.raises(ConfigError, match="say how much host_memory"):
        deploy_named(unknown, "pp8:tp8")


def test_codes_are_made_of_plain_numbers_at_every_load():
    plain = target()
    fp8 = replace(plain, formats=Formats("fp8"))
    (phases,) = choose_deployments(plain, ["pp8:tp8"], host_bytes=HOST)
    (of_codes,) = choose_deployments(fp8, ["pp8:tp8"], host_bytes=HOST)
    for phase in PHASES:
        loads = [
            reload_of(one, each.by_phase[phase]) for one, each in ((plain, phases), (fp8, of_codes))
        ]
        assert loads[0].device_bytes == loads[1].device_bytes
        assert loads[0].pool_bytes < loads[1].pool_bytes


def test_switches_are_as_few_as_the_host_allows_and_take_what_loading_takes():
    lengths = [(1000, 20)] * 180
    small = 61 * 1000 * 2 * 48 * 8 * 128 * 2  # 60 prompts, in whole blocks
    result = run(target(), "pp8:tp8", lengths, small)
    assert result.phases is not None and len(result.requests) == 180
    switches = result.phases.switches
    assert [each.phase for each in switches] == ["decode", "prefill"] * 2 + ["decode"]
    (phases,) = choose_deployments(target(), ["pp8:tp8"], host_bytes=small)
    assert isinstance(phases, Phases)
    for each in switches:
        load = reload_of(target(), phases.by_phase[each.phase])
        assert each.end - each.begin == pytest.approx(load.seconds, rel=0.05)
        assert each.num_bytes == load.replica_bytes > 67e9
    parked = 180 * 1008 * 2 * 48 * 8 * 128 * 2
    assert parked <= result.phases.num_restored_bytes <= result.phases.num_parked_bytes
    assert result.phases.num_parked_bytes < 1.05 * parked
    row = summary(result)
    assert row["phase_switches"] == 5 and row["weights_moved_bytes"] > 5 * 67e9


def test_time_is_shared_by_phases_and_switches():
    result = run(target(), "pp8:tp8", [(1000, 20)] * 100)
    spans = phase_spans(result)
    assert [name for *_, name in spans] == ["prefill", "switch", "decode"]
    assert spans[0][0] == 0.0 and spans[-1][1] == makespan(result)
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert sum(phase_shares(result).values()) == pytest.approx(1)


@pytest.mark.parametrize("engine", ["vllm", "shiftjax"])
@pytest.mark.parametrize("lengths", [(3000, 200), (250, 320)])
def test_closed_forms_agree_with_the_replay(engine, lengths):
    one, count = target(engine), 200 if lengths[0] > 1000 else 1000
    batch = Batch.of([lengths] * count)
    pair = Degrees(pp=8), Degrees(tp=8)
    result = run(one, "pp8:tp8", [lengths] * count, 2 * HOST)
    rates = [rates_of(one, deploy(one, each.name), batch) for each in pair]
    assert rates[0] is not None and rates[1] is not None
    closed = phased(rates[0], rates[1], batch, 2 * HOST)
    assert closed is not None
    assert closed.seconds == pytest.approx(makespan(result), rel=0.1)


def test_a_switch_waits_for_the_copies_to_the_host():
    one, lengths = target(), [(1000, 20)] * 60
    slowed = replace(one, machine=replace(one.machine, to_host=(Transfer(0.0, 3e8),)))
    quick, late = (run(each, "pp8:tp8", lengths).phases for each in (one, slowed))
    assert quick is not None and late is not None
    crossing = 60 * 1000 * 2 * 6 * 8 * 128 * 2 / 3e8  # a stage's KV
    assert late.switches[0].end > crossing + quick.switches[0].end - quick.switches[0].begin
    lasted = [each.switches[0].end - each.switches[0].begin for each in (quick, late)]
    assert lasted[1] > lasted[0] + 1.0


def test_a_slow_link_from_the_host_holds_decodes_up():
    one, lengths = target(), [(1000, 20)] * 60
    slowed = replace(one, machine=replace(one.machine, from_host=(Transfer(0.0, 3e8),)))
    quick, late = (run(each, "pp8:tp8", lengths) for each in (one, slowed))
    assert quick.phases is not None and late.phases is not None
    assert late.phases.waited_seconds > quick.phases.waited_seconds + 1.0
    decoding = [makespan(each) - each.phases.switches[0].end for each in (quick, late)]
    assert decoding[1] > decoding[0] + 1.0


def link(rate=1e9, latency=0.0, stages=1, most=100):
    ways = (Transfer(latency, rate),)
    machine = replace(target().machine, to_host=ways, from_host=ways)
    return HostLink(machine, [10**8] * stages, most, Stored())  # 0.1 s a block


def plan(offloads=(), restores=(), prefetches=(), dropped=()):
    moves = {"prefetches": list(prefetches), "dropped": list(dropped)}
    return StepPlan([], 0, 0, 0, list(offloads), list(restores), 0, **moves)


def test_copies_follow_each_other_and_the_step_waits_for_its_own():
    line = link()
    assert line.move(plan([Offload(0, [1, 2])]), 0, 1.0, 3.0) == (1.0, 1.0)  # 3.0 to 3.2
    assert line.quiet_at == pytest.approx(3.2)
    line.move(plan([Offload(1, [3])]), 0, 1.0, 3.0)  # 3.2 to 3.3
    now, there = line.move(plan(restores=[Restore(1, [5])]), 0, 1.0, 3.0)
    assert now == 1.0 and there == pytest.approx(3.4)  # it had to come first
    _, there = line.move(plan(restores=[Restore(0, [5, 6])]), 0, 5.0, 5.0)
    assert there == pytest.approx(5.2)


def test_what_has_been_prefetched_is_there():
    line = link()
    line.move(plan([Offload(0, [1, 2])]), 0, 0.0, 0.0)
    line.move(plan(prefetches=[0]), 0, 1.0, 1.0)  # until 1.2
    assert line.move(plan(restores=[Restore(0, [5, 6])]), 0, 2.0, 2.0) == (2.0, 2.0)
    line.move(plan(prefetches=[0]), 0, 3.0, 3.0)
    line.move(plan(), 0, 3.5, 3.5)  # not wanted any more
    _, there = line.move(plan(restores=[Restore(0, [5, 6])]), 0, 4.0, 4.0)
    assert there == pytest.approx(4.2)


def test_few_blocks_are_on_their_way_at_a_time():
    line = link(most=3)
    line.move(plan([Offload(0, [1, 2])]), 0, 0.0, 5.0)  # 5.0 to 5.2
    assert line.move(plan([Offload(1, [3])]), 0, 1.0, 5.0)[0] == 1.0
    assert line.move(plan([Offload(2, [4])]), 0, 1.0, 5.0)[0] == pytest.approx(5.2)


def test_extents_that_are_dropped_are_gone():
    line, dropped = link(), [0]
    line.move(plan([Offload(0, [1])]), 0, 0.0, 0.0)
    given = plan(dropped=dropped)
    given.dropped = dropped
    line.move(given, 0, 1.0, 1.0)
    assert dropped == []  # the runner empties the list
    with pytest.raises(KeyError):
        line.move(plan(restores=[Restore(0, [5])]), 0, 2.0, 2.0)
