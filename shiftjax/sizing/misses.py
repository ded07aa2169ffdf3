"""How many requests would pass their targets, by the size of steps. No JAX, no queues.

Steps of one size take t seconds each until nothing waits: D seconds for the prompts that wait, and
B = D / (1 - u) with those that come meanwhile, where u is the share of the time that these take;
`HORIZON` at most. From then on a step takes t0, that of the decodes alone.

A decode whose target is T seconds a token is ahead by c: what its tokens might have taken, less
what they took. It loses t - T with each of the N steps until B, then gains T - t0. So it is behind
its target between

    m1 = c / (t - T)    and    m2 = N + (N (t - T) - c) / (T - t0)    tokens from now,

and passes it if its answer ends there. Nobody knows when that is: after R more tokens on average,
whatever it had, hence with probability exp(-m1 / R) - exp(-m2 / R).

A prompt passes its target if its first token comes later than that; else it becomes a decode.
So does who comes in B. And who comes while more waits than the target T1 allows will be late: that
is rate / (1 - load) requests for each second of D above T1. Since requests do not come evenly, what
waits by then is D and anything from -s to s more, with s = SPREAD * T1, so seconds above T1 are

    (D - T1 + s)^2 / (4 s)    on average, between T1 - s and T1 + s.

The load is that of the largest steps, the same for all sizes, and a second takes `LONGEST` at most
to go: this term says what a smaller size costs those who come in a burst.

Whose first token was late has passed its target already, and is not counted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shiftjax.core.request import ScheduledSequence, SequenceState
from shiftjax.targets import Target, Targets

HORIZON = 10.0  # seconds for which requests are taken to come as they do
COMING = 0.5  # share of the recent rate that is taken to go on, in B
LONGEST = 10.0  # seconds, at most, that a second of work above the target takes to go
SPREAD = 1.0  # of a target
MOST_DECODES = 64  # that are looked at; of more, as many at equal distances
NEVER = 1e6  # seconds of a target that is none
_PLACES = (np.arange(8) + 0.5) / 8  # among requests that are not looked at one by one
_SMALL = 1e-9


class Owed(NamedTuple):
    """What requests may take without passing their targets: seconds, in arrays by request."""

    ahead: np.ndarray  # of decodes: what their tokens might have taken, less what they took
    paces: np.ndarray  # of the same: the target of a token
    weight: float  # decodes that one of these stands for
    left: np.ndarray  # of prompts, in order: until their first tokens are late; negative: they are
    prompt_paces: np.ndarray
    usual: Target  # of prompts behind these, and of those to come


class Coming(NamedTuple):
    """What is to come, and how long answers are."""

    num_behind: int  # prompts behind those that are looked at one by one
    rate: float  # requests, a second
    prompt: float  # tokens of one
    answer: float
    token: float  # seconds of one of a prompt, in the largest steps


class Steps(NamedTuple):
    """Steps of one size until all that waits is done; seconds."""

    num_prompt_tokens: int  # of one
    each: float
    alone: float  # of one without prompts
    drain: float  # of all


def owed_to(
    prompts: Sequence[SequenceState],
    decodes: Sequence[ScheduledSequence],
    targets: Targets,
    now: float,
) -> Owed:
    """Return what prompts, in order, and decodes may take from now on."""
    by_priority: dict[int, Target] = {}

    def target_of(sequence: SequenceState) -> Target:
        priority = sequence.request.priority
        if (found := by_priority.get(priority)) is None:
            found = by_priority[priority] = _finite(targets.of(priority))
        return found

    ahead: list[float] = []
    paces: list[float] = []
    looked_at = decodes[:: -(-len(decodes) // MOST_DECODES) or 1]
    for item in looked_at:
        sequence = item.sequence
        ttft, tpot = target_of(sequence)
        first, arrival = sequence.first_token_seconds, sequence.request.arrival_seconds
        if tpot == NEVER or (now if first is None else first) - arrival > ttft:
            continue
        took = 0.0 if first is None else sequence.last_token_seconds - first
        ahead.append(tpot * max(0, sequence.num_output_tokens - 1) - took)
        paces.append(tpot)
    left: list[float] = []
    for sequence in prompts:
        ttft, first = target_of(sequence).ttft, sequence.first_token_seconds
        arrival = sequence.request.arrival_seconds
        is_met = first is not None and first - arrival <= ttft  # it was preempted since
        left.append(NEVER if is_met else ttft - (now - arrival))
    return Owed(
        np.array(ahead),
        np.array(paces),
        len(decodes) / max(1, len(looked_at)),
        np.array(left),
        np.array([target_of(sequence).tpot for sequence in prompts]),
        _finite(targets.of(0)),
    )


def _finite(target: Target) -> Target:
    return Target(min(target.ttft, NEVER), min(target.tpot, NEVER))


def num_missed(owed: Owed, ends: np.ndarray, coming: Coming, steps: Steps) -> float:
    """Return how many requests that can keep to their targets would not, about.

    `ends` are the tokens of each prompt and of all before it.
    """
    p, each, _, drain = steps
    ttft, tpot = owed.usual
    rate, num_places = COMING * coming.rate, len(_PLACES)
    share = rate * coming.prompt * each / p
    busy = max(drain, min(HORIZON, drain / max(_SMALL, 1 - share)))
    # Prompts one by one, those behind them, those to come: when they begin to decode.
    waits = np.minimum(np.ceil(ends / p) * each, drain)
    behind = waits[-1] + _PLACES * (drain - waits[-1])
    came = _PLACES * busy
    begun = np.concatenate((waits, behind, came + np.maximum(drain - came * (1 - share), 0.0)))
    least = min(ttft, owed.left[-1])
    left = np.concatenate((owed.left, least + _PLACES * (ttft - least)))
    missed = _chances(
        np.zeros(len(begun)),
        np.concatenate((owed.prompt_paces, np.full(2 * num_places, tpot))),
        np.maximum(busy - begun, 0.0),
        steps,
        coming.answer,
    )
    missed[-num_places:] *= rate * busy / num_places
    here = missed[:-num_places]
    here[begun[:-num_places] > left] = 1.0
    here[left <= 0] = 0.0
    here[-num_places:] *= coming.num_behind / num_places
    num = float(missed.sum()) + _late_later(drain, ttft, coming)
    if len(owed.ahead):
        decodes = _chances(owed.ahead, owed.paces, busy, steps, coming.answer)
        num += owed.weight * float(decodes.sum())
    return num


def _late_later(drain: float, ttft: float, coming: Coming) -> float:
    """How many of those to come will be late for what waits now."""
    if ttft == NEVER:
        return 0.0
    load = coming.rate * coming.prompt * coming.token
    seconds = min(LONGEST, 1 / max(_SMALL, 1 - load))
    spread = SPREAD * ttft
    above = drain - ttft
    if above < spread:
        above = max(0.0, above + spread) ** 2 / (4 * spread)
    return coming.rate * seconds * above


def _chances(
    ahead: np.ndarray,
    paces: np.ndarray,
    busy: np.ndarray | float,
    steps: Steps,
    answer: float,
) -> np.ndarray:
    """How likely decodes are to pass their targets, if steps have prompts for `busy` seconds."""
    num_steps = busy / steps.each
    slower = steps.each - paces  # by so much with each step
    debt = num_steps * slower - ahead  # at the end of these
    first = np.maximum(ahead, 0.0) / np.maximum(slower, _SMALL)
    after = num_steps + debt / np.maximum(paces - steps.alone, _SMALL)
    last = np.where(debt > 0, after, -ahead / np.maximum(-slower, _SMALL))
    return np.maximum(np.exp(-first / answer) - np.exp(-np.maximum(last, 0.0) / answer), 0.0)
