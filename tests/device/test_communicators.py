"""Which devices talk to each other in a fleet, before anything is served."""

from dataclasses import replace

import jax
import pytest

from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.device import communicators
from shiftjax.device.mesh import group_mesh
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define
from shiftjax.device.step import StepDef
from shiftjax.models.attention_backend import xla_attention
from shiftjax.parallel.arrangements import all_groups, possible_widths
from shiftjax.parallel.grid import Grid
from shiftjax.parallel.layout import Layout

MODEL = replace(PRESETS["tiny"], num_heads=8, num_kv_heads=8)


def steps_of(units: int, tp: int) -> list[StepDef]:
    """The steps of every group, in an order that is not that of their widths."""
    steps = []
    for group in reversed(all_groups(units, possible_widths(units))):
        layout = Layout(MODEL, group.width, tp, units)
        weights = ModeWeights(define(layout, formats_of("float32")), layout, "alias")
        mesh = group_mesh(jax.devices(), Grid(tp, units), group)
        steps.append(StepDef(weights, mesh, 8, xla_attention(MODEL.head_dim, (None,), 4), 4))
    return steps


def needed(units: int, tp: int) -> set[tuple[int, ...]]:
    """By the definition of modes and moves, on places `j` of each group's devices, in order."""
    found, grid = set(), Grid(tp, units)
    for group in all_groups(units, possible_widths(units)):
        places = grid.devices_of(group)
        for mode in group.modes:  # neighbours share tokens, each sp-th has another part of a weight
            found |= {tuple(places[i : i + mode.sp]) for i in range(0, len(places), mode.sp)}
            found |= {tuple(places[i :: mode.sp]) for i in range(mode.sp)}
        for narrow in possible_widths(units):
            ways = group.width // narrow
            if ways > 1:  # neighbours hold the same heads of the narrow groups
                found |= {tuple(places[i : i + ways]) for i in range(0, len(places), ways)}
        found.add(tuple(places))
    return {members for members in found if len(members) > 1}


@pytest.mark.parametrize(("units", "tp"), [(8, 1), (4, 2)])
def test_every_set_of_devices_that_steps_and_moves_need_is_made_once(units, tp, monkeypatch):
    made: list[tuple[tuple[int, ...], ...]] = []
    monkeypatch.setattr(
        communicators,
        "_sum_over",
        lambda mesh, axes: made.append(communicators._members(mesh, axes)),
    )
    count = communicators.make_communicators(steps_of(units, tp), possible_widths(units))
    assert count == len(made) == len(set(made))
    sets = {members for each in made for members in each if len(members) > 1}
    assert sets == needed(units, tp)
    assert all(len(members) > 1 for each in made for members in each)
    num_devices = [sum(map(len, each)) for each in made]  # of the group
    assert num_devices == sorted(num_devices, reverse=True)


def test_they_are_made_by_running_sums():
    assert communicators.make_communicators(steps_of(2, 1), (1, 2)) == 1
