"""Which kind of switching a bind takes, by prediction (`switch = auto`). No JAX.

Of what waits for the wide group, w sequences, and what runs in the groups that give way, n:

    move        n + w wait while the devices exchange the fullest unit's tokens
    sequential  w wait until the longest of the n is done
    hard        n wait until the w are done in the wide group

What comes to the fewest seconds, summed over sequences, is taken. Where nothing waits for the group
the bind is for those that run: they move.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shiftjax.core.lane import Lane
from shiftjax.core.request import Request, SequenceState
from shiftjax.fleet.move_costs import MoveCosts
from shiftjax.parallel.arrangements import Change

UNKNOWN_OUTPUT = 256  # tokens of a request that sets no limit


class Steps(NamedTuple):
    """Predicted seconds: `decode(width, sequences, context)`, and prompt tokens per second."""

    decode: Callable[[int, int, int], float]
    prefill_rate: Callable[[int], float]


def kind_of_bind(
    change: Change,
    lanes: Sequence[Lane],
    wanting: Sequence[Request],
    steps: Steps,
    moves: MoveCosts,
) -> str:
    """Move, sequential or hard, for groups that give way to a wide one."""
    seconds = bind_seconds(change, lanes, wanting, steps, moves)
    return min(seconds, key=seconds.__getitem__)


def bind_seconds(
    change: Change,
    lanes: Sequence[Lane],
    wanting: Sequence[Request],
    steps: Steps,
    moves: MoveCosts,
) -> Mapping[str, float]:
    """What all sequences together wait, by kind; `wanting`, not empty, are for the wide group."""
    running = [(lane, each) for lane in lanes for each in lane.scheduler.running]
    num, waiting = len(running), sum(request.sampling.n for request in wanting)
    wide, narrow = change.wide.width, min(group.width for group in change.narrow)
    context = sum(each.num_computed_tokens for _, each in running)
    fullest = max(
        sum(each.num_computed_tokens for each in lane.scheduler.running) // lane.group.width
        for lane in lanes
    )
    left = max((_output_left(each) for _, each in running), default=0)
    each_context = context // max(1, num)
    per_group = -(-num // len(lanes))
    outputs = [request.sampling.max_tokens or UNKNOWN_OUTPUT for request in wanting]
    prompts = sum(len(request.prompt_token_ids) for request in wanting)
    wide_work = prompts / steps.prefill_rate(wide)
    wide_work += max(outputs) * steps.decode(wide, waiting, prompts // waiting)
    return {
        "move": (num + waiting) * moves.seconds(fullest, wide // narrow),
        "sequential": waiting * left * steps.decode(narrow, per_group, each_context),
        "hard": num * wide_work,
    }


def _output_left(sequence: SequenceState) -> int:
    """Tokens that it will still sample: up to its limit, or as many as are usual."""
    most = sequence.max_length - len(sequence.token_ids)
    return most if sequence.request.sampling.max_tokens is not None else min(most, UNKNOWN_OUTPUT)
