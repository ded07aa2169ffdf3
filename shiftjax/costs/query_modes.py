"""As in which mode a program uses q and o where devices split positions: for each mode and size.

In SHIFT a device may have the queries of all its neighbours (`Layout.query_modes`). It reads q and
o as many times as wide, and multiplies with them; of decode rows normalisers alone are exchanged.
That is quicker with few tokens, where the latency of exchanges decides. No JAX.
"""

from collections.abc import Callable

from shiftjax.costs.chosen_modes import ChosenMode, ChosenModes
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

Size = tuple[int, int]  # tokens and rows of a program


# Chooses among the modes as which steps of a mode and a size may use q and o.
Choose = Callable[[Layout, Mode, Size], ChosenMode]


def as_own(layout: Layout, mode: Mode, size: Size) -> ChosenMode:
    """The step's own mode: for machines of unknown costs."""
    return ChosenMode(layout.query_modes(mode)[0], "costs are unknown")


class QueryModes(ChosenModes[Size]):
    """As in which mode the programs of a layout use q and o, by their tokens and rows."""

    def __init__(self, layout: Layout, choose: Choose = as_own):
        super().__init__(layout, layout.query_modes, choose)
