"""`shiftjax plan --rate`: the least GPUs for a load."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shiftjax.costs.machine_files import load_machine
from shiftjax.options import ConfigError
from shiftjax.sim.advice import Advice, Goal, Load, advise, in_words
from shiftjax.sim.experiments import as_text
from shiftjax.sim.modelled import Target
from shiftjax.sim.report import Report, pareto
from shiftjax.sim.trace import MOST_CV

NEEDED = ("rate", "ttft", "tpot")
ASKED = (*NEEDED, "percentile", "gpu_price", "length_cv", "trace", "window")
PERCENTILE = 90


def is_asked(arguments: argparse.Namespace) -> bool:
    """Whether the flags ask for it. Raises ConfigError where some are missing, or mean nothing."""
    given = {name: getattr(arguments, name) for name in ASKED}
    if all(value is None for value in given.values()):
        return False
    if given["trace"] is not None and given["rate"] is None:
        given["rate"] = 1.0  # its own
    missing = ", ".join(f"--{name}" for name in NEEDED if given[name] is None)
    if missing:
        raise ConfigError([f"to find the least GPUs for a load, {missing} is missing"])
    if given["window"] is not None and given["trace"] is None:
        raise ConfigError(["--window is for --trace"])
    if arguments.compile is not None:
        raise ConfigError(["--compile compiles the meshes of a whole machine: drop it, or --rate"])
    if arguments.kernels is not None:
        raise ConfigError(["--kernels is of one machine, whole: drop it, or --rate"])
    names = ("input", "output", "length_cv")
    lengths = [name for name in names if getattr(arguments, name) is not None]
    if given["trace"] is not None and lengths:
        words = "--trace has lengths of its own: drop one"
        raise ConfigError([f"--{name.replace('_', '-')}: {words}" for name in lengths])
    if not 0 <= (given["length_cv"] or 0.0) <= MOST_CV:
        raise ConfigError([f"--length-cv must be a number from 0 to {MOST_CV:g}"])
    wrong = [f"--{name}" for name in NEEDED if not 0 < given[name] < math.inf]
    if wrong:
        raise ConfigError([f"{name} must be a number above 0" for name in wrong])
    return True


def least_gpus(
    arguments: argparse.Namespace,
    target: Target,
    settings: Mapping[str, Any],
    load: Load,
) -> int:
    """Print the advice and all that was tried; 1 where nothing answers the load."""
    names = arguments.machine.split(",")
    targets = [replace(target, machine=load_machine(name, arguments.hosts)) for name in names]
    prices = _prices(arguments.gpu_price, [each.machine.name for each in targets])
    rate: float = arguments.rate or load.rate or 0.0
    goal = Goal(rate, arguments.ttft, arguments.tpot, arguments.percentile or PERCENTILE)
    advice = advise(targets, load, goal, prices, **settings)
    rows = [trial.row(prices) for trial in advice.trials]
    if rows:
        print(as_text(rows), end="\n\n")
    print(in_words(advice, prices))
    if arguments.out:
        _write(arguments.out, advice, load, prices)
    return 0 if advice.best else 1


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


def _write(out: Path, advice: Advice, load: Load, prices: Mapping[str, float]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    data = {
        "goal": advice.goal._asdict(),
        "mean_lengths": vars(load.mean),
        "advice": in_words(advice, prices),
        "best": advice.best.row(prices) if advice.best else None,
        "not_tried": advice.reasons,
    }
    (out / "advice.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    report = Report("the least GPUs for a load", out)
    report.text(in_words(advice, prices))
    report.table("tried", [trial.row(prices) for trial in advice.trials], "trials")
    if advice.trials:
        report.plot("tokens per second of a device and of a user", pareto(advice.trials))
    report.save()
