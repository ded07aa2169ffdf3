"""Micro-batches of a pipeline: which sequences step together, and when. No JAX.

A group that is a pipeline of S parts computes up to S steps at a time, one in each part. A step
decodes the sequences of one *micro-batch*, 1/S of those that run (Seesaw, arXiv 2503.06433), so
that the next part works on them while this one takes the next micro-batch. A sequence keeps its
micro-batch while it runs. A group that is no pipeline has one, with all sequences.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from shiftjax.core import request
from shiftjax.core.request import StepPlan


def num_sampling(in_flight: Iterable[StepPlan], micro_batch: int) -> int:
    """Steps in flight that sample tokens of a micro-batch."""
    count = 0
    for plan in in_flight:
        count += plan.micro_batch == micro_batch and plan.num_rows > 0
    return count


def is_in_flight(sequence: request.SequenceState, in_flight: Iterable[StepPlan]) -> bool:
    """Whether a step in flight has something of a sequence."""
    return any(item.sequence is sequence for plan in in_flight for item in plan.scheduled)


def num_dealt(
    micro_batch: int, sizes: Sequence[int], waiting: Iterable[int], room: int, num_free: int
) -> int:
    """How many of the waiting sequences a micro-batch may admit.

    As many as come to it if all that could be admitted now were dealt, each to the emptiest: the
    first ones in the step that is planned, and the others in those of their micro-batches.

    Args:
        micro_batch: of equal ones, it is dealt to first.
        sizes: running sequences, by micro-batch.
        waiting: blocks of each waiting sequence, in their order.
        room: how many more may run.
        num_free: free blocks; the first that waits may need fewer than it has.
    """
    num, after = len(sizes), list(sizes)
    order = [(micro_batch + turn) % num for turn in range(num)]
    for num_blocks in islice(waiting, room):
        if num_free <= 0:
            break
        num_free -= num_blocks
        after[min(order, key=after.__getitem__)] += 1
    return after[micro_batch] - sizes[micro_batch]
