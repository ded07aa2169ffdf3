"""The devices of two configurations, which have them in turn: one phase prefills, one decodes.

Programs of both are compiled at the start, out of shapes alone, and stay. Weights and KV pools are
those of one phase: at a switch those of the other are let go before anything new is put in their
place, so devices never hold more than one configuration. Weights come out of one copy in host
memory (Seesaw, arXiv 2503.06433, section 4.1); KV lies in the host tier, which any layout reads.

No step is tried at a switch: at its first run after one the launches of a step's CUDA graph get
other addresses, which takes less than an empty step of its size does (docs/phases.md).
"""

import logging
import time
from collections.abc import Mapping, Sequence

from shiftjax.device.groups import Placed, load_weights
from shiftjax.device.place import Progress, Rows
from shiftjax.phases.resharding import Phase

logger = logging.getLogger(__name__)


def silent(task: str, done: int, total: int) -> None:
    """Show nothing: a switch is no start."""


class DeviceExchange:
    """Gives the devices to one phase or the other; see `phases.resharding.Exchange`."""

    def __init__(self, groups: Mapping[Phase, Sequence[Placed]], rows: Rows):
        self._groups, self._rows = groups, rows
        self.num_moved_bytes = 0  # of weights, to devices

    def load(self, phase: Phase, progress: Progress = silent) -> None:
        """Let go of what the other phase holds, and load this one; waits until all is there.

        Raises what makes it fail; nothing is held then, and no phase can step.
        """
        begin = time.perf_counter()
        self._drop()
        try:
            num_bytes = load_weights(self._groups[phase], self._rows, progress)
            for placed in self._groups[phase]:
                placed.memory.wait()
        except Exception:
            self._drop()
            raise
        self.num_moved_bytes += num_bytes
        size, seconds = num_bytes / 1e9, time.perf_counter() - begin
        logger.info("%s: %.3f GB of weights loaded in %.2f s", phase, size, seconds)

    def _drop(self) -> None:
        for groups in self._groups.values():
            for placed in groups:
                placed.memory.drop()
