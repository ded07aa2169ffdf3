"""The links between devices and the host's memory: when copies of KV are through. No JAX.

A device of each stage copies its part of every extent, one after the other, to the host on one
timeline and from it on another, both beside its computation. A step whose extents are not there
waits in each stage for that stage's part. As on devices (`copies_device.py`), a copy to the
host begins when the stage has done all steps before it, and of a stage no more than
`Deployment.blocks_in_flight` may be on their way: the host waits before it dispatches more.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shiftjax.core.request import StepPlan
from shiftjax.costs.levels import send_seconds
from shiftjax.costs.machine import Machine, Transfer


@dataclass
class Stored:
    """The extents on the host: when they have come, and how many blocks they are."""

    there_at: dict[int, float] = field(default_factory=dict)
    num_blocks: dict[int, int] = field(default_factory=dict)

    def drop(self, extents: Sequence[int]) -> None:
        """Forget extents, also such as have never come here."""
        for extent in extents:
            self.there_at.pop(extent, None)
            self.num_blocks.pop(extent, None)


@dataclass
class _Line:
    """What one stage has on its way."""

    out_until: float = 0.0
    in_until: float = 0.0
    in_flight: deque[tuple[float, int]] = field(default_factory=deque)  # until when, blocks
    num_in_flight: int = 0
    ahead: dict[int, float] = field(default_factory=dict)  # prefetched extents

    def room_at(self, now: float, num_blocks: int, most: int) -> float:
        """When so many more blocks may be on their way, of which there may be `most`."""
        self.num_in_flight += num_blocks
        while self.in_flight:
            done, count = self.in_flight[0]
            if done > now and self.num_in_flight <= most:
                break
            now = max(now, done)
            self.in_flight.popleft()
            self.num_in_flight -= count
        return now

    def add(self, done: float, num_blocks: int) -> None:
        """A copy is on its way; `room_at` has counted its blocks."""
        self.in_flight.append((done, num_blocks))


class HostLink:
    """Those of one group, whose stages have blocks of so many bytes on a device."""

    def __init__(self, machine: Machine, block_bytes: Sequence[int], most: int, stored: Stored):
        self._machine, self._block_bytes, self._stored = machine, block_bytes, stored
        self._most = most  # blocks on their way in a stage
        self._lines = [_Line() for _ in block_bytes]

    @property
    def quiet_at(self) -> float:
        """When all copies are through."""
        return max(max(line.out_until, line.in_until) for line in self._lines)

    def move(self, plan: StepPlan, stage: int, now: float, idle_at: float) -> tuple[float, float]:
        """Start a plan's copies in one stage, which has done its steps before at `idle_at`.

        Returns (when the host has dispatched them, when the step has its extents).
        """
        line, stored, there = self._lines[stage], self._stored, now
        stored.drop(plan.dropped)
        plan.dropped.clear()
        for extent, blocks in plan.offloads:
            now = line.room_at(now, len(blocks), self._most)
            seconds = self._seconds(self._machine.to_host, stage, len(blocks))
            line.out_until = max(now, idle_at, line.out_until) + seconds
            line.add(line.out_until, len(blocks))
            stored.num_blocks[extent] = len(blocks)
            stored.there_at[extent] = max(stored.there_at.get(extent, 0.0), line.out_until)
        for extent, blocks in plan.restores:
            now = line.room_at(now, len(blocks), self._most)
            done = line.ahead.pop(extent, None)
            done = self._fetch(line, stage, extent, len(blocks), now) if done is None else done
            line.add(done, len(blocks))
            there = max(there, done)
        for units, blocks, _ in plan.unit_restores:
            now = line.room_at(now, len(blocks), self._most)
            here = max(stored.there_at[extent] for extent, _ in units)
            done = self._receive(line, stage, len(blocks), max(now, here))
            line.add(done, len(blocks))
            there = max(there, done)
        line.ahead = {
            extent: line.ahead[extent]
            if extent in line.ahead
            else self._fetch(line, stage, extent, stored.num_blocks[extent], now)
            for extent in plan.prefetches
        }
        return now, max(now, there)

    def _fetch(self, line: _Line, stage: int, extent: int, num_blocks: int, now: float) -> float:
        """When an extent will be on the devices."""
        return self._receive(line, stage, num_blocks, max(now, self._stored.there_at[extent]))

    def _receive(self, line: _Line, stage: int, num_blocks: int, begin: float) -> float:
        """When so many blocks will be on the devices, if they may start to travel at `begin`."""
        seconds = self._seconds(self._machine.from_host, stage, num_blocks)
        line.in_until = max(begin, line.in_until) + seconds
        return line.in_until

    def _seconds(self, ways: tuple[Transfer, ...], stage: int, num_blocks: int) -> float:
        return send_seconds(ways, num_blocks * self._block_bytes[stage])
