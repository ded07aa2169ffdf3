"""Published figures of Shift Parallelism (arXiv 2509.16495), as near as docs/simulator.md says.

Peaks are those of the closed form, which the replay behind the page agrees with.
"""

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


def peak(name):
    deployment = DEPLOYMENTS[name]
    costs, memory = cost_model(LLAMA, deployment), memory_of(LLAMA, deployment)
    return saturated_tokens_per_second(costs, deployment, memory, WORKLOAD)


def test_one_request_takes_what_was_published():
    costs = cost_model(LLAMA, DEPLOYMENTS["shift"])
    base, shift = costs.layout.base, costs.layout.shift
    tpot = costs.seconds(shift, Work.decode(1, 4096 + 125))
    assert tpot == pytest.approx(9.34e-3, rel=0.05)
    prefill = Work.prefill(4096)
    assert costs.seconds(shift, prefill) / costs.seconds(base, prefill) == pytest.approx(1.56, 0.13)


def test_full_machines_lose_what_was_published():
    data_parallel = peak("dp")
    assert peak("tp") / data_parallel == pytest.approx(0.54, rel=0.05)
    assert peak("shift") / data_parallel == pytest.approx(0.82, rel=0.05)
