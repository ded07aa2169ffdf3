"""What it takes to move running sequences between groups of different widths. No JAX.

Of `k` narrow groups that are bound, a device gives away all its tokens but the part of the heads,
or of the positions, that it keeps: (k - 1) / k of its bytes. They travel in calls of equal size,
turns of one loop on the devices: `blocks_per_call` wide blocks of each narrow group, one all-to-all
whose result on a device is k of these. All devices send at once, so a move takes as long as its
fullest narrow group; gather and scatter read and write the same bytes in the device's memory, twice
each with what is in between.
"""

from typing import NamedTuple

from shiftjax.arch.formats import Formats
from shiftjax.costs.collectives import Collective
from shiftjax.costs.levels import transfer_seconds
from shiftjax.costs.machine import Machine
from shiftjax.costs.memory import block_token_bytes
from shiftjax.parallel.layout import Layout

MOST_CALLS = 64  # that are dispatched together, as turns of one loop
POOL_SHARE = 256  # of a pool's bytes a call moves one part; its temporaries are twice that
COPIES = 6  # of the moved bytes in a device's memory: gathered, turned, exchanged, turned, written
INNER_COPIES = 4  # of the bytes of blocks that stay in their pool: read and written, twice
CALL_KERNELS = 2  # a layer: its keys and its values are written; few kernels read all layers'


def blocks_per_call(num_blocks: int, ways: int) -> int:
    """Wide blocks of each narrow group that one call moves, in pools of so many blocks."""
    return max(1, num_blocks // (POOL_SHARE * ways))


class MoveCosts(NamedTuple):
    """Predicts moves between the groups of one fleet; `layout` is that of its narrowest group."""

    layout: Layout
    formats: Formats
    machine: Machine
    block_size: int  # tokens of a block of the narrowest group; in bytes all are as large
    num_blocks: int  # of a pool

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on one device, in every width."""
        own_tokens = self.block_size // self.layout.position_ways
        return own_tokens * block_token_bytes(self.layout, self.formats)

    def blocks_per_call(self, ways: int) -> int:
        """Wide blocks of each of `ways` narrow groups that one call moves."""
        return blocks_per_call(self.num_blocks, ways)

    def call_bytes(self, ways: int) -> int:
        """Bytes that a device receives in one call, its own part and padding included."""
        return ways * self.blocks_per_call(ways) * self.block_bytes

    def call_seconds(self, ways: int) -> float:
        """Seconds of the devices in one call."""
        num_bytes = self.call_bytes(ways)
        move = Collective("all-to-all", ways, num_bytes, 1)
        kernels = CALL_KERNELS * self.layout.model.num_layers * self.machine.kernel_seconds
        moved = transfer_seconds(self.machine.all_to_all, move)
        return moved + COPIES * num_bytes / self._rate + kernels

    def copy_seconds(self, num_blocks: int) -> float:
        """Seconds of the devices until so many blocks are copied inside their pool."""
        return INNER_COPIES * num_blocks * self.block_bytes / self._rate

    def side_seconds(self, num_blocks: int) -> float:
        """Seconds of the devices of one side, where other devices take or give so many blocks."""
        kernels = CALL_KERNELS * self.layout.model.num_layers * self.machine.kernel_seconds
        return COPIES / 2 * num_blocks * self.block_bytes / self._rate + kernels

    def seconds(self, num_tokens: int, ways: int) -> float:
        """Seconds of the devices until the tokens of the fullest narrow group have moved.

        `num_tokens` are those of one of its units. In calls that are full, but for the last.
        """
        num_bytes = num_tokens * self.block_bytes / self.block_size
        return -(-num_bytes // self.call_bytes(ways)) * self.call_seconds(ways)

    @property
    def _rate(self) -> float:
        return self.machine.memory_bytes_per_second * self.machine.memory_efficiency
