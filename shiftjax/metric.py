"""A metric as a value: what a part of the engine says of itself, for Prometheus or anybody else.

Each feature has a function `metrics` beside its state, which yields these; the server collects
them, and puts its prefix and its labels before them. No JAX.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of a histogram of seconds of the order of a step."""


@dataclass(slots=True)
class Histogram:
    """How many values fell into each bucket, whose upper `bounds` increase, and their sum."""

    bounds: tuple[float, ...]
    numbers: list[int] = field(init=False)  # the last one is beyond all bounds
    total: float = 0.0

    def __post_init__(self) -> None:
        self.numbers = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value; a negative one, which only a clock that was set back gives, as 0."""
        value = max(0.0, value)
        self.numbers[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __add__(self, other: "Histogram") -> "Histogram":
        """A new histogram of the values of both, which have the same bounds."""
        both = Histogram(self.bounds)
        both.numbers = [a + b for a, b in zip(self.numbers, other.numbers, strict=True)]
        both.total = self.total + other.total
        return both

    def copy(self) -> "Histogram":
        """A histogram of the same values: what is observed later does not show."""
        return self + Histogram(self.bounds)

    def buckets(self) -> list[tuple[str, int]]:
        """(bound, how many values are not above it), as Prometheus has them."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.numbers), strict=True))


class Metric(NamedTuple):
    """All series of a name. `values` are by the values of `labels`, in the same order."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str  # without the prefix of a server and, of a counter, without `_total`
    text: str  # for people
    values: Mapping[tuple[str, ...], float] | Mapping[tuple[str, ...], Histogram]
    labels: tuple[str, ...] = ()


Numbers = float | Mapping[tuple[str, ...], float]  # one, or one for each combination of labels


def counter(name: str, text: str, values: Numbers, *labels: str) -> Metric:
    """A metric that only grows."""
    return Metric("counter", name, text, _by_labels(values), labels)


def gauge(name: str, text: str, values: Numbers, *labels: str) -> Metric:
    """A metric that goes up and down."""
    return Metric("gauge", name, text, _by_labels(values), labels)


def histogram(name: str, text: str, value: Histogram) -> Metric:
    """The distribution of values, without labels."""
    return Metric("histogram", name, text, {(): value})


def _by_labels(values: Numbers) -> Mapping[tuple[str, ...], float]:
    return values if isinstance(values, Mapping) else {(): values}
