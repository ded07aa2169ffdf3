"""The requests that `--trace`, `--set` and `--window` name."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from shiftjax.options import ConfigError
from shiftjax.sim.experiments import OF_USERS, SYNTHETIC, trace_from
from shiftjax.sim.trace import TraceRequest

WINDOW = "0:900"
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def trace_of(arguments: argparse.Namespace) -> Sequence[TraceRequest]:
    """The requests that `--trace`, `--set` and `--window` name. Raises ConfigError."""
    pairs = [text.partition("=") for text in arguments.set]
    options = {name: number_of(value, f"--set {name}") for name, _, value in pairs}
    if arguments.trace in SYNTHETIC:
        if arguments.window is not None:
            raise ConfigError(["--window is for trace files; use --set seconds=..."])
        return trace_from({"kind": arguments.trace} | options)
    if options.keys() - set(OF_USERS):
        loop = f"; {' and '.join(OF_USERS)} make a closed loop of a file, too"
        raise ConfigError(["--set is for synthetic traces: " + ", ".join(SYNTHETIC) + loop])
    return window_of(arguments.trace, arguments.window, options)


def window_of(
    trace: str, window: str | None, options: Mapping[str, Any] = NO_OPTIONS
) -> Sequence[TraceRequest]:
    """The requests of a file in a window, START:SECONDS. Raises ConfigError."""
    start, _, seconds = (window or WINDOW).partition(":")
    bounds = {"start": number_of(start, "--window"), "seconds": number_of(seconds, "--window")}
    return trace_from({"file": trace, **bounds, **options})


def number_of(text: str, where: str) -> float | int:
    """A number that a flag says. Raises ConfigError."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise ConfigError([f"{where}: {text!r} is no number"])
