"""What a step makes the attention kernels do, by their planner: a fault may show only there."""

from typing import NamedTuple

import numpy as np

from pallas_kernels.decode_terms import Q_SLOTS
from pallas_kernels.decode_work import JOBS_AT_ONCE
from pallas_kernels.step_work import StepWork


class Reached(NamedTuple):
    """At most, in a layer."""

    rings_again: int  # rounds of a worker, beyond the stages of its ring
    queries_again: int  # jobs of a worker, beyond the places of queries
    turns: int  # jobs of a row, beyond those that one turn of the combine takes
    split_tiles: int

    @property
    def names(self) -> set[str]:
        """What is done at all."""
        return {name for name, count in self._asdict().items() if count > 0}


def reached(work: StepWork, stages: int) -> Reached:
    """Read it from a divided step; `stages` are those of the decode kernel's ring."""
    decode, first = work.decode, work.decode.worker_first
    ends = np.cumsum(np.append(0, (decode.job_end - decode.job_begin)[: first[-1]]))
    splits = np.zeros((0, 4)) if work.prefill is None else work.prefill.splits
    return Reached(
        int(np.diff(ends[first]).max()) - stages,
        int(np.diff(first).max()) - Q_SLOTS,
        int(decode.row_jobs.max()) - JOBS_AT_ONCE,
        int((splits[:, 3] > 0).sum()),
    )
