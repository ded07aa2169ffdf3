"""Pools of a fleet as tests see them: which token of which head is where, and how it moves.

A cell of a device's pool is what it would keep of one token in one head; here it says which:
`token * heads + head`. Moves are made head by head and token by token, as the definition of a
layout has it, and not as `fleet/mover_device.py` does.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shiftjax.core.request import Request
from shiftjax.fleet.fleet_policy import FleetView, NeedPolicy, Wish
from shiftjax.fleet.handover import Copy, Crossing, calls
from shiftjax.parallel.grid import Grid, Group, unit_order
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import Positions

NOTHING = -1


class EchoPools:
    """The pools of all devices, `tp` of each unit."""

    def __init__(self, layouts: Mapping[int, Layout], grid: Grid, num_blocks: int, block_size: int):
        self.layouts, self.grid, self.block_size = layouts, grid, block_size
        unit = layouts[min(layouts)].of_width(1)
        self.heads = unit.num_kv_heads
        cells = unit.kv_heads_per_device * block_size // unit.position_ways
        self.cells = np.full((grid.num_devices, num_blocks, cells), NOTHING)

    def block_tokens(self, width: int) -> int:
        return self.layouts[width].block_tokens(self.block_size)

    def parts(self, group: Group) -> list[tuple[np.ndarray, list[int], np.ndarray]]:
        """Of every device of a group its blocks, `[blocks, heads, tokens]`; which heads and tokens.

        The blocks are views.
        """
        layout, found = self.layouts[group.width], []
        size = self.block_tokens(group.width)
        positions = layout.positions(size) or Positions(1, size)
        for place, device in enumerate(self.grid.devices_of(group)):
            cells, heads = self.cells[device], layout.kv_heads_of(place)
            mine = positions.owner(np.arange(size)) == place % positions.ways
            shape = len(cells), len(heads), mine.sum()
            found.append((cells.reshape(shape), heads, np.flatnonzero(mine)))
        return found

    def write(self, group: Group, block: int, offset: int, token: int) -> None:
        for blocks, heads, mine in self.parts(group):
            blocks[block][:, mine == offset] = token * self.heads + np.array(heads)[:, None]

    def read(self, group: Group, numbers: list[int], num_tokens: int) -> list[int]:
        """The first tokens in these blocks, which every head on every device must agree on."""
        size = self.block_tokens(group.width)
        seen = np.full((self.heads, len(numbers) * size), NOTHING)
        for blocks, heads, mine in self.parts(group):
            at = (np.arange(len(numbers))[:, None] * size + mine).reshape(-1)
            for nth, head in enumerate(heads):
                token, held = np.divmod(blocks[numbers, nth].reshape(-1), self.heads)
                token = np.where(held == head, token, NOTHING - 1)
                known, at_end = seen[head, at], at >= num_tokens
                assert (at_end | (known == NOTHING) | (known == token)).all(), (
                    f"copies of {group} differ"
                )
                seen[head, at] = token
        seen = seen[:, :num_tokens]
        assert (seen == seen[0]).all(), f"heads of {group} hold other tokens"
        return seen[0].tolist()

    def whole(self, group: Group, number: int) -> np.ndarray:
        """A block as `[heads, tokens]`, from the devices of its group."""
        whole = np.full((self.heads, self.block_tokens(group.width)), NOTHING)
        for blocks, heads, mine in self.parts(group):
            whole[np.ix_(heads, mine)] = blocks[number]
        return whole

    def put(self, group: Group, number: int, whole: np.ndarray) -> None:
        for blocks, heads, mine in self.parts(group):
            blocks[number] = whole[np.ix_(heads, mine)]

    def forget(self, group: Group) -> None:
        for blocks, *_ in self.parts(group):
            blocks[:] = NOTHING


class EchoMover:
    """Moves blocks as calls of `per_call` pairs do, which read all before they write."""

    def __init__(self, pools: EchoPools, per_call: int = 2):
        self.pools, self.per_call = pools, per_call
        self.faults: set[int] = set()  # numbers of calls that fail
        self.num_calls = 0

    def move(self, crossing: Crossing) -> None:
        wide, width = crossing.wide, crossing.narrow_width
        ways, pools = wide.width // width, self.pools
        several = pools.block_tokens(wide.width) // pools.block_tokens(width)
        for call in calls(crossing.pairs, ways, self.per_call):
            self._count()
            writes = []
            for place, pairs in enumerate(call):
                first = wide.first + unit_order(ways)[place] * width
                narrow = Group(first, width)
                for _, blocks, wide_block in pairs:
                    assert 0 < len(blocks) <= several and wide_block and all(blocks)
                    if crossing.to_wide:
                        parts = [pools.whole(narrow, block) for block in blocks]
                        parts += [np.full_like(parts[0], NOTHING)] * (several - len(parts))
                        writes.append((wide, wide_block, np.concatenate(parts, axis=1)))
                    else:
                        parts = np.split(pools.whole(wide, wide_block), several, axis=1)
                        writes += [
                            (narrow, block, part)
                            for block, part in zip(blocks, parts, strict=False)
                        ]
            for group, block, whole in writes:
                pools.put(group, block, whole)

    def compact(self, copy: Copy) -> None:
        self._count()
        wholes = [self.pools.whole(copy.group, block) for block, _ in copy.blocks]
        for (_, new), whole in zip(copy.blocks, wholes, strict=True):
            self.pools.put(copy.group, new, whole)

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls in self.faults:
            raise RuntimeError("a move that was told to fail")


class Told:
    """A policy that wishes what a test tells it."""

    widens: ClassVar[bool] = True

    def __init__(self, needs: NeedPolicy | None = None):
        self.wishes: list[Wish] = []
        self.needs = needs

    def width_for(self, request: Request) -> int:
        return self.needs.width_for(request) if self.needs else 1

    def arrange(self, view: FleetView) -> Wish | None:
        if self.wishes:
            return self.wishes.pop(0)
        return self.needs.arrange(view) if self.needs else None
