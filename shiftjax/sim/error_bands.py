"""How far predictions are from published measurements, as a band to print beside each. No JAX.

`error_bands.csv` has the error of every figure of `benchmarks/published/check.csv`, which no
constant was fitted to; `scripts/labs/published_figures.py check --write` makes it.
"""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_suffix(".csv")
METRICS = ("ttft", "tpot", "throughput")
ANY = "all"  # systems
LIMITS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
SHARE = 2 / 3  # of the figures that a band holds


class Band(NamedTuple):
    """Two thirds of the published figures, or more, are within this of what was predicted."""

    limit: float  # a share of the prediction
    further: int  # figures that were further off
    figures: int
    system: str  # that was measured

    def __str__(self) -> str:
        """As `+-20%: 15 of 46 published figures were further off`."""
        words = f"{self.further} of {self.figures} published figures were further off"
        return f"+-{self.limit:.0%}: {words}"


def band(metric: str, system: str = ANY) -> Band:
    """The band of a metric of `METRICS`, of a system (vllm, sglang, tensorrt_llm ...) or of all.

    A system without figures of this metric has the band of all systems.

    Raises:
        ValueError: there is no such metric.
    """
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    errors = _errors()
    own = (system, metric)
    found = own if own in errors else (ANY, metric)
    off = sorted(map(abs, errors[found]))
    limit = next((x for x in LIMITS if sum(e <= x for e in off) >= SHARE * len(off)), off[-1])
    return Band(limit, sum(e > limit for e in off), len(off), found[0])


@functools.cache
def _errors() -> Mapping[tuple[str, str], list[float]]:
    """Errors as shares, by (system, metric), all systems together as `ANY`."""
    found: dict[tuple[str, str], list[float]] = {}
    with FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for system in (row["system"], ANY):
                found.setdefault((system, row["metric"]), []).append(float(row["error"]))
    return found
