"""As in which mode a step uses the experts: a property of each program, a mode and a size. No JAX.

Devices that split experts further than the step's mode splits weights bring their tokens together;
those that split them less read more experts. Which is better depends on the tokens of a step: with
few the experts that are read decide, with many the tokens that are moved.
"""

from collections.abc import Callable
from typing import NamedTuple

from shiftjax.costs.expert_load import room_of_exchange
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout


class ExpertMode(NamedTuple):
    """The mode as which a program uses experts, and why."""

    mode: Mode
    why: str = ""


# Chooses among the modes as which steps of a mode and so many tokens may use experts.
Choose = Callable[[Layout, Mode, int], ExpertMode]


class ExpertModes:
    """As in which mode the steps of a layout use experts, chosen once for each mode and size."""

    def __init__(self, layout: Layout, choose: Choose | None = None):
        self.layout = layout
        self._choose = choose or over_all
        self._chosen: dict[tuple[Mode, int], ExpertMode] = {}

    def __call__(self, mode: Mode, num_tokens: int) -> Mode:
        """The mode as which steps of a mode use experts that are padded to so many tokens."""
        return self.of(mode, num_tokens).mode

    def of(self, mode: Mode, num_tokens: int) -> ExpertMode:
        """The same, and why."""
        key = mode, num_tokens
        if key not in self._chosen:
            self._chosen[key] = self._choose(self.layout, *key)
        return self._chosen[key]


def over_all(layout: Layout, mode: Mode, num_tokens: int) -> ExpertMode:
    """All devices split the experts, whatever the step is."""
    del mode, num_tokens
    return ExpertMode(layout.shift, "over all devices")


def as_in(sp: int) -> Choose:
    """Return what uses experts as in the mode that splits tokens `sp` ways, or the nearest."""

    def choose(layout: Layout, mode: Mode, num_tokens: int) -> ExpertMode:
        del num_tokens
        possible = layout.expert_modes(mode)
        return ExpertMode(min(possible, key=lambda each: (abs(each.sp - sp), each.sp)), "as asked")

    return choose


def room_to_exchange(layout: Layout, mode: Mode, experts: Mode, num_tokens: int) -> int:
    """Rows kept free for pairs between any two devices; 0: tokens are gathered, or not moved.

    Only experts over all devices have pairs sent to them.
    """
    return room_of_exchange(layout, mode, num_tokens) if experts.sp == 1 else 0
