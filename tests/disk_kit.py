"""Engines over echo runners with a disk behind the host tier, whose threads run when told to."""

from collections import deque
from pathlib import Path

import numpy as np
from echo_kit import make_engine, runner_of

from shiftjax.core.engine import Engine
from shiftjax.disk_tier.chunk_file import BlockShape
from shiftjax.disk_tier.disk import Disk, DiskPlace, Threads
from shiftjax.disk_tier.disk_blocks import DiskBlocks
from shiftjax.disk_tier.waits import Waits


class EchoPayloads:
    """The extents of echo runners: the tokens of each block."""

    def __init__(self, host: dict[int, list[np.ndarray]]):
        self.host = host

    def get(self, number: int) -> list[np.ndarray] | None:
        return self.host.get(number)

    def pieces(self, payload: list[np.ndarray]) -> list[np.ndarray]:
        return [np.stack(payload).astype(np.int8)]  # no more than a block's bytes

    def put(self, number: int, shape: BlockShape, pieces: list[np.ndarray]) -> None:
        (piece,) = pieces
        self.host[number] = list(piece.view(np.int8).astype(int).reshape(shape))


class SlowDisk(Disk):
    """Runs jobs of its threads as `pace` says, on each look: so many of one thread, in turns."""

    def __init__(self, place: DiskPlace, pace: list[int]):
        self.jobs = deque(), deque()
        self.pace, self.num_looks = pace, 0
        super().__init__(place, Threads(*(each.append for each in self.jobs)))

    def run_jobs(self, which: int, most: int = 1 << 30) -> None:
        while self.jobs[which] and most:
            self.jobs[which].popleft()()
            most -= 1

    def enter(self) -> None:
        self.num_looks += 1
        most = self.pace[self.num_looks % len(self.pace)]
        self.run_jobs(self.num_looks % 2, most)
        super().enter()

    def pause(self) -> None:
        self.run_jobs(1, 1)
        super().pause()

    def settle(self) -> None:
        """Have all jobs run that there are."""
        while any(self.jobs):
            for which in (0, 1):
                self.run_jobs(which)
            super().enter()


def with_disk(
    directory: Path, num_bytes: int = 1 << 20, pace: list[int] | None = None, **options
) -> tuple[Engine, SlowDisk]:
    """An engine with two tiers, and a directory as the third."""
    engine = make_engine(**options)
    memory = engine.lanes[0].scheduler.tables.tier.memory
    payloads = EchoPayloads(runner_of(engine).host)
    disk = SlowDisk(DiskPlace(directory, num_bytes, "echo" * 8, payloads), pace or [1 << 30])
    waits = Waits(disk)
    for number, lane in enumerate(engine.lanes):
        tier = lane.scheduler.tables.tier
        sizes = tier.block_size, tier.block_bytes, lane.scheduler.config.hash_size
        own = DiskBlocks(memory, disk, waits, *sizes)
        lane.scheduler.tables.tier = own
        runner_of(engine, number).num_host_blocks = 1 << 30  # what is read may be there early
    return engine, disk
