"""What a traced kernel does, read off its equations."""

from collections.abc import Iterator
from typing import Any


def launch_in(eqn: Any, name: str) -> Any | None:
    """Return the launch of a kernel of this name that an equation calls."""
    found = (e for jaxpr in inner(eqn) for e in equations(jaxpr) if e.params.get("name") == name)
    return next(found, None)


def inner(eqn: Any) -> list[Any]:
    """Return the programs that an equation has."""
    params = eqn.params.values()
    each = (x for param in params for x in (param if isinstance(param, tuple | list) else (param,)))
    return [jaxpr for x in each if hasattr(jaxpr := getattr(x, "jaxpr", x), "eqns")]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield equations, with those that are inside of them behind them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for each in inner(eqn):
            yield from equations(each)
