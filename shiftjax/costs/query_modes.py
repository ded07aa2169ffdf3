"""As in which mode a program uses q and o where devices split positions: for each mode and size.

In SHIFT a device may have the queries of all its neighbours (`Layout.query_modes`). It reads q and
o as many times as wide, and multiplies with them; of decode rows normalisers alone are exchanged.
That is quicker with few tokens, where the latency of exchanges decides. No JAX.
"""

from collections.abc import Callable
from typing import NamedTuple

from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

Size = tuple[int, int]  # tokens and rows of a program


class QueryMode(NamedTuple):
    """The mode as which a program uses q and o, and why."""

    mode: Mode
    why: str = ""


# Chooses among the modes as which steps of a mode and a size may use q and o.
Choose = Callable[[Layout, Mode, Size], QueryMode]


def as_own(layout: Layout, mode: Mode, size: Size) -> QueryMode:
    """The step's own mode: for machines of unknown costs."""
    return QueryMode(layout.query_modes(mode)[0], "costs are unknown")


class QueryModes:
    """As in which mode the programs of a layout use q and o, chosen once for each."""

    def __init__(self, layout: Layout, choose: Choose = as_own):
        self.layout = layout
        self._choose = choose
        self._chosen: dict[tuple[Mode, Size], QueryMode] = {}

    def __call__(self, mode: Mode, size: Size) -> Mode:
        """The mode as which a program uses q and o."""
        return self.of(mode, size).mode

    def of(self, mode: Mode, size: Size) -> QueryMode:
        """The same, and why."""
        only, *others = self.layout.query_modes(mode)
        if not others:
            return QueryMode(only, "the only one")
        key = mode, (size[0], size[1])
        if key not in self._chosen:
            self._chosen[key] = self._choose(self.layout, *key)
        return self._chosen[key]
