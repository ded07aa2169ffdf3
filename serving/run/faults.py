"""Faults on purpose, for tests: wraps the places where things can go wrong. No JAX.

`SHIFTJAX_FAULT=<point>:<action>:<when>` (with SHIFTJAX_TESTING=1): at `when` calls of a point
(`3`: the third, `3+`: from the third on) do the action first. Code that is not under test has no
hooks in it: the wrappers are put around the objects of one engine from outside.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from serving.server.responses import Writer
from serving.server.service import Service
from shiftjax.core.engine import Engine
from shiftjax.options import ConfigError, shown

DELAY_SECONDS = 0.2
EXIT_CODE = 70


class FaultError(Exception):
    """Raised by the action `raise`."""


class Fault(NamedTuple):
    """What goes wrong where, and at which calls."""

    point: str
    action: str
    first: int
    forever: bool


def _raise(error: Exception) -> None:
    raise error


ACTIONS: Mapping[str, Callable[[], None]] = {
    "raise": lambda: _raise(FaultError("a fault on purpose")),
    "delay": lambda: time.sleep(DELAY_SECONDS),
    "oom": lambda: _raise(RuntimeError("RESOURCE_EXHAUSTED: a fault on purpose")),
    "exit": lambda: os._exit(EXIT_CODE),
    "hang": lambda: time.sleep(86400),
    "nan": lambda: None,  # done to the result of `fetch`
}
LOADING = "loading"  # stands for the loader itself: there is no engine yet
FOLLOWING = "following"  # for the steps of a follower, which has no engine
# point -> the objects and the method that it stands for
POINTS: Mapping[str, Callable[[Engine, Service], Iterable[tuple[Any, str]]]] = {
    "admission": lambda engine, service: [(service.engine, "submit")],
    "schedule": lambda engine, service: [(g.scheduler, "schedule") for g in engine.lanes],
    "allocation": lambda engine, service: [(g.scheduler.tables, "admit") for g in engine.lanes],
    "dispatch": lambda engine, service: [(g.runner, "run") for g in engine.lanes],
    "fetch": lambda engine, service: [(g.runner, "fetch") for g in engine.lanes],
    "commit": lambda engine, service: [(g.scheduler, "commit") for g in engine.lanes],
    "detokenise": lambda engine, service: [(service.engine, "make_text")],
    "grammar": lambda engine, service: [(service.grammars, "prepare")],
    "write": lambda engine, service: [(Writer, "chunks"), (Writer, "encoded")],
    "free": lambda engine, service: [(g.scheduler.tables, "release") for g in engine.lanes],
    "abort": lambda engine, service: [(g.scheduler, "abort") for g in engine.lanes],
    "drain": lambda engine, service: [(service.engine, "drain")],
    "metrics": lambda engine, service: [(service.metrics, "tokens")],
}


def parse_fault(text: str) -> Fault:
    """Read `<point>:<action>:<when>`. Raises ConfigError."""
    point, _, rest = text.partition(":")
    action, _, when = rest.partition(":")
    number = (when or "1").removesuffix("+")
    is_known = point in (*POINTS, LOADING, FOLLOWING) and action in ACTIONS and number.isdecimal()
    if not is_known or (action == "nan" and point != "fetch"):
        raise ConfigError([f"SHIFTJAX_FAULT: {shown(text)} is no <point>:<action>:<when>"])
    return Fault(point, action, int(number), when.endswith("+"))


def install(fault: Fault, engine: Engine, service: Service) -> Counter[str]:
    """Put a fault into one engine and its service; returns where it is counted when it happens."""
    happened: Counter[str] = Counter()
    for owner, name in POINTS[fault.point](engine, service):
        setattr(owner, name, faulty(fault, getattr(owner, name), happened))
    return happened


def faulty(
    fault: Fault, function: Callable[..., Any], happened: Counter[str] | None = None
) -> Callable[..., Any]:
    """The function with a fault in it."""
    count = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        is_due = count == fault.first or (fault.forever and count > fault.first)
        if is_due:
            if happened is not None:
                happened[fault.point] += 1
            ACTIONS[fault.action]()
        result = function(*arguments, **options)
        if is_due and fault.action == "nan":
            return result._replace(is_finite=np.zeros_like(result.is_finite))
        return result

    return wrapped
