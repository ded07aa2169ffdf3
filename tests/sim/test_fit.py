"""Fits: constants that were changed are found again, from some of the points, for the others."""

import pytest

from serving.bench.steps import cases, fit_every_other, plan_of
from shiftjax.arch.formats import Formats
from shiftjax.control.policy import work_of
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.step import CostModel
from shiftjax.parallel.grid import Mode
from shiftjax.sim.fit import Point, errors, fit_machine, scaled
from shiftjax.sim.models import find_model

START = load_machine("cpu")
SHAPE, ENGINE, FORMATS = find_model("smollm2-135m"), load_engine("shiftjax"), Formats()


def costs_of(machine, sp, tp):
    return CostModel(SHAPE, sp, tp, machine, ENGINE, FORMATS)


def measured(machine):
    """Every case of the grid on a machine whose steps take exactly what the model says."""
    return [
        (case, Point(sp, tp, mode, work, costs_of(machine, sp, tp).serial_seconds(mode, work)))
        for case in cases()
        for work in [work_of(plan_of(case))]
        for sp, tp, mode in ((1, 1, Mode(1, 1)), (4, 2, Mode(4, 4)), (4, 2, Mode(4, 1)))
    ]


@pytest.fixture(scope="module")
def truth():
    """Slower products, memory and kernels, quicker links."""
    factors = dict.fromkeys(("all_reduce_latency", "all_to_all_latency"), 0.5)
    factors |= dict.fromkeys(("all_reduce_rate", "all_to_all_rate"), 2.0)
    factors |= {"matmul_efficiency": 0.6, "memory_efficiency": 0.7, "kernel_seconds": 1.5}
    return scaled(START, factors)


def test_the_fit_predicts_what_it_has_not_seen(truth, capsys):
    pairs = measured(truth)
    assert errors(START, [point for _, point in pairs], costs_of).max() > 0.3
    machine = fit_every_other(START, pairs, costs_of)
    assert errors(machine, [point for _, point in pairs], costs_of).max() < 0.03
    assert machine.matmul_efficiency == pytest.approx(truth.matmul_efficiency, rel=0.1)
    assert "held out: median 0." in capsys.readouterr().out


def test_constants_that_nothing_depends_on_stay(truth):
    alone = [point for _, point in measured(truth) if point.sp == 1][::3]
    machine = fit_machine(START, alone, costs_of, num_rounds=20)
    assert [w.latency_seconds for w in machine.all_to_all] == pytest.approx(
        [w.latency_seconds for w in START.all_to_all]
    )
    assert errors(machine, alone, costs_of).max() < 0.03


def test_the_grid_has_every_kind_of_step_in_both_halves():
    grid = cases()
    for half in (grid[::2], grid[1::2]):
        assert {case.kind for case in half} == {"decode", "chunk", "mixed"}
