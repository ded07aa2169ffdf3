"""Gathered weights, predicted: what gathers cost a step, when they pay, where they are offered."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.core.policies import CostPolicy, ThresholdPolicy, make_policy
from shiftjax.costs.collectives import weight_collectives
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.memory import weight_bytes
from shiftjax.costs.step_costs import CostModel
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.sim.devices import Clock
from shiftjax.sim.experiments import choose_deployments, target_from
from shiftjax.sim.modelled import cost_model, deploy_config, memory_of
from shiftjax.sim.planning import gather_in_words, gathered_deployments
from shiftjax.sim.sim_backend import make_engine

H200 = load_machine("h200x8")
OURS = load_engine("shiftjax")
LLAMA = PRESETS["llama-70b"]
LARGE = target_from({"model": "llama-405b", "machine": "h200x8", "dtype": "fp8"})


def costs_of(machine=H200, *, gathers: bool = True, sp: int = 8, tp: int = 1) -> CostModel:
    return CostModel(Layout(LLAMA, sp, tp, gathers=gathers), machine, OURS, Formats())


@pytest.mark.parametrize(("sp", "tp"), [(8, 1), (4, 2)])
def test_a_layer_gathers_its_matrices_less_what_the_device_has(sp, tp):
    base, layer = Mode(sp, sp), 2 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)  # bytes in bf16
    moves = weight_collectives(Layout(LLAMA, sp, tp, gathers=True), base, Formats())
    assert len(moves) == 7 * LLAMA.num_layers and {move.num_devices for move in moves} == {sp}
    assert sum(move.num_bytes for move in moves) == LLAMA.num_layers * layer // tp
    assert not weight_collectives(Layout(LLAMA, sp, tp, gathers=True), Mode(sp, 1), Formats())
    assert not weight_collectives(Layout(LLAMA, sp, tp), base, Formats())


@pytest.mark.parametrize("num_tokens", [512, 1 << 15])
def test_what_products_do_not_hide_of_a_gather_is_added(num_tokens):
    """The first layer's whole, of the others what exceeds the layer before; by hand."""
    with_it, without = costs_of(), costs_of(gathers=False)
    base, work = with_it.layout.base, Work(num_tokens, 0, 0, 0, 0, 0)
    plain, gathered = (each.breakdown(base, work) for each in (without, with_it))
    assert replace_collectives(gathered) == replace_collectives(plain)
    way = H200.all_gather[0]
    sizes = [2 * 8192 * n for n in (8192, 1024, 1024, 8192, 28672, 28672, 28672)]
    gather = sum(way.latency_seconds + 7 / 8 * size / way.bytes_per_second for size in sizes)
    exposed = max(0.0, gather - without.products_seconds(base, num_tokens) / 80)
    added = gathered.collectives - plain.collectives
    # The embedding of all tokens crosses, in place of nothing: SP alone looks up its own.
    found = way.latency_seconds + 7 / 8 * num_tokens * 8192 * 2 / way.bytes_per_second
    assert added == pytest.approx(gather + 79 * exposed + found, rel=1e-6)
    assert (exposed == 0) == (num_tokens > 20_000)


def replace_collectives(cost):
    return cost._replace(collectives=0.0)


def test_virtual_devices_hide_no_gather():
    cpu = replace(load_machine("cpu"), shared_cores=2)
    base, work = costs_of().layout.base, Work(1 << 14, 0, 0, 0, 0, 0)
    shared = costs_of(cpu).breakdown(base, work).collectives
    alone = costs_of(replace(cpu, shared_cores=0)).breakdown(base, work).collectives
    assert shared > 8 * 2 * alone / 3  # participants come one after the other, too


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 512),
    st.integers(1, 100_000),
    st.sampled_from([(8, 1), (4, 2)]),
    st.sampled_from(["h200x8", "h100x8", "a10x8"]),
    st.booleans(),
)
def test_no_step_of_decodes_is_in_base(num_seqs, context, mesh, machine, is_queue):
    costs = costs_of(load_machine(machine), sp=mesh[0], tp=mesh[1])
    policy, modes = CostPolicy(costs), costs.layout.modes
    for last in (None, *modes):
        work = Work.decode(num_seqs, context)
        assert policy.mode_of(work, modes, is_queue, last) == costs.layout.shift


def test_the_threshold_is_where_the_costs_cross():
    costs = costs_of()
    policy = make_policy("threshold", None, costs)
    assert isinstance(policy, ThresholdPolicy)
    base, shift = costs.layout.base, costs.layout.shift

    def saves(num_tokens: int) -> bool:
        seconds = [costs.device_seconds(mode, Work.prefill(num_tokens)) for mode in (base, shift)]
        return seconds[0] < seconds[1]

    last = policy.threshold
    assert last > 4096 and not any(map(saves, range(64, last, 256)))
    assert all(map(saves, range(last + 1, 1 << 16, 4096)))
    for num_tokens, mode in ((last, shift), (last + 1, base)):
        assert saves(num_tokens) == (mode == base)
        assert policy.mode_of(Work.prefill(num_tokens), (base, shift), 0, None) == mode
    with pytest.raises(ValueError, match="needs a cost model"):
        make_policy("threshold", None)


def test_settings_come_to_sp_over_all_devices_and_the_threshold_of_the_costs():
    devices = Devices(8, 141 * 10**9, 141 * 10**9)
    options = {"dtype": "bfloat16", "weights": "gather", "max_num_batched_tokens": 1 << 14}
    config = EngineConfig.from_options(**options)
    deployment = resolve(config, LLAMA, devices)
    layout = deployment.layout
    assert (layout.sp, layout.tp, layout.gathers, deployment.threshold) == (8, 1, True, None)
    memory = deployment.memory(devices)
    plain = weight_bytes(Layout(LLAMA, 1, 8), deployment.formats)
    assert (memory.weight_bytes, memory.shift_weight_bytes) == (plain, 0)
    layers = 2 * 2 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)  # of two layers, gathered
    assert layers < memory.workspace_bytes < 2 * layers

    target = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "bfloat16"})
    engine, _ = make_engine(target, [deploy_config(target, config)], Clock())
    assert engine.policy == make_policy("threshold", None, cost_model(target, deployment))
    with pytest.raises(ConfigError, match="weights = gather cannot be had with fleet"):
        EngineConfig.from_options(fleet=True, weights="gather")
    with pytest.raises(ConfigError, match="machine = cpu has no meaning"):
        controls = {"step_sizes": "largest"}  # else it says what sizes of steps cost
        options = {"machine": "cpu", "weights": "gather", "shift_threshold": 9}
        EngineConfig.from_options(controls=controls, **options)


@pytest.mark.costs(8)
def test_it_is_offered_where_the_weights_leave_sp_no_room():
    (offered,) = gathered_deployments(LARGE)
    assert (offered.sp, offered.tp, offered.weights) == (8, 1, "gather")
    assert memory_of(LARGE, offered).num_kv_tokens > 0
    assert "only with more than max_num_batched_tokens = 8,192" in gather_in_words(LARGE)
    words = gather_in_words(LARGE, max_num_batched_tokens=1 << 14)
    assert "--weights gather --sp 8 stores as little as TP 8 (51.3 GB a device)" in words
    assert "less time for a step of 16,384" in words
    small = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
    assert gather_in_words(small) == "" and not gathered_deployments(small)
    (named,) = choose_deployments(LARGE, ["gather"])
    assert named == replace(offered, name="gather", policy="cost")
