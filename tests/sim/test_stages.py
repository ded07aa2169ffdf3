"""Pipeline stages in closed form: against sums by hand, and what re-sharding can gain."""

from dataclasses import replace

import pytest

from shiftjax.costs.step import Work
from shiftjax.options import ConfigError
from shiftjax.sim.deployment import cost_model, deploy
from shiftjax.sim.experiments import target_from
from shiftjax.sim.planning import Workload
from shiftjax.sim.stages import (
    Stages,
    all_stages,
    best_offline,
    decode_rate,
    offline_requests_per_second,
    prefill_rate,
)

WORKLOAD = Workload(3000, 200)


def target(machine="a10x8", model="qwen-32b"):
    names = {"model": model, "machine": machine, "engine": "vllm", "dtype": "bfloat16"}
    return target_from(names)


def test_one_stage_is_a_plain_replica():
    one, stages = target("a100x8", "llama-8b"), Stages(4, 2, 1)
    costs = cost_model(one, deploy(one, "", (1, 1, 2), "base"))
    work = Work(8192, 1, 1, 0, 8192, 8192 * 3000 // 2)
    expected = 4 * 8192 / costs.seconds(costs.layout.shift, work)
    assert prefill_rate(one, stages, WORKLOAD) == pytest.approx(expected)


def test_stages_share_the_layers_and_pay_for_the_sending():
    one = target("a100x8", "llama-8b")
    link = replace(one.machine.point_to_point[0], latency_seconds=0.0, bytes_per_second=1e30)
    free = replace(one, machine=replace(one.machine, point_to_point=(link,)))
    rates = {pp: prefill_rate(free, Stages(1, 1, pp), WORKLOAD) for pp in (1, 4)}
    assert 3 < rates[4] / rates[1] < 4  # the last stage has the LM head, and the host is not split
    assert prefill_rate(one, Stages(1, 1, 4), WORKLOAD) < rates[4]


def test_weights_that_leave_no_room_decode_nothing():
    assert decode_rate(target(), Stages(8, 1, 1), WORKLOAD) == 0.0
    assert offline_requests_per_second(target(), *[Stages(8, 1, 1)] * 2, WORKLOAD) == 0.0
    with pytest.raises(ConfigError, match="does not fit l4x8 in any number of stages"):
        best_offline(target("l4x8", "llama-70b"), WORKLOAD, resharding=True)


def test_phases_add_up():
    one, prefill, decode = target(), Stages(1, 1, 8), Stages(1, 8, 1)
    seconds = 3000 / prefill_rate(one, prefill, WORKLOAD)
    seconds += 200 / decode_rate(one, decode, WORKLOAD)
    assert offline_requests_per_second(one, prefill, decode, WORKLOAD) == pytest.approx(1 / seconds)


@pytest.mark.parametrize(("machine", "least"), [("a10x8", 1.2), ("a100x8", 1.0)])
def test_resharding_gains_where_links_are_slow(machine, least):
    static, moved = (best_offline(target(machine), WORKLOAD, resharding=r) for r in (False, True))
    assert moved >= least * static
    if machine == "a100x8":
        assert moved < 1.2 * static


def test_every_division_of_the_machine_is_there():
    stages = all_stages(target())
    assert len(stages) == 10
    assert all(s.dp * s.tp * s.pp == 8 for s in stages)
