"""As in which mode the programs of a layout use some weights, chosen once for each. No JAX."""

from collections.abc import Callable
from typing import NamedTuple

from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout


class ChosenMode(NamedTuple):
    """The mode as which a program uses them, and why."""

    mode: Mode
    why: str = ""


class ChosenModes[Size]:
    """What programs of a mode and a size use, of the modes that a layout lets them choose from."""

    def __init__(
        self,
        layout: Layout,
        modes: Callable[[Mode], tuple[Mode, ...]],
        choose: Callable[[Layout, Mode, Size], ChosenMode],
    ):
        self.layout = layout
        self._modes, self._choose = modes, choose
        self._chosen: dict[tuple[Mode, Size], ChosenMode] = {}

    def __call__(self, mode: Mode, size: Size) -> Mode:
        """The mode as which programs of a mode and a size use them."""
        return self.of(mode, size).mode

    def of(self, mode: Mode, size: Size) -> ChosenMode:
        """The same, and why."""
        key = mode, size
        if key not in self._chosen:
            only, *others = self._modes(mode)
            found = self._choose(self.layout, *key) if others else ChosenMode(only, "the only one")
            self._chosen[key] = found
        return self._chosen[key]
