"""`shiftjax plan --rate` and `--users`: the least GPUs for a load; `--gpus`: the most load."""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from serving.cli.mesh_flags import LENGTH_CV, MARGIN, MOST_USERS
from shiftjax.costs.machine_files import load_machine
from shiftjax.options import ConfigError
from shiftjax.sim.advice import MOST_REPLAYS, Advice, least_devices
from shiftjax.sim.advice_plots import curve_rows, pareto, slo_curve
from shiftjax.sim.advice_words import in_words
from shiftjax.sim.estimate import Workload
from shiftjax.sim.experiments import as_text
from shiftjax.sim.load import Limits, Load, even_load, load_of
from shiftjax.sim.modelled import Target
from shiftjax.sim.most_load import most_load
from shiftjax.sim.report import Report
from shiftjax.sim.serve_command import settings_file
from shiftjax.sim.servers import all_servers
from shiftjax.sim.trace import MOST_CV, TraceRequest
from shiftjax.sim.trials import Trials
from shiftjax.sim.user_load import even_users, users_of

NEEDED = ("rate", "ttft", "tpot")
ASKED = (
    *(*NEEDED, "users", "think", "gpus", "percentile", "gpu_price", "length_cv", "margin"),
    *("trace", "window"),
)
PERCENTILE = 90
ENGINE = "engine.yaml"  # for `shiftjax serve --config`
LENGTHS = "--trace has lengths of its own: drop one"
CLASHES = (
    ("input", "trace", f"--input: {LENGTHS}"),
    ("output", "trace", f"--output: {LENGTHS}"),
    ("length_cv", "trace", f"--length-cv: {LENGTHS}"),
    ("rate", "gpus", "--gpus asks how many requests/s they answer: drop it, or --rate"),
    ("rate", "users", "--users ask again when they are answered, at no rate: drop one"),
    ("gpu_price", "gpus", "--gpu-price chooses how many GPUs, and --gpus says it: drop one"),
)
"""A flag, one that it makes no sense with, and why."""
WHOLE = {
    "compile": "--compile compiles the meshes of a whole machine: drop it, or --rate",
    "kernels": "--kernels is of one machine, whole: drop it, or --rate",
}
BOUNDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("length_cv", lambda cv: 0 <= cv <= MOST_CV, f"a number from 0 to {MOST_CV:g}"),
    ("margin", lambda share: 0 <= share < 1, "a share of the limits, from 0 to less than 1"),
    ("gpus", lambda num: num >= 1, "at least 1"),
    ("users", lambda num: num >= 1 or num == MOST_USERS, "at least 1, or `most` with --gpus"),
    ("think", lambda seconds: 0 <= seconds < math.inf, "0 or more seconds"),
)


class Sought(NamedTuple):
    """A model on the first of the machines, settings that are given, and whether KV's format is."""

    target: Target
    settings: Mapping[str, Any]
    is_cache_open: bool


def is_asked(arguments: argparse.Namespace) -> bool:
    """Whether the flags ask for it. Raises ConfigError where some are missing, or mean nothing."""
    given = {name: getattr(arguments, name) for name in ASKED}
    if all(value is None for value in given.values()):
        return False
    others = ("trace", "gpus", "users")
    if given["rate"] is None and any(given[name] is not None for name in others):
        given["rate"] = 1.0  # the trace's own, or the one that is looked for, or none
    missing = ", ".join(f"--{name}" for name in NEEDED if given[name] is None)
    if missing:
        words = "to find the least GPUs for a load, or with --gpus the most load for them"
        raise ConfigError([f"{words}, {missing} is missing"])
    without = {name: given[name] is not None for name in others}
    problems = [words for name, flag, words in CLASHES if without[flag] and _has(arguments, name)]
    if given["window"] is not None and given["trace"] is None:
        problems.append("--window is for --trace")
    if given["think"] is not None and given["users"] is None:
        problems.append("--think is for --users")
    if given["users"] is not None and (given["users"] == MOST_USERS) != (given["gpus"] is not None):
        problems.append("--users: say how many, or with --gpus that it is the `most`")
    problems += [words for name, words in WHOLE.items() if _has(arguments, name)]
    wrong = [f"--{name}" for name in NEEDED if not 0 < given[name] < math.inf]
    problems += [f"{name} must be a number above 0" for name in wrong]
    problems += [
        f"--{name.replace('_', '-')} must be {words}"
        for name, is_good, words in BOUNDS
        if given[name] is not None and not is_good(given[name])
    ]
    if problems:
        raise ConfigError(problems)
    return True


