"""Fits a machine's constants to measured kernels, and says how far off they are. No JAX.

Least squares of log(predicted / measured) over the logarithms of the constants, as `fit.py` does
for whole steps, part by part: no two parts share a constant, so errors of one cannot hide in those
of another. A loss that grows as |x| far out (soft L1) keeps shapes that a library is bad at from
moving the others.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from shiftjax.costs.machine import Machine, of_format
from shiftjax.sim.measured_kernels import Measured, predicted_seconds

FAR = 0.1  # logarithms of ratios: what is further off counts less
SMALLEST = 1e-7  # seconds that a fixed time starts from at least, as 0 has no logarithm
Change = Callable[[Machine, float], Machine]  # a machine with a constant multiplied


class PartError(NamedTuple):
    """How far predictions of a part are from what was measured."""

    kernel: str
    format: str
    rows: int
    median: float  # of |predicted / measured - 1|
    p90: float
    ratio: float  # the median of predicted / measured: which way


@dataclass(frozen=True)
class Group:
    """Kernels that share constants, and what changes these, for the formats that were measured."""

    kernels: tuple[str, ...]
    changes: Callable[[Machine, Sequence[str]], list[Change]]


def _times(name: str) -> Change:
    """Of a number; a time begins above 0."""

    def change(machine: Machine, by: float) -> Machine:
        value = getattr(machine, name)
        least = SMALLEST if name.endswith("_seconds") else 0.0
        return replace(machine, **{name: max(value, least) * by})

    return change


def _times_of(name: str, fmt: str) -> Change:
    """Of a number by format."""

    def change(machine: Machine, by: float) -> Machine:
        values = getattr(machine, name)
        return replace(machine, **{name: {**values, fmt: of_format(values, fmt) * by}})

    return change


def _times_way(name: str, index: int, *, latency: bool) -> Change:
    """Of one way to run a collective: its latency, or its rate."""

    def change(machine: Machine, by: float) -> Machine:
        ways = list(getattr(machine, name))
        ways[index] = ways[index].scaled(*((by, 1.0) if latency else (1.0, by)))
        return replace(machine, **{name: tuple(ways)})

    return change


def _plain(*names: str) -> list[Change]:
    return [_times(name) for name in names]


def _by_format(name: str, formats: Sequence[str]) -> list[Change]:
    return [_times_of(name, fmt) for fmt in formats]


def _link(*kinds: str, name: str) -> Group:
    def changes(machine: Machine, _: Sequence[str]) -> list[Change]:
        ways = range(len(getattr(machine, name)))
        return [_times_way(name, i, latency=latency) for i in ways for latency in (True, False)]

    return Group(kinds, changes)


_PRODUCT = ("matmul_efficiency", "memory_efficiency", "tile_seconds", "product_seconds")
GROUPS = (
    Group(("product",), lambda _, formats: _plain(*_PRODUCT)),
    Group(
        ("decode",),
        lambda _, formats: _plain("attention_seconds") + _by_format("kv_efficiency", formats),
    ),
    Group(("prefill",), lambda _, formats: _plain("attention_efficiency")),
    Group(("experts",), lambda _, formats: _by_format("expert_efficiency", formats)),
    _link("all-reduce", name="all_reduce"),
    _link("all-to-all", name="all_to_all"),
    _link("all-gather", "reduce-scatter", name="all_gather"),
)
"""In this order: later parts are predicted with what earlier ones gave."""


def fit_kernels(machine: Machine, rows: Sequence[Measured]) -> Machine:
    """The machine with the constants of all parts that were measured; others stay."""
    for group in GROUPS:
        some = [row for row in rows if row.kernel in group.kernels]
        formats = sorted({row.format for row in some})
        if some:
            machine = _fit(machine, some, group.changes(machine, formats))
    return machine


def _fit(machine: Machine, rows: Sequence[Measured], changes: Sequence[Change]) -> Machine:
    def changed(at: np.ndarray) -> Machine:
        found = machine
        for change, by in zip(changes, np.exp(at).tolist(), strict=True):
            found = change(found, by)
        return found

    def residuals(at: np.ndarray) -> np.ndarray:
        return np.log(_ratios(changed(at), rows))

    start = np.zeros(len(changes))
    return changed(least_squares(residuals, start, loss="soft_l1", f_scale=FAR).x)


def _ratios(machine: Machine, rows: Iterable[Measured]) -> np.ndarray:
    return np.array([predicted_seconds(machine, row) / row.seconds for row in rows])


def part_errors(machine: Machine, rows: Iterable[Measured]) -> list[PartError]:
    """Errors by kernel and format, collectives together with those of other sizes."""
    parts: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for row in rows:
        parts[row.part].append(row)
    found = []
    for part, some in sorted(parts.items()):
        ratios = _ratios(machine, some)
        off = np.sort(np.abs(ratios - 1))
        p90 = float(off[math.ceil(0.9 * len(off)) - 1])
        ratio = statistics.median(ratios.tolist())
        found.append(PartError(*part, len(some), statistics.median(off.tolist()), p90, ratio))
    return found


def as_rows(before: Machine, after: Machine, rows: Sequence[Measured]) -> list[Mapping[str, Any]]:
    """A table of errors, of the constants of a file and of those that were fitted."""
    pairs = zip(part_errors(before, rows), part_errors(after, rows), strict=True)
    return [
        {"kernel": old.kernel, "format": old.format, "rows": old.rows}
        | {f"{name}_before": getattr(old, name) for name in ("median", "p90", "ratio")}
        | {f"{name}_fitted": getattr(new, name) for name in ("median", "p90", "ratio")}
        for old, new in pairs
    ]
