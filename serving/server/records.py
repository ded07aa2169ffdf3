"""Counters and histograms of what happens, declared in a table. No JAX."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shiftjax.metric import Histogram, Metric

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)


class Declared(NamedTuple):
    """A counter, or with `buckets` (upper bounds) a histogram."""

    name: str
    text: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()


class Records:
    """The values of what a table declares; those without labels begin at zero."""

    def __init__(self, table: Sequence[Declared]):
        self._table = {row.name: row for row in table}
        self._values: dict[str, dict[tuple[str, ...], Any]] = {
            row.name: {} if row.labels else {(): _zero(row)} for row in table
        }

    def count(self, name: str, amount: int, *labels: str) -> None:
        """Add `amount` to the counter `name` with these label values."""
        values = self._values[name]
        values[labels] = values.get(labels, 0) + amount

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Record `value` in the histogram `name` with these label values."""
        values = self._values[name]
        if labels not in values:
            values[labels] = _zero(self._table[name])
        values[labels].observe(value)

    def metrics(self) -> Iterator[Metric]:
        """Yield every metric of the table, in the order of its rows."""
        for name, text, buckets, labels in self._table.values():
            kind = "histogram" if buckets else "counter"
            yield Metric(kind, name, text, self._values[name], labels)


def _zero(row: Declared) -> Any:
    return Histogram(row.buckets) if row.buckets else 0
