"""What it takes to move running sequences between groups of different widths. No JAX.

A device of a narrow group of `n` tokens gives away all of them but the part of the heads that it
keeps: (k - 1) / k of its bytes, where k narrow groups are bound. All devices send at once, so a
move takes as long as its fullest unit; gather and scatter read and write the same bytes in the
device's memory, twice each with what is in between.
"""

from typing import NamedTuple

from shiftjax.arch.formats import Formats
from shiftjax.costs.collectives import Collective
from shiftjax.costs.machine import Machine
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.costs.step import transfer_seconds
from shiftjax.parallel.layout import Layout

COPIES = 6  # of the moved bytes in a device's memory: gathered, turned, exchanged, turned, written


class MoveCosts(NamedTuple):
    """Predicts moves between the groups of one fleet; `layout` is that of its narrowest group."""

    layout: Layout
    formats: Formats
    machine: Machine

    def num_bytes(self, num_tokens: int, ways: int) -> int:
        """Bytes that a device exchanges for so many tokens of its unit, its own part included."""
        del ways  # what it keeps travels with the rest
        return num_tokens * kv_token_bytes(self.layout, self.formats)

    def seconds(self, num_tokens: int, ways: int) -> float:
        """Seconds of the devices until the tokens of the fullest narrow group have moved."""
        num_bytes = self.num_bytes(num_tokens, ways)
        move = Collective("all-to-all", ways, num_bytes, 1)
        rate = self.machine.memory_bytes_per_second * self.machine.memory_efficiency
        return transfer_seconds(self.machine.all_to_all, move) + COPIES * num_bytes / rate
