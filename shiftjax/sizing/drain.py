"""Which size of steps is best until all prompts that wait are done. No JAX, no queues.

A step of b tokens with d decodes computes p = b - d prompt tokens in t(b) seconds, of which each
decode waits t(b) - t0, where t0 is a step of theirs alone. Steps of b until all P prompt tokens
that wait are done would be K = ceil(P / p); prompt j, which ends at token C_j of them, has its
first token after k_j = ceil(C_j / p) steps. Whoever decodes makes a token a step, at most R of them
(the mean of the answers that have ended), and each comes t(b) - t0 late:

    D(b) = (K - 1) t(b) + t(bucket of the rest)             until all are done
    F(b) = sum_j min(k_j t(b), D(b)) + rate D(b)^2 / 2      first tokens, of those to come, too
    J(b) = WEIGHT F(b) + [ sum_j min(R, K - k_j) + d min(R, K) ] (t(b) - t0)

The step has the compiled b with the least J, among those that keep first tokens no more than
`SLACK` later than the largest step would: F(b) <= (1 + SLACK) F(largest), and the same for D.
(That a second prompt in a full step only delays the first: vLLM's pull request 33743.)

In a pipeline `depth` steps are on their way at once, and none overtakes another. One then ends
every t(b), a depth-th of what a step takes; every prompt comes depth - 1 of these later; and a
token comes once in depth steps, so that R tokens are depth R steps.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

WEIGHT = 6.0  # of a second until a first token, in seconds of tokens after it
SLACK = 0.1  # by which first tokens may be later than with the largest step


class Queue(NamedTuple):
    """What waits for steps."""

    num_decodes: int
    ends: Sequence[int]  # tokens of each prompt and of all before it, in order
    num_more: int = 0  # prompts behind these
    more_tokens: int = 0  # of all of those
    rate: float = 0.0  # prompts that are to come, a second
    answer: float = 128.0  # tokens of one
    num_others: int = 0  # decodes that have steps of their own, on their way with these
    depth: int = 1  # steps that are on their way at once


class Sized(NamedTuple):
    """What steps of a size come to; seconds."""

    drain: float  # until all that waits is done
    first: float  # until first tokens, summed over prompts
    late: float  # that tokens of decodes come later, summed

    @property
    def cost(self) -> float:
        """What is made as small as can be."""
        return WEIGHT * self.first + self.late


class Candidate(NamedTuple):
    """A size that a step could have, and what steps of it come to."""

    place: int  # of the size among all
    sized: Sized
    keeps: bool  # first tokens come no later than the slack allows


def best_size(
    sizes: Sequence[int], most: int, queue: Queue, seconds: Callable[[int, int], float]
) -> int:
    """Return the tokens of a step: one of `sizes`, which ascend, or `most` if that is less.

    `seconds(i, n)` is what a step of `sizes[i]` takes with n prompt tokens in it; with none, it is
    one of decodes alone.
    """
    kept = [each for each in candidates(sizes, most, queue, seconds) if each.keeps]
    if not kept:
        return most
    return min(most, sizes[min(kept, key=lambda each: each.sized.cost).place])


def candidates(
    sizes: Sequence[int], most: int, queue: Queue, seconds: Callable[[int, int], float]
) -> list[Candidate]:
    """Return what may be chosen, the largest first, which keeps what it has to; none: `most`."""
    num_decodes, total = queue.num_decodes, queue.ends[-1] + queue.more_tokens
    largest = min(bisect_left(sizes, min(num_decodes + total, most)), len(sizes) - 1)
    alone = seconds(size_alone(sizes, num_decodes), 0)
    found: list[Candidate] = []
    for i in range(largest, bisect_left(sizes, num_decodes + 1) - 1, -1):
        if sizes[i] <= num_decodes:
            break
        sized = _sized(sizes, i, queue, seconds, alone)
        found.append(Candidate(i, sized, not found or _keeps(sized, found[0].sized)))
    return found


def size_alone(sizes: Sequence[int], num_decodes: int) -> int:
    """Return the index of the size that a step of decodes alone has."""
    return min(bisect_left(sizes, max(num_decodes, 1)), len(sizes) - 1)


def _keeps(sized: Sized, largest: Sized) -> bool:
    """Whether first tokens come no later than the slack allows."""
    most = 1 + SLACK
    return sized.drain <= most * largest.drain and sized.first <= most * largest.first


def _sized(
    sizes: Sequence[int],
    i: int,
    queue: Queue,
    seconds: Callable[[int, int], float],
    alone: float,
) -> Sized:
    d, ends, num_more, more_tokens, rate, answer, num_others, depth = queue
    answer *= depth
    p, total = sizes[i] - d, ends[-1] + more_tokens
    each = seconds(i, min(p, total))
    num_steps = -(-total // p)
    rest = total - (num_steps - 1) * p
    last = seconds(min(bisect_left(sizes, d + rest), i), rest)
    on_way = (depth - 1) * (last if num_steps == 1 else each)
    drain, delay = (num_steps - 1) * each + last + on_way, each - alone
    num_late = (d + num_others) * min(answer, num_steps - 1)
    first, step = 0.0, 1
    for end in ends:
        step = -(-end // p)
        first += drain if step == num_steps else step * each + on_way
        num_late += min(answer, num_steps - step)
    if num_more:
        first += num_more * (step * each + on_way + drain) / 2
        num_late += num_more * min(answer, (num_steps - step) / 2)
    late = num_late * delay
    if num_steps <= answer:
        late += (d + num_others) * (last - alone)
    return Sized(drain, first + rate * drain * drain / 2, late)
