"""One static HTML page of tables and plots. Plots need matplotlib (the extra `plots`)."""

import base64
import html
import io
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shiftjax.arch.weights import layer_parameters
from shiftjax.costs.step_costs import CostModel, StepCost
from shiftjax.options import ConfigError
from shiftjax.parallel.arrangements import spelled
from shiftjax.sim.estimate import Estimate
from shiftjax.sim.experiments import SweepPoint, write_rows
from shiftjax.sim.replay import Replay
from shiftjax.sim.replay_metrics import (
    arrangements,
    longest_mode,
    makespan,
    phase_spans,
    queue_by_priority,
    shares,
    throughput_over_time,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"base": "tab:blue", "shift": "tab:orange"}
MOST_CHANGES = 100  # of a fleet, that a table shows
PHASE_COLOURS = {"prefill": "tab:blue", "decode": "tab:orange", "switch": "black"}
BETWEEN = "tab:purple"  # modes that split tokens less than base
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;max-width:70em;margin:2em auto;overflow-wrap:anywhere}}
div{{overflow-x:auto}}img{{max-width:100%}}
table{{border-collapse:collapse;font-size:85%;overflow-wrap:normal}}
td,th{{padding:.2em .6em;border:1px solid #ccc;
text-align:right}}</style><h1>{title}</h1>{body}"""


class Report:
    """Sections in order; `save` writes one page that needs nothing beside it, and its images.

    All files go to `directory`.
    """

    def __init__(self, title: str, directory: Path):
        self.title = title
        self._directory = directory
        self._parts: list[str] = []
        self._images: dict[str, bytes] = {}  # by the name of a file

    def table(self, heading: str, rows: Sequence[Mapping[str, Any]], name: str = "") -> None:
        """Add a table with the columns of the first row; files of this name have the rows, too."""
        if name:
            write_rows(self._directory, name, rows)
        if not rows:
            return
        columns = list(rows[0])
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{_shown(row.get(column))}</td>" for column in columns) + "</tr>"
            for row in rows
        )
        table = f"<table><tr>{head}</tr>{body}</table>"
        self._parts.append(f"<h2>{html.escape(heading)}</h2><div>{table}</div>")

    def text(self, words: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{html.escape(words)}</p>")

    def plot(self, heading: str, figure: "Figure") -> None:
        """Add a figure as an image inside the page."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg")
        name = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
        self._images[f"{name}.svg"] = buffer.getvalue()
        data = base64.b64encode(buffer.getvalue()).decode()
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(heading)}">'
        self._parts.append(f"<h2>{html.escape(heading)}</h2>{image}")

    def sweep(
        self, heading: str, points: Sequence[SweepPoint], metrics: Sequence[str], name: str
    ) -> None:
        """Add the rows of a sweep, its metrics by rate, and its last rate over time.

        Then what became of fleets and of phases, where there are any. Files of this name have the
        rows, too.
        """
        rows = [point.row() for point in points]
        loads = [(point.rate, point.users) for point in points]
        last = [p.replay for p, load in zip(points, loads, strict=True) if load == loads[-1]]
        self.table(heading, rows, name)
        if len(last) < len(points):
            self.plot(f"{heading}: latency and throughput", frontier(rows))
            for metric in metrics:
                self.plot(f"{heading}: {metric} by rate", percentiles_by_rate(rows, metric))
        self.plot(f"{heading}: throughput over time, at the last rate", time_lines(last))
        self._fleets([replay for replay in last if replay.fleet])
        self._phases([replay for replay in last if replay.phases])

    def _fleets(self, last: Sequence[Replay]) -> None:
        """Add what became of the groups of every fleet, at the last rate, and how long who waited.

        Of all changes the first `MOST_CHANGES`.
        """
        for replay in last:
            heading = f"{replay.deployment.name}: arrangements"
            rows = [{"arrangement": name, "share": share} for name, share in shares(replay).items()]
            self.table(heading, rows)
            self.plot(f"{heading} over time", unit_strips(replay))
            turns = replay.fleet.turns if replay.fleet else ()
            changes = [
                {
                    "seconds": turn.seconds,
                    "arrangement": spelled(turn.arrangement),
                    "reason": turn.reason,
                    "kind": turn.kind,
                    "sequences moved": turn.num_sequences,
                    "recomputed": turn.num_recomputed,
                }
                for turn in turns[:MOST_CHANGES]
            ]
            self.table(f"{replay.deployment.name}: changes", changes)
        self.table("queue by priority", [row for each in last for row in queue_by_priority(each)])

    def _phases(self, last: Sequence[Replay]) -> None:
        """Add when every engine in phases was in which, at the last rate, and its switches."""
        if not last:
            return
        self.plot("phases over time", phase_strips(last))
        for replay in last:
            switches = replay.phases.switches if replay.phases else ()
            rows = [each._asdict() for each in switches[:MOST_CHANGES]]
            self.table(f"{replay.deployment.name}: switches", rows)

    def save(self) -> None:
        """Write the page, and beside it every image as a file of its own."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name, image in self._images.items():
            (self._directory / name).write_bytes(image)
        page = PAGE.format(title=html.escape(self.title), body="".join(self._parts))
        (self._directory / "report.html").write_text(page, encoding="utf-8")


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else html.escape(str(value))


def new_axes(rows: int = 1, strips: bool = False) -> tuple["Figure", Any]:
    """A figure without a display, of `rows` panels; with `strips` each has a flat one below it.

    Raises ConfigError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        message = "plots need matplotlib: pip install 'shiftjax[plots]', or leave --out away"
        raise ConfigError([message]) from None
    figure = Figure(figsize=(9, (3.6 if strips else 3.2) * rows + 0.8), layout="constrained")
    if strips:
        panels = figure.subplots(2 * rows, 1, squeeze=False, height_ratios=[8, 1] * rows)[:, 0]
        return figure, list(zip(panels[::2], panels[1::2], strict=True))
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def _by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["name"]].append(row)
    return groups


