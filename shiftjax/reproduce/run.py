"""Runs the evaluations of papers and writes what they gave. No JAX."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shiftjax.options import ConfigError, unknown_name
from shiftjax.reproduce.figures import (
    FAR,
    NEAR,
    Curve,
    Figure,
    Options,
    Published,
    count,
    published,
)
from shiftjax.sim.report import Report, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

RATIOS = (0.125, 0.25, 0.5, 0.7, 0.85, 1, 1.15, 1.4, 2, 4, 8)  # that an axis names
MANIFOLD = 10  # times the least value: then an axis is logarithmic
Part = Callable[[Published, Options], Iterator[Figure | Curve]]


def parts_of(paper: str, only: Sequence[str] = ()) -> Mapping[str, Part]:
    """The parts of a paper, all or those of these names. Raises ConfigError for unknown ones."""
    parts = importlib.import_module(f"shiftjax.reproduce.{paper}").PARTS
    if wrong := [
        unknown_name(name, parts, f"part of {paper}") for name in only if name not in parts
    ]:
        raise ConfigError([f"{words}; there are {', '.join(parts)}" for words in wrong])
    return {name: parts[name] for name in only or parts}


def results_of(paper: str, options: Options, only: Sequence[str] = ()) -> Iterator[Figure | Curve]:
    """What a paper's parts give, as it comes."""
    for part in parts_of(paper, only).values():
        yield from part(published(paper), options)


def shown(value: float | None, unit: str) -> str:
    """A value with its unit, as short as one reads it."""
    if value is None:
        return "-"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return number if unit == "ratio" else f"{number} {unit}"


def markdown(figures: Sequence[Figure]) -> str:
    """A table of figures, and their notes below it; an error of more than `NEAR` is bold."""
    notes: dict[str, int] = {}
    lines = ["| figure | what | published | ours | error | note |", "| --- " * 6 + "|"]
    for each in figures:
        error = "-" if each.error is None else f"{each.error:+.0%}"
        if each.error is not None and abs(each.error) > NEAR:
            error = f"**{error}**"
        value = shown(each.published, each.unit)
        value += {"plot": " (read off a plot)", "report": " (reported)"}.get(each.read, "")
        note = f"{notes.setdefault(each.note, len(notes) + 1)}" if each.note else ""
        cells = each.number, each.what, value, shown(each.ours, each.unit), error, note
        lines.append(f"| {' | '.join(cells)} |")
    below = [f"{number}. {words}" for words, number in notes.items()]
    return "\n".join([*lines, *([""] if below else []), *below])


def write(results: Mapping[str, Sequence[Figure | Curve]], out: Path) -> None:
    """Write `report.html` with pictures, `figures.csv` and `.jsonl`, and `reproduce.md`.

    The last has what was published alone.

    Raises ConfigError where pictures cannot be drawn.
    """
    report = Report("Published evaluations, run again on simulated devices", out)
    rows, pages = [], []
    for name, found in results.items():
        figures = [each for each in found if isinstance(each, Figure)]
        paper = published(name)
        heading = f"{paper.title} (arXiv {paper.arxiv})"
        report.table(heading, [each.row() for each in figures])
        report.text(str(count(figures)))
        compared = [each for each in figures if each.error is not None]
        if compared:
            report.plot(f"{name}: ours over published", ratios(compared))
        for curve in found:
            if isinstance(curve, Curve):
                report.plot(f"{name}: {curve.title}", lines(curve))
        rows += [each.row() for each in figures]
        stated = [each for each in figures if each.published is not None]
        pages.append(f"## {heading}\n\n{markdown(stated)}\n\n{count(figures)}.\n")
    report.table("all figures", rows, "figures")
    report.save()
    (out / "reproduce.md").write_text("\n".join(pages), encoding="utf-8")


def ratios(figures: Sequence[Figure]) -> "Picture":
    """Every figure as ours over published, with the two bands."""
    picture, (axes,) = new_axes()
    picture.set_figheight(1.2 + 0.22 * len(figures))
    places = range(len(figures))
    axes.axvspan(1 - FAR, 1 + FAR, color="0.92", label=f"within {FAR:.0%}")
    axes.axvspan(1 - NEAR, 1 + NEAR, color="0.8", label=f"within {NEAR:.0%}")
    axes.plot([1 + (each.error or 0.0) for each in figures], places, "o", color="tab:blue")
    axes.set_yticks(places, [f"{each.number}: {each.what}"[:62] for each in figures], fontsize=7)
    axes.set_ylim(len(figures) - 0.5, -0.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_plain)
    low, high = axes.get_xlim()
    axes.set_xticks([each for each in RATIOS if low <= each <= high])
    axes.set_xlabel("ours over published")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    return picture


def lines(curve: Curve) -> "Picture":
    """A line for each name of a curve; an axis of tenfold values and more is logarithmic."""
    picture, (axes,) = new_axes()
    for name, points in curve.lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", label=name)
    every = [point for points in curve.lines.values() for point in points]
    for axis, values in zip("xy", zip(*every, strict=True), strict=True):
        if min(values) > 0 and max(values) >= MANIFOLD * min(values):
            getattr(axes, f"set_{axis}scale")("log", base=2)
            getattr(axes, f"{axis}axis").set_major_formatter(_plain)
    axes.set_xlabel(curve.x)
    axes.set_ylabel(curve.y)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return picture


def _plain(value: float, _: int) -> str:
    """A tick of a logarithmic axis as a number, not as a power."""
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"
