"""As in which mode a step uses the experts: a property of each program, a mode and a size. No JAX.

Devices that split experts further than the step's mode splits weights bring their tokens together;
those that split them less read more experts. Which is better depends on the tokens of a step: with
few the experts that are read decide, with many the tokens that are moved.
"""

from collections.abc import Callable
from typing import NamedTuple

from shiftjax.arch.formats import Formats
from shiftjax.costs.chosen_modes import ChosenMode, ChosenModes
from shiftjax.costs.collectives import exchange_of_experts, gather_of_experts
from shiftjax.costs.expert_load import room_to_exchange
from shiftjax.costs.expert_part import load_of
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout, round_up

# What a byte that devices exchange counts beside one that a device reads: with what it takes to
# start, links of GPUs are about so many times as slow as their memory.
MOVED_BYTES = 30


# Chooses among the modes as which steps of a mode and so many tokens may use experts.
Choose = Callable[[Layout, Mode, int], ChosenMode]


class ExpertModes(ChosenModes[int]):
    """As in which mode the steps of a layout use experts, by their padded tokens."""

    def __init__(self, layout: Layout, choose: Choose):
        super().__init__(layout, layout.expert_modes, choose)


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

    def choose(layout: Layout, mode: Mode, num_tokens: int) -> ChosenMode:
        padded = round_up(num_tokens, mode.sp)
        found = {
            used: bytes_of(layout, mode, used, padded, formats)
            for used in layout.expert_modes(mode)
        }
        best = min(found, key=lambda used: (found[used].weighed, used.sp))
        read, moved = (f"{size / 1e6:.1f} MB" for size in found[best])
        return ChosenMode(best, f"fewest bytes a layer: {read} read, {moved} moved")

    return choose
