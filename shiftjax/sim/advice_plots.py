"""Plots of an advice: what was tried, and how near to the edge the best is."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shiftjax.sim.advice import Advice
from shiftjax.sim.report import finish, new_axes
from shiftjax.sim.servers import Server
from shiftjax.sim.trials import Trial, measure_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # of the planned rate


def curve_rows(advice: Advice) -> list[dict[str, Any]]:
    """A row for every rate of the best, and of another cut of as many devices, or unchanged."""
    best = advice.best
    if best is None:
        return []
    trials, rows, rate = advice.trials, [], best.rate * best.num_servers
    drawn = [(best.server, best.num_servers, best.changed)]
    other = _other(advice, best, rate) or _unchanged(advice, best)
    if other is not None:
        drawn.append((other, best.num_devices // other.num_devices, ""))
    for server, num, changed in drawn:
        deployment, more = server.deployment, f", {changed}" if changed else ""
        name = f"{num} x {deployment.name}, KV {deployment.formats.kv}{more}"
        for factor in FACTORS:
            measured = measure_at(trials, server, num, factor * rate)
            rows.append(
                {
                    "name": name,
                    trials.load.word: factor * rate,
                    "inside": measured.inside,
                    "ttft_seconds": measured.ttft,
                    "tpot_seconds": measured.tpot,
                }
            )
    return rows


def _other(advice: Advice, best: Trial, rate: float) -> Server | None:
    """The server of another cut that is nearest to the limits in closed form."""
    own = best.server
    others = [
        each
        for each in advice.field.servers
        if best.num_devices % each.num_devices == 0
        and each.target.machine.name == own.target.machine.name
        and each.deployment.name != own.deployment.name
        and each.rank == own.rank
    ]

    def ratio(server: Server) -> float:
        num = best.num_devices // server.num_devices
        return server.ratio(advice.trials.load.each(rate, num), advice.trials.limits)

    return min(others, key=ratio, default=None)


def _unchanged(advice: Advice, best: Trial) -> Server | None:
    """The server that the best was made of; None: it is that."""
    kind = best.server.text.partition(",")[0]
    same = (
        each
        for each in advice.field.servers
        if each.target == best.target and each.text.partition(",")[0] == kind
    )
    return next(same, None) if best.changed else None


def slo_curve(advice: Advice, rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Shares of requests by rate; lines at the planned rate and at the share that is asked for."""
    figure, (axes,) = new_axes()
    best, limits, load = advice.best, advice.trials.limits, advice.trials.load
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        label, amounts = name.replace(", ", "\n"), [row[load.word] for row in own]
        axes.plot(amounts, [row["inside"] for row in own], "o-", label=label)
    if best is not None:
        planned = best.rate * best.num_servers
        axes.axvline(planned, color="grey", ls="--", label=f"planned: {load.shown(planned)}")
    axes.axhline(limits.percentile / 100, color="black", ls=":", label=f"{limits.percentile}%")
    axes.set_ylim(0, 1.03)
    axes.set_xlim(left=0)
    finish(axes, f"{load.unit} of all servers", "share inside both limits")
    return figure


def pareto(trials: Sequence[Trial]) -> "Figure":
    """Tokens per second of a device against those of a user; filled: the limits are kept.

    Of a cut that was tried with several numbers of servers, the last that keeps them has its name.
    """
    figure, (axes,) = new_axes()
    names: dict[tuple[str, str], tuple[float, float]] = {}
    for machine in dict.fromkeys(trial.target.machine.name for trial in trials):
        own = [trial for trial in trials if trial.target.machine.name == machine and trial.tpot]
        points = [(1 / t.tpot, t.tokens_per_second / t.server.num_devices) for t in own]
        (line,) = axes.plot(*zip(*points, strict=True), "o", mfc="none", label=machine)
        kept = [(trial, at) for trial, at in zip(own, points, strict=True) if trial.meets]
        for trial, at in kept:
            axes.plot(*at, "o", color=line.get_color())
            names[machine, trial.deployment.name] = at
    places = sorted(names.items(), key=lambda item: item[1])
    for number, ((_, name), at) in enumerate(places):
        offset = (0, 6) if number % 2 else (0, -12)  # neighbours above and below
        axes.annotate(name, at, offset, textcoords="offset points", fontsize=7, ha="center")
    axes.margins(x=0.15, y=0.15)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    finish(axes, "tokens/s of a user (1 / time per token)", "tokens/s of a device")
    return figure
