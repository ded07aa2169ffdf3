"""Fits a machine's constants to measured steps. No JAX.

The model is `CostModel` itself. Its constants are positive and scale times by factors, so the fit
is least squares of log(predicted / measured) over the logarithms of the constants, by SciPy's
trust region: a point that is 10% off counts the same whether it takes a millisecond or a second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from shiftjax.costs.machine import Machine, Transfer
from shiftjax.costs.step_costs import CostModel
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode

# What a fit may change: product rate, memory rate, attention's two rates, kernels, collectives.
PLAIN = (
    *("matmul_efficiency", "memory_efficiency", "attention_efficiency"),
    *("tile_seconds", "kernel_seconds", "attention_round_seconds"),
)
CONSTANTS = (
    *PLAIN,
    *(
        "kv_efficiency",
        "all_reduce_latency",
        "all_reduce_rate",
        "all_to_all_latency",
        "all_to_all_rate",
    ),
)
PRIOR = 0.05  # pull of each constant towards where it started, for those that nothing depends on


@dataclass(frozen=True)
class Point:
    """A measured step: on `sp` x `tp` devices, in a mode."""

    sp: int
    tp: int
    mode: Mode
    work: Work
    seconds: float


CostsOf = Callable[[Machine, int, int], CostModel]


def fit_machine(
    start: Machine, points: Sequence[Point], costs_of: CostsOf, num_rounds: int = 60
) -> Machine:
    """The machine whose predictions are nearest to the measurements."""

    def factors(at: np.ndarray) -> dict[str, float]:
        return dict(zip(CONSTANTS, np.exp(at).tolist(), strict=True))

    def residuals(at: np.ndarray) -> np.ndarray:
        predicted = _predictions(scaled(start, factors(at)), points, costs_of)
        return np.concatenate([np.log(predicted / measured), PRIOR * at])

    measured = np.array([point.seconds for point in points])
    return scaled(
        start, factors(least_squares(residuals, np.zeros(len(CONSTANTS)), max_nfev=num_rounds).x)
    )


def errors(machine: Machine, points: Sequence[Point], costs_of: CostsOf) -> np.ndarray:
    """|predicted / measured - 1| of each point."""
    predicted = _predictions(machine, points, costs_of)
    return np.abs(predicted / np.array([point.seconds for point in points]) - 1)


def scaled(machine: Machine, factors: dict[str, float]) -> Machine:
    """A machine with constants of `CONSTANTS` multiplied; gathers go with all-to-alls."""
    plain = {name: f * getattr(machine, name) for name, f in factors.items() if name in PLAIN}
    by = factors.get("kv_efficiency", 1.0)
    kv = {fmt: by * share for fmt, share in machine.kv_efficiency.items()}
    sums = _ways(machine.all_reduce, factors["all_reduce_latency"], factors["all_reduce_rate"])
    exchange = factors["all_to_all_latency"], factors["all_to_all_rate"]
    return replace(
        machine,
        **{name: float(value) for name, value in plain.items()},
        kv_efficiency=kv,
        all_reduce=sums,
        all_to_all=_ways(machine.all_to_all, *exchange),
        all_gather=_ways(machine.all_gather, *exchange),
    )


def _ways(ways: tuple[Transfer, ...], latency: float, rate: float) -> tuple[Transfer, ...]:
    return tuple(way.scaled(latency, rate) for way in ways)


def _predictions(machine: Machine, points: Sequence[Point], costs_of: CostsOf) -> np.ndarray:
    models = {(p.sp, p.tp): costs_of(machine, p.sp, p.tp) for p in points}
    return np.array([models[p.sp, p.tp].serial_seconds(p.mode, p.work) for p in points])