def _has(arguments: argparse.Namespace, name: str) -> bool:
    return getattr(arguments, name) is not None


def decide(
    arguments: argparse.Namespace,
    sought: Sought,
    workload: Callable[[], Workload],
    requests: Sequence[TraceRequest] | None,
) -> int:
    """Print the advice and all that was tried; 1 where nothing keeps the limits."""
    target, settings, is_cache_open = sought
    names = arguments.machine.split(",")
    targets = [replace(target, machine=load_machine(name, arguments.hosts)) for name in names]
    prices = _prices(arguments.gpu_price, [each.machine.name for each in targets])
    limits = Limits(arguments.ttft, arguments.tpot, arguments.percentile or PERCENTILE)
    load = _load(arguments, limits, target.model.max_position_embeddings, workload, requests)
    margin = MARGIN if arguments.margin is None else arguments.margin
    trials = Trials(load, limits, margin, MOST_REPLAYS)
    field = all_servers(targets, load, limits, is_cache_open, settings)
    if arguments.gpus is not None:
        advice = most_load(field, trials, arguments.gpus, settings)
    else:
        rate: float = arguments.rate or arguments.users or load.rate or 0.0
        advice = least_devices(field, trials, rate, prices, settings)
    words = in_words(advice, prices, arguments.model or "")
    print(words)
    rows = [trial.row(prices) for trial in trials.all]
    if rows:
        print("\nAll that was tried, in order:\n" + as_text(rows))
    if arguments.out:
        _write(arguments.out, advice, prices, words)
        if advice.best:
            model = arguments.model or target.model.name
            text = settings_file(model, advice.best.deployment)
            (arguments.out / ENGINE).write_text(text, encoding="utf-8")
    return 0 if advice.best else 1


def _load(
    arguments: argparse.Namespace,
    limits: Limits,
    longest: int,
    workload: Callable[[], Workload],
    requests: Sequence[TraceRequest] | None,
) -> Load:
    """Of a trace or of mean lengths, at a rate or of users. Raises ConfigError."""
    think = None if arguments.users is None else arguments.think or 0.0
    if requests:
        return load_of(requests, longest) if think is None else users_of(requests, think, longest)
    cv = LENGTH_CV if arguments.length_cv is None else arguments.length_cv
    if think is None:
        return even_load(workload(), limits, cv, longest)
    return even_users(workload(), think, cv, longest)


def _prices(text: str | None, machines: Sequence[str]) -> dict[str, float]:
    """Dollars of a device and hour by machine; empty: none were given. Raises ConfigError."""
    if text is None:
        return {}
    parts = [part.partition("=") for part in text.split(",")]
    pairs = {name: value for name, _, value in parts} if "=" in text else {}
    try:
        prices = {name: float(pairs[name] if pairs else text) for name in machines}
    except KeyError as error:
        raise ConfigError([f"--gpu-price has no price of {error.args[0]}"]) from None
    except ValueError:
        raise ConfigError([f"--gpu-price: {text!r} is no price, nor prices by machine"]) from None
    if unknown := [name for name in pairs if name not in machines]:
        raise ConfigError([f"--gpu-price names {unknown[0]}, which --machine does not"])
    if not all(0 < price < math.inf for price in prices.values()):
        raise ConfigError(["--gpu-price must be above 0"])
    return prices


def _write(out: Path, advice: Advice, prices: Mapping[str, float], words: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    trials = advice.trials
    rows = [trial.row(prices) for trial in trials.all]
    load = trials.load
    asked = {load.word: advice.question.rate, "num_devices": advice.question.num_devices}
    data = {
        "asked": asked | ({} if load.think is None else {"think_seconds": load.think}),
        "limits": trials.limits._asdict() | {"margin": trials.margin},
        "mean_lengths": vars(load.mean),
        "advice": words,
        "best": advice.best.row(prices) if advice.best else None,
        "not_tried": advice.reasons,
    }
    (out / "advice.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    title = "the least GPUs for a load" if advice.question.rate else "the most load for GPUs"
    report = Report(title, out)
    for line in words.splitlines():
        report.text(line)
    report.table("tried", rows, "trials")
    if by_rate := curve_rows(advice):
        title = f"share of requests inside the limits by {load.word}"
        report.plot(title, slo_curve(advice, by_rate))
        report.table(f"by {load.word}", by_rate, f"by_{load.word}")
    if trials.all:
        report.plot("tokens per second of a device and of a user", pareto(trials.all))
    report.save()
