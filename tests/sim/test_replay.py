"""Replays on virtual clocks: against times worked out by hand, and what must always hold."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from shiftjax.arch.formats import Formats
from shiftjax.costs.machine import Transfer
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.work import Work
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.sim.experiments import saturation_rate
from shiftjax.sim.modelled import Target, cost_model, least_tp, memory_of
from shiftjax.sim.models import find_model
from shiftjax.sim.named import standard_deployments
from shiftjax.sim.replay import Replay, StepRecord, replay
from shiftjax.sim.replay_metrics import (
    longest_mode,
    peak_throughput,
    summary,
    throughput_over_time,
)
from shiftjax.sim.trace import TraceRequest, arrival_times, poisson, requests_at, scale_rate


def target(engine="vllm", model="llama-70b", machine="h200x8"):
    formats = Formats("fp8", "fp8")
    return Target(find_model(model), load_machine(machine), load_engine(engine).offline, formats)


VLLM = target()
DEPLOYMENTS = standard_deployments(VLLM)
NAMES = list(DEPLOYMENTS)


def test_one_request_takes_its_steps_one_after_the_other():
    deployment = DEPLOYMENTS["tp"]
    result = replay([TraceRequest(2.0, 100, 4)], VLLM, deployment)
    costs = cost_model(VLLM, deployment)
    prefill = costs.seconds(costs.layout.base, Work.prefill(100))
    decodes = [costs.seconds(costs.layout.base, Work.decode(1, 101 + n)) for n in range(3)]
    (request,) = result.requests
    assert request.queue == 0.0
    assert request.ttft == pytest.approx(prefill)
    assert request.tpot == pytest.approx(sum(decodes) / 3)
    assert request.completion == pytest.approx(prefill + sum(decodes))
    assert result.steps[-1].done == pytest.approx(2.0 + prefill + sum(decodes))


def test_a_host_that_overlaps_is_hidden_behind_the_devices():
    engine = replace(VLLM.engine, overlaps=True)
    deployment, hidden = DEPLOYMENTS["tp"], replace(VLLM, engine=engine)
    request = [TraceRequest(0.0, 100, 50)]
    costs = cost_model(hidden, deployment)
    work = Work.decode(1, 125)
    step = max(costs.device_seconds(costs.layout.base, work), costs.host_seconds(work))
    (one,) = replay(request, hidden, deployment).requests
    assert one.tpot == pytest.approx(step, rel=0.02)
    (other,) = replay(request, VLLM, deployment).requests
    assert one.tpot and other.tpot and one.tpot < other.tpot


@pytest.mark.parametrize("name", NAMES)
def test_every_request_ends_and_every_token_is_counted(name):
    trace = requests_at(arrival_times(3.0, 20.0, 3.0, seed=2), 600, 40)
    result = replay(trace, VLLM, DEPLOYMENTS[name])
    assert len(result.requests) == len(trace) and result.num_refused == 0
    computed = sum(step.num_tokens for step in result.steps)
    # The last token of a request is never computed.
    assert computed == len(trace) * (600 + 39)
    assert sum(s.num_tokens for s in result.steps if s.mode.sp > 1) + sum(
        s.num_tokens for s in result.steps if s.mode.sp == 1
    ) == pytest.approx(computed)
    for request in result.requests:
        assert 0 <= request.queue <= request.ttft <= request.completion


def test_steps_never_overlap_on_a_replica():
    trace = poisson(3.0, 10.0, 600, 20)
    steps = replay(trace, VLLM, DEPLOYMENTS["shift"]).steps
    starts = [step.done - step.device_seconds for step in steps]
    assert all(b >= a.done - 1e-9 for a, b in zip(steps, starts[1:], strict=False))


def test_the_same_trace_gives_the_same_replay():
    trace = poisson(3.0, 10.0, 600, 20)
    once, twice = (replay(trace, VLLM, DEPLOYMENTS["cost"]) for _ in range(2))
    assert once.requests == twice.requests and once.steps == twice.steps


def test_replicas_share_the_work():
    trace = [TraceRequest(0.0, 4096, 20)] * 8
    alone = replay(trace[:1], VLLM, DEPLOYMENTS["dp"])
    all_at_once = replay(trace, VLLM, DEPLOYMENTS["dp"])
    assert all_at_once.steps[-1].done == pytest.approx(alone.steps[-1].done)


@pytest.mark.parametrize("together", [True, False])
def test_replicas_in_step_wait_for_the_slowest(together):
    engine = replace(VLLM.engine, replicas_in_step=together)
    result = replay(
        [TraceRequest(0.0, 100, 9), TraceRequest(0.0, 8000, 2)],
        replace(VLLM, engine=engine),
        DEPLOYMENTS["dp"],
    )
    short, long = result.requests
    alone = cost_model(VLLM, DEPLOYMENTS["dp"]).seconds(Mode(1, 1), Work.prefill(100))
    assert short.ttft == pytest.approx(alone)  # nobody waits for a result that is there
    # Its second step starts where the other's first has ended.
    assert (short.completion > long.ttft) is together


def test_shared_prefixes_are_not_computed_again():
    first = TraceRequest(0.0, 1536, 2, (0, 1, 2))
    second = TraceRequest(30.0, 1536, 2, (0, 1, 3))
    result = replay([first, second], VLLM, DEPLOYMENTS["tp"])
    assert [r.num_cached_tokens for r in result.requests] == [0, 1024]
    assert summary(result)["cached_share"] == pytest.approx(1024 / 3072)


def test_what_can_never_fit_is_refused_and_counted():
    result = replay(
        [TraceRequest(0.0, 200_000, 1), TraceRequest(0.0, 10, 1)], VLLM, DEPLOYMENTS["tp"]
    )
    assert (result.num_refused, len(result.requests)) == (1, 1)
    row = summary(result)
    assert (row["requests"], row["failed"]) == (2, 1)
    with pytest.raises(ConfigError, match="do not fit"):
        least_tp(replace(target(machine="l4x8", model="llama-17b-16e"), formats=Formats()))


def test_metrics_are_those_of_the_records():
    result = replay(poisson(2.0, 30.0, 600, 20), VLLM, DEPLOYMENTS["shift"])
    ttft = [r.ttft for r in result.requests]
    row = summary(result)
    columns = [row[f"ttft_p{p}_seconds"] for p in (50, 90, 99)]
    assert columns == pytest.approx(list(np.percentile(ttft, [50, 90, 99])))
    _, rate = throughput_over_time(result, 1.0)
    assert rate.sum() == pytest.approx(sum(step.num_tokens for step in result.steps))
    assert peak_throughput(result) <= max(rate)
    assert row["tokens_per_second"] == pytest.approx(len(ttft) * 620 / result.steps[-1].done)


def test_the_longest_mode_counts_seconds_not_steps():
    quick, slow = StepRecord(0.1, 0.1, 1, 1, Mode(8, 1)), StepRecord(0.9, 0.7, 99, 0, Mode(8, 8))
    later = StepRecord(5.5, 0.1, 1, 1, Mode(8, 1))
    run = Replay(DEPLOYMENTS["shift"], [], [quick, quick, slow, later], 0, 2, 0)
    assert longest_mode(run, 1.0) == ([0.0, 5.0], ["base", "shift"])
    assert peak_throughput(run) == 101 / 5


def test_temporaries_are_those_of_the_tokens_that_a_device_has():
    hidden, inner, logits = 8192, 28_672, 3 * 256 * 128_256 * 4 // 8
    splits = replace(VLLM, engine=replace(VLLM.engine, sampling_bytes=0.0))
    fixed = splits.reserved_bytes(DEPLOYMENTS["sp"]) + logits
    memory = {name: memory_of(splits, DEPLOYMENTS[name]).workspace_bytes for name in NAMES}
    assert memory["sp"] - fixed == 8192 // 8 * (4 * hidden + 3 * inner) * 2
    assert memory["tp"] - fixed == 8192 * (4 * hidden + 3 * inner // 8) * 2
    assert memory["shift"] == memory["sp"]  # a step of up to 256 tokens needs less
    assert memory["cost"] == memory["tp"]  # a step of any size may be one of SHIFT


def test_memory_adds_up_and_a_copy_of_the_weights_costs_kv():
    shift, sp = memory_of(VLLM, DEPLOYMENTS["shift"]), memory_of(VLLM, DEPLOYMENTS["sp"])
    total = shift.weight_bytes + shift.shift_weight_bytes + shift.workspace_bytes + shift.kv_bytes
    assert total == int(0.9 * VLLM.machine.memory_bytes)
    assert shift.kv_bytes == sp.kv_bytes - shift.shift_weight_bytes
    mine = target("shiftjax")
    ours = memory_of(mine, standard_deployments(mine)["shift"])
    outputs = 80 * (8192 + 2 * 1024 + 2 * 28_672)  # of column-parallel matrices, whose scales are
    assert ours.shift_weight_bytes == 4 * outputs // 8  # copied, 4 bytes each; all else is a view


# ------------------------------------------------------------------ policies compared


def test_modes_between_base_and_shift_need_weights_that_are_views():
    trace = [TraceRequest(float(n), 64 * n, 2) for n in range(4, 24)]
    machine = replace(VLLM.machine, switch_sum=())  # by which SHIFT is quicker than sp2
    runs = {
        name: replay(trace, replace(target(name), machine=machine), DEPLOYMENTS["cost"])
        for name in ("shiftjax", "vllm")
    }
    labels = runs["shiftjax"].labels
    assert labels[:2] == ["base", "shift"] and set(labels[2:]) == {"sp2", "sp4"}
    assert runs["vllm"].labels == ["base", "shift"]  # it keeps a copy of SHIFT's alone


# Smaller steps and shorter answers than a server's: quick to replay, crossed by the same choices.
def peak_bytes(num_requests):
    """Of a replay of as many long prompts that come at once."""
    deployment = replace(DEPLOYMENTS["tp"], prefix_caching=False)
    trace = [TraceRequest(0.0, 32_768, 1)] * num_requests
    tracemalloc.start()
    result = replay(trace, VLLM, deployment)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(result.requests) == num_requests
    return peak


def test_who_waits_and_who_has_ended_hold_no_token_ids():
    peak_bytes(42)  # prices that are kept are those of later runs, too
    assert peak_bytes(42) - peak_bytes(2) < 40 * 4096  # a list of token ids has 64 times as much


SMALL = standard_deployments(VLLM, max_num_seqs=32, max_num_batched_tokens=2048)


@pytest.fixture(scope="module")
def rates():
    """0.1 to 1 times the rate that the best of the fixed modes can sustain."""
    best = max(saturation_rate(VLLM, SMALL[name], 1024, 40) for name in ("sp", "tp"))
    trace = poisson(best, 6.0, 1024, 40)
    return [scale_rate(trace, factor) for factor in (0.1, 0.3, 0.6, 0.8, 1.0)]


def completion(trace, name, belief=None):
    return summary(replay(trace, VLLM, SMALL[name], belief))["completion_mean_seconds"]


def test_the_cost_policy_is_never_more_than_2_percent_behind_the_best_fixed_mode(rates):
    for trace in rates:
        best = min(completion(trace, name) for name in ("sp", "tp", "shift"))
        assert completion(trace, "cost") <= 1.02 * best


def perturbed(target: Target, links: float, compute: float) -> Target:
    """A machine whose links and products are this many times as fast: a model that errs."""
    machine = target.machine

    def faster(ways: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(way.scaled(1 / links, links) for way in ways)

    flops = {name: rate * compute for name, rate in machine.matmul_flops.items()}
    machine = replace(
        machine,
        matmul_flops=flops,
        all_reduce=faster(machine.all_reduce),
        all_to_all=faster(machine.all_to_all),
        all_gather=faster(machine.all_gather),
    )
    return replace(target, machine=machine)


@pytest.mark.parametrize(("links", "compute"), [(0.5, 1.0), (2.0, 1.0), (1.0, 0.7), (1.0, 1.4)])
def test_a_cost_model_that_errs_still_chooses_well(rates, links, compute):
    belief = cost_model(perturbed(VLLM, links, compute), SMALL["cost"])
    for trace in rates[::2]:
        assert completion(trace, "cost", belief) <= 1.05 * completion(trace, "greedy")
