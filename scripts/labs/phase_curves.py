"""Where stages, TP and phases each win: by tokens out for tokens in, and by the speed of links.

    python scripts/labs/phase_curves.py --out results [--model codellama-34b] [--machine a10x8]

The two sweeps of Seesaw (arXiv 2503.06433), in closed form (`shiftjax/sim/phase_rates.py`):
requests per second of the best static deployment with stages, of the best without, and of the best
pair of phases, of requests that are all there at once. Static ones take the best of `BUDGETS` of a
step. Links between devices are scaled, those to the host are not. Writes rows and a page of plots.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shiftjax.sim.experiments import as_text, target_from, write_rows
from shiftjax.sim.modelled import Target
from shiftjax.sim.phase_choice import Candidate, choose_phases
from shiftjax.sim.report import Report, new_axes

LINKS = ("all_reduce", "all_to_all", "all_gather", "point_to_point")
BUDGETS = (512, 2048, 8192)
PROMPT, COUNT = 3000, 1000
OUTPUTS = (2, 10, 30, 100, 200, 400, 800, 1500, 3000)
SPEEDS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
KINDS = {
    "stages": lambda one: one.phases is None and one.prefill.pp > 1,
    "no stages": lambda one: one.phases is None and one.prefill.pp == 1,
    "phases": lambda one: one.phases is not None,
}


def best_of(target: Target, output: int) -> dict[str, Candidate]:
    """The quickest candidate of each kind."""
    host_bytes = int(target.machine.host_memory_bytes / 2)
    lengths = [(PROMPT, output)] * COUNT
    choices = [
        choose_phases(target, lengths, host_bytes, max_num_batched_tokens=budget)
        for budget in BUDGETS
    ]
    ranked = [one for choice in choices for one in choice.ranked]
    found = {kind: [one for one in ranked if is_one(one)] for kind, is_one in KINDS.items()}
    return {kind: min(some, key=lambda one: one.seconds) for kind, some in found.items() if some}


def faster(target: Target, factor: float) -> Target:
    """The same with links between devices that carry `factor` times as much."""
    links = {
        name: tuple(way.scaled(1.0, factor) for way in getattr(target.machine, name))
        for name in LINKS
    }
    return replace(target, machine=replace(target.machine, **links))


def row_of(name: str, value: float, best: dict[str, Candidate]) -> dict[str, Any]:
    """Requests per second, and who reaches them."""
    row: dict[str, Any] = {name: value}
    for kind, one in best.items():
        row |= {kind: COUNT / one.seconds, f"{kind}: which": one.name}
    static = max(row.get(kind, 0.0) for kind in ("stages", "no stages"))
    return row | {"gain of phases": row["phases"] / static}


def curves(report: Report, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Requests per second over the best static deployment, a line for each kind."""
    figure, (axes,) = new_axes()
    for kind in KINDS:
        points = [(row[name], row[kind], row) for row in rows if kind in row]
        static = [max(row["stages"], row["no stages"]) for *_, row in points]
        heights = [rate / best for (_, rate, _), best in zip(points, static, strict=True)]
        axes.plot([x for x, *_ in points], heights, "o-", label=kind)
    axes.set_xscale("log")
    axes.set_xlabel(name)
    axes.set_ylabel("requests/s over the best static")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    report.plot(f"by {name}", figure)
    report.table(f"by {name}", rows)


def sweep(target: Target) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """The rows of both sweeps."""
    ratio = "tokens out for a token in"
    yield ratio, [row_of(ratio, out / PROMPT, best_of(target, out)) for out in OUTPUTS]
    speed = "speed of links"
    yield speed, [row_of(speed, x, best_of(faster(target, x), 200)) for x in SPEEDS]


def main() -> None:
    """Print both sweeps; write them where asked."""
    parser = argparse.ArgumentParser(description="where stages, TP and phases each win")
    parser.add_argument("--model", default="codellama-34b")
    parser.add_argument("--machine", default="a10x8")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write rows and a page of plots")
    arguments = parser.parse_args()
    target = target_from(vars(arguments))
    title, out = f"stages and phases: {target.model.name} on {target.machine.name}", arguments.out
    report = Report(title, out) if out else None
    for name, rows in sweep(target):
        print(as_text(rows), "\n")
        if report:
            write_rows(out, name.replace(" ", "_"), rows)
            curves(report, name, rows)
    if report:
        report.save()


if __name__ == "__main__":
    main()
