"""Published figures beside what the simulator gives, with one set of constants; Markdown.

    python scripts/labs/published_figures.py [PART ...]
    python scripts/labs/published_figures.py check --write

`fit` and `check` are the tables of `benchmarks/published`: figures that constants were fitted to,
and figures that only check them. `check --write` renews `shiftjax/sim/error_bands.csv`.

Evaluations of papers are `shiftjax reproduce`. TensorRT-LLM: some lengths of its performance
overview of version 1.0, FP8, with as many requests as there; its host overlaps and it has sizes of
its own. `experts`: a mixture of experts with `SKEW`, the pairs of the most loaded device over the
mean: what loads that follow a power law cost over even ones in the tables of
ai-dynamo/aiconfigurator (4 H200s, 4,096 tokens or more, TensorRT-LLM 1.3.0rc10: 1.30 to 1.35). All
parts take minutes.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shiftjax.sim.error_bands import FILE as BANDS
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target
from shiftjax.sim.named import deploy
from shiftjax.sim.published import error_rows, read_figures
from shiftjax.sim.replay import replay
from shiftjax.sim.replay_metrics import makespan
from shiftjax.sim.trace import TraceRequest

TABLES = Path(__file__).parents[2] / "benchmarks" / "published"
PROMPT, OUTPUT = 4096, 250
Figure = tuple[str, float, float]  # what, published, simulated

LENGTHS = ((128, 2048, 3000), (1000, 1000, 3000), (2048, 128, 3000), (5000, 500, 1500))
"""Tokens in, tokens out, requests."""
SKEW = 1.33
TENSORRT_LLM = {  # (model, machine, TP): output tokens/s at LENGTHS
    ("llama-70b", "h200x8", 1): (4336, 2909, 442, 566),
    ("llama-70b", "h100x8", 2): (6651, 4205, 762, 898),
    ("llama-8b", "h200x8", 1): (26_221, 17_744, 3538, 3902),
    ("llama-8b", "h100x8", 1): (22_714, 15_220, 3450, 3459),
    ("llama-17b-16e", "h200x8", 4): (34_316, 21_636, 3699, 4605),
}


def target(model: str, machine: str, engine: str = "vllm", dtype: str = "fp8") -> Target:
    """A target by names."""
    return target_from({"model": model, "machine": machine, "engine": engine, "dtype": dtype})


def tensorrt_llm() -> Iterator[Figure]:
    """Output tokens per second with all requests there at once."""
    for (model, machine, tp), published in TENSORRT_LLM.items():
        yield from output_rates(model, machine, tp, published)


def output_rates(
    model: str, machine: str, tp: int, published: Sequence[float], skew: float = 1.0
) -> Iterator[Figure]:
    """One of TensorRT-LLM's rows, offline."""
    one = target(model, machine, "tensorrt_llm")
    one = replace(one, engine=replace(one.engine.offline, expert_skew=skew))
    degrees = f"dp=1,sp=1,tp={tp},policy=base"
    deployment = deploy(one, degrees, max_num_seqs=2048, memory_fraction=0.95)
    for (prompt, output, count), value in zip(LENGTHS, published, strict=True):
        run = replay([TraceRequest(0.0, prompt, output)] * count, one, deployment)
        what = f"{model}, {machine.removesuffix('x8')}, TP {tp}: {prompt} in, {output} out"
        yield what, value, count * output / makespan(run)


def experts() -> Iterator[Figure]:
    """A mixture of experts with uneven routing."""
    row = ("llama-17b-16e", "h200x8", 4)
    for what, published, simulated in output_rates(*row, TENSORRT_LLM[row], SKEW):
        yield f"{what}, skew {SKEW}", published, simulated


def show(figures: Iterator[Figure]) -> None:
    """Print a table, and how large the errors are."""
    errors = []
    print("| figure | published | simulated | error |\n| --- | --- | --- | --- |")
    for what, published, simulated in figures:
        errors.append(simulated / published - 1)
        print(f"| {what} | {published:.4g} | {simulated:.4g} | {errors[-1]:+.0%} |", flush=True)
    median = statistics.median(abs(error) for error in errors)
    within = sum(math.fabs(error) <= 0.15 for error in errors)
    print(f"\n{within} of {len(errors)} within 15%, median error {median:.0%}\n", flush=True)


def of_table(name: str) -> list[dict[str, Any]]:
    """The figures of a table beside predictions; prints them as they come."""
    print("| figure | published | simulated | error |\n| --- | --- | --- | --- |")
    rows = []
    for row in error_rows(read_figures(TABLES / f"{name}.csv")):
        shown = f"{row['published']:.4g} | {row['predicted']:.4g} | {row['error']:+.0%}"
        print(f"| {row['what']} | {shown} |", flush=True)
        rows.append(row)
    print("\n| system, load | figures | within 15% | within 25% |\n| --- | --- | --- | --- |")
    groups: dict[str, list[float]] = {}
    for row in rows:
        for group in (f"{row['system']}, {row['load']}", row["metric"], "all"):
            groups.setdefault(group, []).append(abs(row["error"]))
    for group, off in groups.items():
        counts = [sum(error <= limit for error in off) for limit in (0.15, 0.25)]
        print(f"| {group} | {len(off)} | {counts[0]} | {counts[1]} |")
    return rows


def write_bands(rows: list[dict[str, Any]]) -> None:
    """Renew the errors that bands are made of."""
    with BANDS.open("w", encoding="utf-8", newline="") as file:
        names: list[str] = ["system", "metric", "error", "what"]
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


PARTS: dict[str, Callable[..., Iterator[Figure]]] = {
    part.__name__: part for part in (tensorrt_llm, experts)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="published figures beside simulated ones")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--write", action="store_true", help="renew the error bands")
    arguments = parser.parse_args()
    known = (*PARTS, "fit", "check")
    if unknown := set(arguments.parts) - set(known):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    for name in {"fit", "check"} & set(arguments.parts):
        rows = of_table(name)
        if name == "check" and arguments.write:
            write_bands(rows)
    chosen = [name for name in arguments.parts if name in PARTS]
    for name in chosen if arguments.parts else PARTS:
        print(f"{PARTS[name].__doc__}\n")
        show(PARTS[name]())
