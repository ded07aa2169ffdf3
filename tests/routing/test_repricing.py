"""What is counted changes prices while an engine serves, and compiles nothing."""

import numpy as np
import pytest
from engines import MOE, build_tiny, checkpoint, run, tokens

from shiftjax.arch.presets import PRESETS
from shiftjax.core.policies import CostPolicy
from shiftjax.core.request import SamplingParams
from shiftjax.core.step_sizes import StepSizes
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.routing import Routing, price
from shiftjax.costs.work import Work
from shiftjax.device.programs import CompileCounter
from shiftjax.fleet.step_prices import StepPrices
from shiftjax.routing import counts_device, history
from shiftjax.routing.history import RoutingState
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model
from shiftjax.sim.named import deploy


@pytest.mark.costs(15)
def test_a_serving_engine_takes_over_what_it_counts(monkeypatch):
    """Of a tiny random router, whose skew is what it is: the costs know it, and no program does."""
    monkeypatch.setattr(counts_device, "EVERY", 1)
    monkeypatch.setattr(history, "LEAST_TOKENS", 64)
    directory, *_ = checkpoint(**MOE)
    built = build_tiny(directory, sp=2, tp=2, policy="cost", machine="h200x8")
    (sizes,) = {
        id(lane.scheduler.sizes): lane.scheduler.sizes for lane in built.engine.lanes
    }.values()
    costs, work = built.engine.policy.costs, Work.prefill(32)
    assert costs is sizes._costs
    mode = costs.layout.modes[0]
    before = costs.device_seconds(mode, work)
    counter = CompileCounter()
    counter.start()
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    events = run(built.engine, [[i + 3] * 9 for i in range(6)], [greedy] * 6)
    counter.stop()
    assert counter.count == 0 and all(len(tokens(each)) == 20 for each in events.values())
    state = built.engine.stats().find(RoutingState)
    assert state is not None and state.num_tokens > 100
    assert state.skews[4].mean() > 1.05
    assert costs.layers.routing is not None
    assert costs.device_seconds(mode, work) != before


def test_a_policy_keeps_to_modes_that_are_compiled():
    """Whatever routing comes to cost: sizes that nobody compiled have all modes."""
    target = target_from({"model": "qwen3-30b-a3b", "machine": "h200x8", "dtype": "fp8"})
    costs = cost_model(target, deploy(target, "sp8,policy=cost"))
    policy, modes, size = CostPolicy(costs), costs.layout.modes, Bucket(2048, 256)
    compiled = policy.wanted(modes, 1025, size)
    assert 0 < len(compiled) < len(modes)
    work = Work.prefill(2048)._replace(num_rows=256)
    seconds = {mode: costs.mode_seconds(mode, (2048, 256)) for mode in modes}
    best = max(seconds, key=seconds.__getitem__)
    assert best not in compiled
    costs.mode_seconds = lambda mode, size: 0.0 if mode == best else 1.0
    assert policy._choose((2048, 256), modes, False, None) in compiled
    assert policy._choose((2047, 256), modes, False, None) == best
    assert policy.mode_of(work, modes, 0, None) in compiled


def test_the_quickest_mode_may_be_another_once_routing_is_known():
    """All tokens choose among the experts of one device: modes that split experts less gain."""
    model = PRESETS["qwen3-30b-a3b"]
    target = target_from({"model": "qwen3-30b-a3b", "machine": "h200x8", "dtype": "fp8"})
    costs = cost_model(target, deploy(target, "sp8,policy=cost"))
    modes, size = costs.layout.modes, (8192, 256)
    (stage,) = costs.stages
    before = {mode: costs.mode_seconds(mode, size) for mode in modes}
    chances = np.zeros((model.num_layers, model.experts.num))
    chances[:, : model.experts.num // 8] = model.experts.per_token / (model.experts.num // 8)
    stage.price(Routing(chances))
    after = {mode: costs.mode_seconds(mode, size) for mode in modes}
    used = {mode: stage.expert_modes(mode, size[0]) for mode in modes}
    for mode in modes:
        assert (after[mode] > 1.3 * before[mode]) == (costs.layout.ways(used[mode]) > 2), mode


def test_a_fleet_asks_anew_for_what_it_has_kept():
    """Of all groups: none of the seconds that were found before are told again."""
    target = target_from({"model": "qwen3-30b-a3b", "machine": "h200x8", "dtype": "fp8"})
    deployment = deploy(target, "fleet,policy=cost")
    costs = {w: cost_model(target, each) for w, each in deployment.by_width.items()}
    policies = {width: CostPolicy(each) for width, each in costs.items()}
    modes = {width: each.layout.modes for width, each in costs.items()}
    sizes = {width: StepSizes() for width in costs}
    prices = StepPrices(costs, modes, policies, sizes, 8192)
    widest = max(costs)
    before = prices.prefill_rate(widest)
    counts = np.zeros((48, 128))
    counts[:, 0::16] = 1  # all tokens choose the same eight experts
    counts[:, :8] = 1e6
    for each in costs.values():
        price(each, counts)
    assert prices.prefill_rate(widest) == before
    prices.forget()
    assert prices.prefill_rate(widest) != before
