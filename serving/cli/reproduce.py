"""The command `reproduce`."""

import argparse
import time

from shiftjax.config import EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.options import ConfigError
from shiftjax.reproduce.figures import Curve, Figure, Options, count, published
from shiftjax.reproduce.papers import PAPERS
from shiftjax.reproduce.run import markdown, parts_of, results_of, write
from shiftjax.sim.report import new_axes


def reproduce(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Run the evaluations of a paper or of all, print every figure beside ours, and count."""
    traces, names = arguments.traces, [arguments.paper] if arguments.paper else list(PAPERS)
    if traces is not None and not traces.is_dir():
        raise ConfigError([f"--traces {traces}: is no folder"])
    only = arguments.only.split(",") if arguments.only else []
    if only and not arguments.paper:
        raise ConfigError(["--only names parts of one paper: say which paper, too"])
    for name in names:
        parts_of(name, only)
    if arguments.out:
        new_axes()  # what is missing for pictures is said before minutes of replays
    options = Options(arguments.quick, traces)
    results: dict[str, list[Figure | Curve]] = {}
    for name in names:
        begin = time.monotonic()
        results[name] = list(results_of(name, options, only))
        figures = [each for each in results[name] if isinstance(each, Figure)]
        paper = published(name)
        seconds = time.monotonic() - begin
        print(f"## {paper.title} (arXiv {paper.arxiv}), run in {seconds:.0f} s\n")
        print(f"{markdown(figures)}\n\n{count(figures)}\n", flush=True)
    if len(names) > 1:
        figures = [each for found in results.values() for each in found if isinstance(each, Figure)]
        print(f"all papers: {count(figures)}")
    if arguments.out:
        write(results, arguments.out)
    return 0