def frontier(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Latency against throughput: a line per deployment, a point per rate."""
    figure, (axes,) = new_axes()
    for name, points in _by_name(rows).items():
        x = [point["tokens_per_second"] for point in points]
        axes.plot(x, [point["completion_p50_seconds"] for point in points], "o-", label=name)
    finish(axes, "tokens/s (input and output)", "median completion, s", log=True)
    return figure


def side_by_side(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> "Figure":
    """Measured bars beside predicted ones, a panel for each column."""
    figure, panels = new_axes(len(columns))
    places = range(len(rows))
    for axes, column in zip(panels, columns, strict=True):
        for shift, kind in ((-0.2, ""), (0.2, "predicted_")):
            heights = [row[f"{kind}{column}"] or 0.0 for row in rows]
            label = "predicted" if kind else "measured"
            axes.bar([place + shift for place in places], heights, 0.4, label=label)
        axes.set_xticks(places, [row["name"] for row in rows])
        finish(axes, "", column.replace("_", " "))
    return figure


def percentiles_by_rate(rows: Sequence[Mapping[str, Any]], metric: str) -> "Figure":
    """p50, p90 and p99 of a metric against the arrival rate, or the number of users."""
    figure, panels = new_axes(3)
    load, label = ("users", "users") if "users" in rows[0] else ("rate", "requests/s")
    for axes, percentile in zip(panels, (50, 90, 99), strict=True):
        for name, points in _by_name(rows).items():
            values = [point[f"{metric}_p{percentile}_seconds"] for point in points]
            axes.plot([point[load] for point in points], values, "o-", label=name)
        finish(axes, label, f"{metric} p{percentile}, s", log=True)
    return figure


def time_lines(replays: Sequence[Replay], seconds: float = 5.0) -> "Figure":
    """Tokens per second over time, coloured by mode, a panel per deployment.

    Decodes are few tokens, so the strip below says which mode took most of the devices' time.
    """
    figure, panels = new_axes(len(replays), strips=True)
    for (axes, strip), replay in zip(panels, replays, strict=True):
        bottom = 0.0
        for label in replay.labels:
            at, rate = throughput_over_time(replay, seconds, [label])
            colour = COLOURS.get(label, BETWEEN)
            axes.bar(at, rate, seconds, bottom, align="edge", color=colour, label=label)
            bottom = bottom + rate
        at, longest = longest_mode(replay, seconds)
        colours = [COLOURS.get(label, BETWEEN) for label in longest]
        strip.bar(at, 1.0, seconds, align="edge", color=colours)
        strip.set_yticks([])
        strip.set_ylabel("most\ntime", rotation=0, ha="right", va="center", fontsize=8)
        strip.set_xlabel("s")
        strip.set_ylim(0, 1)
        end = max(makespan(replay), seconds)
        for each in (axes, strip):
            each.set_xlim(0, math.ceil(end / seconds) * seconds)
        axes.set_title(replay.deployment.name)
        finish(axes, "", "tokens/s")
    return figure


def unit_strips(replay: Replay) -> "Figure":
    """Units over time, coloured by the width of their group: the wider, the darker."""
    figure, (axes,) = new_axes()
    widths = replay.deployment.widths
    shades = {w: (0.1, 0.3, 0.6, (1 + n) / len(widths)) for n, w in enumerate(widths)}
    for begin, end, groups in arrangements(replay):
        for group in groups:
            place = (group.first, 0.95 * group.width)
            axes.broken_barh([(begin, end - begin)], place, facecolors=[shades[group.width]])
    for width, shade in shades.items():
        axes.barh(0, 0, color=[shade], label=f"groups of {width}")
    finish(axes, "s", "unit")
    return figure


def phase_strips(replays: Sequence[Replay]) -> "Figure":
    """A strip for each deployment: prompts, decodes, and the switches between them."""
    figure, (axes,) = new_axes()
    names = [replay.deployment.name for replay in replays]
    for number, replay in enumerate(replays):
        for name, colour in PHASE_COLOURS.items():
            spans = [(a, b - a) for a, b, phase in phase_spans(replay) if phase == name]
            label = name if number == 0 else None
            axes.broken_barh(spans, (number - 0.4, 0.8), facecolors=colour, label=label)
    axes.set_yticks(range(len(names)), names)
    finish(axes, "s", "")
    return figure


def breakdown_bars(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Seconds by kind against context length, a panel per mode."""
    labels = list(dict.fromkeys(row["mode"] for row in rows))
    figure, panels = new_axes(len(labels))
    for axes, label in zip(panels, labels, strict=True):
        points = [row for row in rows if row["mode"] == label]
        contexts = [f"{point['context']:,}" for point in points]
        bottom = [0.0] * len(points)
        for kind in StepCost._fields:
            share = [point[kind] / sum(point[k] for k in StepCost._fields) for point in points]
            axes.bar(contexts, share, bottom=bottom, label=kind)
            bottom = [a + b for a, b in zip(bottom, share, strict=True)]
        axes.set_title(label)
        finish(axes, "tokens of context", "share of the step")
    return figure


def memory_bars(estimates: Sequence[Estimate]) -> "Figure":
    """Gigabytes of a device by deployment."""
    figure, (axes,) = new_axes()
    fitting = [estimate for estimate in estimates if estimate.fits]
    names, rows = [e.deployment.name for e in fitting], [e.row() for e in fitting]
    left = [0.0] * len(rows)
    for kind in ("weights_gb", "shift_copy_gb", "workspace_gb", "kv_gb"):
        widths = [row[kind] for row in rows]
        axes.barh(names, widths, left=left, label=kind.removesuffix("_gb"))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    finish(axes, "GB per device", "")
    return figure


def roofline(costs: CostModel, counts: Sequence[int] = (1, 8, 64, 256, 1024, 8192)) -> "Figure":
    """FLOP/s of the layers' products against tokens per FLOP byte, base and shift, and the roof."""
    figure, (axes,) = new_axes()
    machine, formats = costs.machine, costs.formats
    peak = machine.matmul_flops.get(formats.weights, machine.matmul_flops[formats.activations])
    for mode in dict.fromkeys((costs.layout.base, costs.layout.shift)):
        t = costs.layout.ways(mode)
        intensity, reached = [], []
        for count in counts:
            rows = -(-count // mode.sp)
            flops = 2 * rows * layer_parameters(costs.model) / t
            intensity.append(2 * rows / formats.weight_bytes)
            reached.append(flops / costs.products_seconds(mode, count))
        axes.plot(intensity, reached, "o-", color=COLOURS[mode.label], label=mode.label)
    roof = [1.0, peak / machine.memory_bytes_per_second, 1e5]
    heights = [min(peak, x * machine.memory_bytes_per_second) for x in roof]
    axes.plot(roof, heights, "k--", label=machine.name)
    axes.set_xscale("log")
    finish(axes, "FLOP per byte of weights", "FLOP/s per device", log=True)
    return figure


def finish(axes: "Axes", x: str, y: str, *, log: bool = False) -> None:
    """Name the axes, and draw grid and legend; `log`: a logarithmic y axis, where it can be."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # beside what is drawn
    least = axes.dataLim.minposy
    if not log or not math.isfinite(least):  # a queue that nobody waited in is all zero
        return
    if axes.dataLim.y0 > 0:
        axes.set_yscale("log")
        return
    # Linear below the least value above 0, so that zeros, which have no logarithm, are on the axis.
    axes.set_yscale("symlog", linthresh=least, linscale=0.5)
    axes.set_ylim(bottom=0)
