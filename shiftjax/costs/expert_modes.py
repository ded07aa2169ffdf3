"""As in which mode a step uses the experts: a property of each program, a mode and a size. No JAX.

Devices that split experts further than the step's mode splits weights bring their tokens together;
those that split them less read more experts. Which is better depends on the tokens of a step: with
few the experts that are read decide, with many the tokens that are moved.
"""

from collections.abc import Callable
from typing import NamedTuple

from shiftjax.arch.formats import Formats
from shiftjax.costs.collectives import exchange_of_experts, gather_of_experts
from shiftjax.costs.expert_load import room_to_exchange
from shiftjax.costs.expert_part import load_of
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout, round_up

# What a byte that devices exchange counts beside one that a device reads: with what it takes to
# start, links of GPUs are about so many times as slow as their memory.
MOVED_BYTES = 30


class ExpertMode(NamedTuple):
    """The mode as which a program uses experts, and why."""

    mode: Mode
    why: str = ""


# Chooses among the modes as which steps of a mode and so many tokens may use experts.
Choose = Callable[[Layout, Mode, int], ExpertMode]


class ExpertModes:
    """As in which mode the steps of a layout use experts, chosen once for each mode and size."""

    def __init__(self, layout: Layout, choose: Choose):
        self.layout = layout
        self._choose = choose
        self._chosen: dict[tuple[Mode, int], ExpertMode] = {}

    def __call__(self, mode: Mode, num_tokens: int) -> Mode:
        """The mode as which steps of a mode use experts that are padded to so many tokens."""
        return self.of(mode, num_tokens).mode

    def of(self, mode: Mode, num_tokens: int) -> ExpertMode:
        """The same, and why."""
        key = mode, num_tokens
        if key not in self._chosen:
            only, *others = self.layout.expert_modes(mode)
            found = self._choose(self.layout, *key) if others else ExpertMode(only, "the only one")
            self._chosen[key] = found
        return self._chosen[key]


class Bytes(NamedTuple):
    """What a device reads and moves for one layer of experts."""

    read: float  # of the experts
    moved: float  # the results of collectives

    @property
    def weighed(self) -> float:
        """As bytes that are read."""
        return self.read + MOVED_BYTES * self.moved


def bytes_of(layout: Layout, mode: Mode, used: Mode, num_tokens: int, formats: Formats) -> Bytes:
    """What a step of a mode takes that uses experts as in another; one expert's codes or numbers.

    Tokens are a multiple of `mode.sp`.
    """
    experts, width = layout.model.experts, formats.activation_bytes
    assert experts is not None
    each = 3 * layout.model.hidden_size * experts.intermediate_size * formats.weight_bytes
    if room_to_exchange(layout, mode, used, num_tokens):
        moves = exchange_of_experts(layout, mode, num_tokens, width)
    else:
        moves = gather_of_experts(layout, mode, used, num_tokens, width)
    read = load_of(layout, (mode, used), num_tokens).experts * each
    return Bytes(read, sum(move.num_bytes * move.num_times for move in moves))


def by_bytes(formats: Formats) -> Choose:
    """Return the choice of what reads and moves the fewest bytes: for machines of unknown costs."""

    def choose(layout: Layout, mode: Mode, num_tokens: int) -> ExpertMode:
        padded = round_up(num_tokens, mode.sp)
        found = {
            used: bytes_of(layout, mode, used, padded, formats)
            for used in layout.expert_modes(mode)
        }
        best = min(found, key=lambda used: (found[used].weighed, used.sp))
        read, moved = (f"{size / 1e6:.1f} MB" for size in found[best])
        return ExpertMode(best, f"fewest bytes a layer: {read} read, {moved} moved")

    return choose
