"""Published figures of Shift Parallelism (arXiv 2509.16495), as near as docs/simulator.md says.

Peaks are those of the closed form, which the replay behind the page agrees with.
"""

from dataclasses import replace

import pytest

from shiftjax.costs.work import Work
from shiftjax.sim.estimate import Workload, saturated_tokens_per_second
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model, memory_of
from shiftjax.sim.named import standard_deployments

NAMES = {"model": "llama-70b", "machine": "h200x8", "engine": "vllm", "dtype": "fp8"}
LLAMA = target_from(NAMES)
DEPLOYMENTS = standard_deployments(LLAMA)
WORKLOAD = Workload(4096, 250)


def peak(name, target=LLAMA):
    deployment = DEPLOYMENTS[name]
    costs, memory = cost_model(target, deployment), memory_of(target, deployment)
    return saturated_tokens_per_second(costs, deployment, memory, WORKLOAD)


def test_one_request_takes_what_was_published():
    costs = cost_model(LLAMA, DEPLOYMENTS["shift"])
    base, shift = costs.layout.base, costs.layout.shift
    tpot = costs.seconds(shift, Work.decode(1, 4096 + 125))
    assert tpot == pytest.approx(9.34e-3, rel=0.05)
    prefill = Work.prefill(4096)
    assert costs.seconds(shift, prefill) / costs.seconds(base, prefill) == pytest.approx(1.56, 0.13)


def test_full_machines_lose_what_was_published():
    offline = replace(LLAMA, engine=LLAMA.engine.offline)
    data_parallel = peak("dp", offline)
    assert peak("tp", offline) / data_parallel == pytest.approx(0.54, rel=0.05)
    assert peak("shift", offline) / data_parallel == pytest.approx(0.82, rel=0.05)


def test_the_front_end_costs_wide_groups_more_and_no_more_than_the_band():
    data_parallel = peak("dp")  # each replica has fewer streams
    assert 0.85 * 0.54 < peak("tp") / data_parallel < 0.54
    assert 0.85 * 0.82 < peak("shift") / data_parallel < 0.82
