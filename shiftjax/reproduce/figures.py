"""Published figures, ours beside them, and how many are near. No JAX.

A file `published/NAME.yaml` has the paper's title, its arXiv number, and figures by id:

    quiet-tpot: {figure: table 5, what: lowest TPOT, unit: ms, value: 9.34, read: text}

`read` says where the value is from: `text`, `table`, `plot` (read off a picture, so no more exact
than that), or `report` (of others about the paper).
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shiftjax.options import ConfigError

NEAR, FAR = 0.15, 0.25  # the two bands in which figures are counted
READ = ("text", "table", "plot", "report")
_FIELDS = {"figure", "what", "unit", "value", "read"}


@dataclass(frozen=True)
class Figure:
    """One figure of a paper, and ours.

    `published` is None where the paper states nothing that can be compared, `ours` where it could
    not be run. `note` says what the paper leaves open and what we took, or where an error is from.
    """

    paper: str
    number: str  # of the figure, table or section
    what: str
    published: float | None
    ours: float | None
    unit: str
    note: str = ""
    read: str = ""

    @property
    def error(self) -> float | None:
        """Ours over the published value, less 1; None where one of them is missing."""
        if self.published is None or self.ours is None:
            return None
        return self.ours / self.published - 1

    def row(self) -> dict[str, Any]:
        """For a table or a file."""
        return {
            "paper": self.paper,
            "figure": self.number,
            "what": self.what,
            "unit": self.unit,
            "published": self.published,
            "ours": self.ours,
            "error": self.error,
            "read from": self.read,
            "note": self.note,
        }


@dataclass(frozen=True)
class Curve:
    """Lines of one picture of ours, by name: (x, y) pairs."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Options:
    """How a paper is run: `quick` takes the least that still has every kind of figure."""

    quick: bool = False
    traces: Path | None = None  # a folder of published traces


@dataclass(frozen=True)
class Published:
    """The figures of a paper by id, as its data file has them."""

    name: str
    title: str
    arxiv: str
    figures: Mapping[str, Mapping[str, Any]]

    def beside(self, key: str, ours: float | None, note: str = "") -> Figure:
        """The figure of this id with our value. Raises KeyError for an unknown id."""
        known = self.figures[key]
        words = " ".join(filter(None, (known.get("note", ""), note)))
        place, what, unit = str(known["figure"]), known["what"], known["unit"]
        return Figure(self.name, place, what, known["value"], ours, unit, words, known["read"])

    def alone(self, number: str, what: str, ours: float, unit: str, note: str = "") -> Figure:
        """A value of ours beside which nothing is published, or nothing was found."""
        return Figure(self.name, number, what, None, ours, unit, note)


@cache
def published(name: str) -> Published:
    """The figures that a paper published. Raises ConfigError for a file with a wrong one."""
    text = (resources.files(__package__) / "published" / f"{name}.yaml").read_text("utf-8")
    read = yaml.safe_load(text)
    for key, each in read["figures"].items():
        if lacking := _FIELDS - set(each):
            raise ConfigError([f"{name}.yaml: {key} lacks {', '.join(sorted(lacking))}"])
        if each["read"] not in READ or not isinstance(each["value"], int | float):
            raise ConfigError([f"{name}.yaml: {key} has a value or a read that is none"])
    return Published(name, read["title"], str(read["arxiv"]), read["figures"])


class Count(NamedTuple):
    """How many figures are how near."""

    compared: int
    near: int  # within `NEAR`
    fair: int  # within `FAR`, the near ones included
    alone: int  # ours without a published value
    not_run: int
    median: float  # of the errors, without their signs

    def __str__(self) -> str:
        words = f"within {NEAR:.0%}: {self.near} of {self.compared}, "
        words += f"within {FAR:.0%}: {self.fair}, median error {self.median:.0%}"
        words += f"; {self.alone} of ours alone" if self.alone else ""
        return words + (f"; {self.not_run} not run" if self.not_run else "")


def count(figures: Iterable[Figure]) -> Count:
    """How many of these figures are within the two bands."""
    figures = list(figures)
    errors = [abs(each.error) for each in figures if each.error is not None]
    near, fair = (sum(error <= band for error in errors) for band in (NEAR, FAR))
    alone = sum(each.published is None for each in figures)
    not_run = sum(each.ours is None for each in figures)
    median = statistics.median(errors) if errors else 0.0
    return Count(len(errors), near, fair, alone, not_run, median)
