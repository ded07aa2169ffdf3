"""Sums by a switch in prices: which sums of which steps, and what they save."""

from dataclasses import replace

import pytest

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.collectives import layer_collectives
from shiftjax.costs.levels import collective_seconds, transfer_seconds
from shiftjax.costs.machine_files import load_engine, load_machine, machine_names
from shiftjax.costs.step_costs import CostModel
from shiftjax.costs.switch_sums import FIRST_LAUNCHES, of_a_layer, splits_rows, switch_sums
from shiftjax.parallel.layout import Layout
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.named import deploy

MODEL, H200, ENGINE = PRESETS["llama-70b"], load_machine("h200x8"), load_engine("shiftjax")
LAYOUT = Layout(MODEL, 4, 2)
PARTS = MODEL.parts[0]
ROWS = 4  # of one shot


def costs(machine=H200, engine=ENGINE, layout=LAYOUT):
    return CostModel(layout, machine, engine, Formats())


def test_machines_with_nvswitch_of_hopper_have_it():
    have = {name for name in machine_names() if load_machine(name).switch_sum}
    assert have == {"h100x8", "h200x8"}


@pytest.mark.parametrize(("rows", "way"), [(4, 0), (16, 1), (1024, 1)])
def test_a_step_in_shift_has_two_sums_a_layer_and_two_launches_less(rows, way):
    by_switch, others = costs(), costs(engine=replace(ENGINE, sums_by_switch=False))
    shift = LAYOUT.shift
    assert by_switch.layers.num_launches(shift, rows) == others.layers.num_launches(shift, rows) - 2
    (move,) = [m for m in layer_collectives(LAYOUT, shift, rows, 2) if m.num_times == 2]
    saved = collective_seconds(H200, move) - transfer_seconds(H200.switch_sum[way : way + 1], move)
    saved = 2 * MODEL.num_layers * (saved + H200.kernel_seconds)
    if way:  # a device norms an eighth of the rows: reads two numbers each, and writes two
        norms = 2 * MODEL.num_layers * rows * 4 * MODEL.hidden_size * 2
        saved += by_switch.kernels.moved(norms - norms // 8)
    saved -= FIRST_LAUNCHES * H200.kernel_seconds
    found = (each.mode_seconds(shift, (rows, rows)) for each in (others, by_switch))
    assert next(found) - next(found) == pytest.approx(saved)


@pytest.mark.parametrize("what", ["base", "odd rows", "no switch", "two hosts", "another engine"])
def test_the_others_are_collectives(what):
    layout, machine, engine, rows, mode = LAYOUT, H200, ENGINE, ROWS, LAYOUT.shift
    if what == "base":
        mode = LAYOUT.base
    elif what == "odd rows":
        rows = 8 * 3 + 1
    elif what == "no switch":
        machine = replace(H200, switch_sum=())
    elif what == "two hosts":
        machine, layout = H200.over(2), Layout(MODEL, 8, 2)
        mode, rows = layout.shift, 16
    else:
        engine = load_engine("vllm")
    assert not costs(machine, engine, layout).layers.switch.shots(mode, rows)


def test_models_whose_sums_meet_no_norm_have_none():
    gemma = replace(MODEL, architecture="gemma2")
    assert of_a_layer(MODEL, PARTS) == 2
    assert of_a_layer(replace(MODEL, output_bias=True), PARTS) == 1
    assert of_a_layer(replace(MODEL, mlp_bias=True), PARTS) == 1
    assert of_a_layer(gemma, PARTS) == 0
    others = {"norm_centred": True}, {"hidden_size": 2880}, {"head_dim": 80}
    for own, formats in (
        *((own, Formats()) for own in others),
        ({}, Formats(activations="float32")),
    ):
        layout = Layout(replace(MODEL, **own), 1, 8)
        assert not switch_sums(layout, H200, ENGINE, formats).shots(layout.shift, 8), own


def test_devices_keep_their_rows_where_sums_alone_are_added():
    assert splits_rows(MODEL)
    assert not splits_rows(replace(MODEL, output_bias=True))
    layout = Layout(replace(MODEL, output_bias=True), 1, 8)
    of_one = switch_sums(layout, H200, ENGINE, Formats())
    assert [of_one.shots(layout.shift, rows) for rows in (8, 16, 24)] == [1, 1, 0]


def test_only_a_group_that_has_all_devices_of_an_engine_has_them():
    target = Target(MODEL, H200, ENGINE, Formats("fp8", "fp8"))
    for name, has in (("tp=8", True), ("tp=4,sp=2", True), ("dp=2,tp=4", False)):
        of_group = cost_model(target, deploy(target, name)).stages[0]
        assert (of_group.layers.switch.shots(of_group.layout.shift, 8) > 0) == has, name
    deployment = replace(deploy(target, "tp=8"), deterministic=True)
    assert not cost_model(target, deployment).stages[0].layers.switch.ways
