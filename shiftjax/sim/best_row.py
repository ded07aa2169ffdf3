"""Which row of a table of deployments is the best: for a goal, or in all columns. No JAX."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from shiftjax.sim.estimate import Estimate, Workload

Cost = Callable[[Estimate, Workload], float]

GOALS: Mapping[str, Cost] = MappingProxyType(
    {
        "ttft": lambda one, _: one.ttft_seconds,
        "tpot": lambda one, _: one.tpot_seconds,
        "latency": lambda one, workload: one.alone_seconds(workload),
        "throughput": lambda one, _: -one.tokens_per_second,
    }
)
"""What of a row is the less the better; without a goal, all columns count (`distances`)."""
DIGITS = 6  # in which rows have to differ, to be better or worse
AS_NEAR = 1.02  # of the nearest: rows that are no further behind are as near, as far as is known


def distances(estimates: Sequence[Estimate]) -> list[float]:
    """How far each row is behind the best of each column, 1 for a row that is best in all.

    The geometric mean of the ratios to the least TTFT, the least TPOT and the most tokens per
    second. A row that another is better than in one column, and equal to in the others, is
    further behind than that: the first is behind none in all columns.
    """
    ttft = min(one.ttft_seconds for one in estimates)
    tpot = min(one.tpot_seconds for one in estimates)
    most = max(one.tokens_per_second for one in estimates)
    ratios = (
        (e.ttft_seconds / ttft, e.tpot_seconds / tpot, most / e.tokens_per_second)
        for e in estimates
    )
    return [math.prod(each) ** (1 / 3) for each in ratios]


def best_of(
    estimates: Sequence[Estimate], workload: Workload, goal: str | None = None
) -> Estimate | None:
    """The row that is best for a goal, of equals the nearest to the best in all columns.

    Without a goal, of the rows that are `AS_NEAR` as the nearest the one with most tokens per
    second, for that is what is short in a burst. Of equal ones the one with the least SP, which has
    fewer modes to compile. None: nothing fits.
    """
    fitting = [one for one in estimates if one.fits]
    if not fitting:
        return None

    behind = distances(fitting)
    most = AS_NEAR * min(behind) if goal is None else math.inf
    cost = GOALS[goal or "throughput"]

    def rank(pair: tuple[float, Estimate]) -> tuple[float, float, int, int]:
        far, one = pair
        order = one.deployment.sp, one.deployment.pp
        return _rounded(cost(one, workload)), _rounded(far), *order

    near = (pair for pair in zip(behind, fitting, strict=True) if pair[0] <= most)
    return min(near, key=rank)[1]


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
